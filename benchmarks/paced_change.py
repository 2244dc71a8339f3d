"""Is a change faster or slower? Two checkouts of Outrider side by side on the paced device.

    python benchmarks/paced_change.py CHECKOUT [--device h100-8b] [--rounds 3] [--report]

CHECKOUT is the code before the change, this checkout the code after it. Both are installed into
folders of their own; the device, the texts and SGLang are those of paced_sglang.py. In each round
the two servers of a drafter answer one after the other, in turns. What counts is the ratio of their
speeds within a round.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import at_least, show_goals, spread, write
from paced_servers import Contender, ask, can_price, run, servers
from paced_sglang import (
    ADAPTIVE,
    CONTENDERS,
    MIXED,
    NONE,
    PROFILES,
    TOKENS,
    prompts,
    size_flags,
)

from outrider.report import provenance

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "paced_change.json"
DRAFTERS = (NONE, ADAPTIVE)
KINDS, BATCHES = ("edit", "chat"), (1, 16, 64, 256)
COSTS = "src/outrider/engines/costs.py"
LEAST = 0.98
"""The median speed of a cell after a change, as a multiple of that before it."""


def main() -> None:
    """Measure and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?", help="a checkout of the code before")
    parser.add_argument("--device", default="h100-8b", choices=list(PROFILES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--out", type=Path, default=RESULT, help="result file")
    args = parser.parse_args()
    result = measure(args) if args.checkout else json.loads(args.out.read_text())
    result |= summary(result["runs"])
    write("paced_change", result, args.out)
    for cell in result["cells"]:
        ratio = "{median:.3f} ({min:.3f}-{max:.3f})".format(**cell["after_by_before"])
        print(f"{cell['drafter']:10} {cell['kind']:6} B={cell['batch']:<4} {ratio}")
    show_goals(result["goals"])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds of all cells. Return the runs, and what made them."""
    if costs(args.checkout, args.device) != costs(ROOT, args.device):
        raise SystemExit(
            f"{args.device} costs something else in {args.checkout}: its steps cannot be compared. "
            f"Copy {COSTS} of this checkout there, if it has that file."
        )
    cells = [(kind, batch) for batch in args.batches for kind in KINDS]
    result: dict[str, Any] = {
        "provenance": provenance(),
        "before": commit(args.checkout),
        "after": commit(ROOT),
        "device": {"profile": args.device, "source": PROFILES[args.device].source},
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="outrider-change-") as folder:
        trees = {
            name: install(checkout, Path(folder) / name)
            for name, checkout in (("before", args.checkout), ("after", ROOT))
        }
        # both by the same clock: an older device charges the CPU for the device's work
        is_priced = all(can_price(paths) for paths in trees.values())
        contenders = {
            f"{drafter} {tree}": Contender(
                **CONTENDERS[drafter], paths=paths, price_device_work=is_priced
            )
            for drafter in DRAFTERS
            for tree, paths in trees.items()
        }
        with servers(args.device, contenders, size_flags(cells, TOKENS.__getitem__)) as running:
            for batch in args.batches:
                for server in running.values():  # control has met traffic before
                    run(server, prompts(MIXED, batch, first=900), batch, 64)
            for round_ in range(args.rounds):
                for kind, batch in cells:
                    asked = prompts(kind, batch, first=round_ * batch)
                    for drafter in DRAFTERS:
                        pair = ["before", "after"] if round_ % 2 else ["after", "before"]
                        for tree in pair:
                            found = ask(running[f"{drafter} {tree}"], asked, batch, TOKENS[batch])
                            place = {"tree": tree, "drafter": drafter, "kind": kind}
                            result["runs"].append(
                                {**place, "batch": batch, "round": round_, **found}
                            )
                    print(time.strftime("%H:%M"), f"round {round_}, {kind}, B = {batch}")
                    sys.stdout.flush()
    return result


def commit(checkout: Path) -> str:
    """Return the commit of a checkout, with a + if its tree is not clean."""
    git = ["git", "-C", str(checkout)]
    found = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    return found + "+" * bool(subprocess.check_output([*git, "status", "--porcelain", "-uno"]))


def costs(checkout: Path, device: str) -> str | None:
    """Return what passes cost on a device in a checkout, or None if it does not know the device."""
    file = checkout / COSTS
    profile = runpy.run_path(str(file))["PROFILES"].get(device) if file.exists() else None
    return profile and repr((profile.target, profile.draft, profile.head))


def install(checkout: Path, folder: Path) -> tuple[str, ...]:
    """Install a checkout without what it needs. Return what has to be first on PYTHONPATH."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.check_call([*pip, "--target", str(folder), str(checkout)])
    (site,) = checkout.resolve().glob("tests/*/sglang/site")
    return str(folder), str(site)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios of each cell, and whether one has become slower."""
    speed = {
        (run["drafter"], run["kind"], run["batch"], run["round"], run["tree"]): run for run in runs
    }
    cells = []
    for drafter, kind, batch in dict.fromkeys(key[:3] for key in speed):
        ratios = [
            after["tokens_per_second"] / speed[(*key[:4], "before")]["tokens_per_second"]
            for key, after in speed.items()
            if key[:3] == (drafter, kind, batch) and key[4] == "after"
        ]
        place = {"drafter": drafter, "kind": kind, "batch": batch}
        cells.append({**place, "after_by_before": spread(ratios)})
    medians = [cell["after_by_before"]["median"] for cell in cells]
    goals = [
        at_least(f"no cell below {LEAST} of the code before", min(medians), LEAST),
        at_least(f"all cells' median at least {LEAST}", statistics.median(medians), LEAST),
    ]
    return {"cells": cells, "goals": goals}


if __name__ == "__main__":
    main()
