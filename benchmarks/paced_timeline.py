"""A quarter of a second of servers on the paced device: what host and device do, side by side.

    python benchmarks/paced_timeline.py             # in an environment with SGLang
    python benchmarks/paced_timeline.py --report    # the picture again; needs matplotlib

The device is that of paced_sglang.py. Lanes show its passes, the moments when the host launched
them, and where the device waits for the host.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from common import IMAGES, pyplot, save_plot, write

from outrider.engines.costs import PROFILES
from outrider.report import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "sglang"))
from paced.texts import prompts

RESULT = Path(__file__).parent / "results" / "paced_timeline.json"
SECONDS = 0.25
CELLS = (("edit", 16), ("chat", 16))
CONTENDERS: dict[str, dict[str, Any]] = {
    "bare": {},
    "bare, no overlap": {"flags": ("--disable-overlap-schedule",)},
    "Outrider": {"profile": {"drafter": "adaptive", "max_drafts": 24}},
}


def main() -> None:
    """Measure and draw, or only draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="h100-8b", choices=list(PROFILES))
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.report:
        write("paced_timeline", measure(args.device), RESULT)
    if pyplot() is not None:
        plot(json.loads(RESULT.read_text()))


def measure(device: str) -> dict[str, Any]:
    """Return a window of each contender's passes in each cell."""
    from paced_servers import Contender, run, servers

    contenders = {name: Contender(**fields) for name, fields in CONTENDERS.items()}
    most = max(batch for _, batch in CELLS)
    flags = ["--max-running-requests", str(most), "--max-total-tokens", str(most * 4096)]
    result: dict[str, Any] = {"provenance": provenance(), "device": device, "lanes": []}
    with servers(device, contenders, flags) as running:
        for kind, batch in CELLS:
            for name, server in running.items():
                for first in (900, 0):  # once to get warm
                    passes, _ = run(server, prompts(kind, batch, 0, first=first), batch, 200)
                lane = {"contender": name, "kind": kind, "batch": batch}
                result["lanes"].append({**lane, "passes": _window(passes, batch)})
    return result


def _window(passes: list[Any], batch: int) -> list[dict[str, float]]:
    """Return the passes of the middle of a run, with times from the window's begin on."""
    steps = [made for made in passes if made.kind == "decode" and made.requests == batch]
    begin = steps[len(steps) // 2].start
    return [
        {
            "rows": made.rows,
            **{name: round(getattr(made, name) - begin, 6) for name in ("queued", "start", "done")},
        }
        for made in steps
        if begin <= made.start < begin + SECONDS
    ]


def plot(result: dict[str, Any]) -> None:
    """Draw a panel for each cell, with two lanes for each contender."""
    plt = pyplot()
    assert plt is not None
    figure, panels = plt.subplots(len(CELLS), 1, figsize=(10, 5.6), sharex=True)
    for panel, (kind, batch) in zip(panels, CELLS, strict=True):
        lanes = [x for x in result["lanes"] if (x["kind"], x["batch"]) == (kind, batch)]
        names = []
        for y, lane in enumerate(reversed(lanes)):
            made, base = lane["passes"], 2.4 * y
            names += [(base, f"{lane['contender']}: host"), (base + 1, "device")]
            for one, after in zip(made, [*made[1:], None], strict=True):
                drafts = one["rows"] > batch
                color = "tab:blue" if drafts else "lightsteelblue"
                width = 1000 * (one["done"] - one["start"])
                panel.broken_barh([(1000 * one["start"], width)], (base + 0.65, 0.7), color=color)
                if after is not None and after["queued"] > one["done"]:
                    # the device has nothing to do until the host has launched the next pass
                    wait = 1000 * one["done"], 1000 * (after["queued"] - one["done"])
                    panel.broken_barh([wait], (base - 0.35, 0.7), color="tab:red")
            launches = [1000 * one["queued"] for one in made]
            panel.plot(launches, [base] * len(made), "|", color="black", markersize=9)
        panel.set_yticks([y for y, _ in names], [name for _, name in names])
        panel.set_xlim(0, 1000 * SECONDS)
        panel.set_title(f"{kind}, {batch} requests", loc="left", fontsize=10)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    panels[-1].set_xlabel(
        "milliseconds; blue: passes (dark: with drafts); bars: launches; red: the device waits"
    )
    figure.tight_layout()
    save_plot(figure, IMAGES / "paced_timeline")


if __name__ == "__main__":
    main()
