"""Long contexts: what a verify pass reads of the cache, on Outrider's attention backend and others.

    python benchmarks/paced_context.py               # in scripts/setup-sglang-cpu's environment
    python benchmarks/paced_context.py --report      # table, goals and, with matplotlib, the plot

The servers and the device are those of paced_sglang.py. A decode batch of rows reads a request's
cache once on Outrider's own backend, and once for each row on SGLang's. `rows` verifies so there;
`auto` lets control choose between rows and SGLang's TARGET_VERIFY, which reads it once but has as
many rows for every request. The device charges what each pass reads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from common import IMAGES, pyplot, save_plot, spread, write
from rich.console import Console
from rich.table import Table

from outrider.engines.costs import PROFILES
from outrider.report import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "sglang"))
from paced.texts import prompts

RESULT = Path(__file__).parent / "results" / "paced_context.json"
CONTEXTS, BATCHES, KINDS = (1024, 8192, 32768), (1, 16), ("edit", "chat")
TOKENS = 192
"""Of each answer."""

MOST_DRAFTS = 8
BARE, OWN, ROWS, AUTO = "bare", "own backend", "stock backend, rows", "stock backend, auto"


def contenders() -> dict[str, Any]:
    """Return the servers."""
    from paced_servers import Contender

    profile = {"drafter": "adaptive", "max_drafts": MOST_DRAFTS}
    return {
        BARE: Contender(),
        OWN: Contender(profile=profile),
        ROWS: Contender(profile={**profile, "verify_pass": "rows"}, stock=True),
        AUTO: Contender(profile={**profile, "verify_pass": "auto"}, stock=True),
    }


def main() -> None:
    """Measure and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="h100-8b", choices=list(PROFILES))
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--out", type=Path, default=RESULT, help="result file")
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.report else measure(args)
    result["cells"] = summaries(result["runs"])
    result["goals"] = goals(result["cells"])
    write("paced_context", result, args.out)
    show(result, args.markdown)
    if pyplot() is not None:
        plot(result, IMAGES if args.out == RESULT else args.out.parent)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds of all cells."""
    from paced_servers import ask, servers

    profile, started = PROFILES[args.device], time.monotonic()
    most = max(args.contexts) + 2048
    flags = (
        *("--max-running-requests", str(max(args.batches) + 8), "--context-length", str(most)),
        *("--max-total-tokens", str(max(args.batches) * most), "--mem-fraction-static", "0.5"),
    )
    runs: list[dict[str, Any]] = []
    cells = [(c, b, kind) for c in args.contexts for b in args.batches for kind in KINDS]
    with servers(args.device, contenders(), flags) as running:
        for context, batch, kind in cells:
            for round_ in range(-1, args.rounds):  # the first is for control to learn
                asked = prompts(kind, batch, context, first=(round_ + 1) * batch)
                turn = round_ % len(running)
                for name, server in [*running.items()][turn:] + [*running.items()][:turn]:
                    found = ask(server, asked, batch, TOKENS)
                    if round_ >= 0:
                        where = {"context": context, "batch": batch, "kind": kind, "round": round_}
                        runs.append({"contender": name, **where, **found})
            minutes = (time.monotonic() - started) / 60
            print(f"{minutes:4.1f} min: {kind}, context {context}, B={batch}")
            sys.stdout.flush()
    device = {"profile": profile.name, "source": profile.source}
    return {"provenance": provenance(), "device": device, "runs": runs}


def summaries(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each cell, each contender's speed as a multiple of bare SGLang's."""
    cells = []
    for place in dict.fromkeys((r["kind"], r["batch"], r["context"]) for r in runs):
        here = [r for r in runs if (r["kind"], r["batch"], r["context"]) == place]
        speed = {(r["contender"], r["round"]): r["tokens_per_second"] for r in here}
        found = {}
        for name in dict.fromkeys(r["contender"] for r in here):
            own = [r for r in here if r["contender"] == name]
            found[name] = {
                "times_bare": spread(
                    [speed[name, r["round"]] / speed[BARE, r["round"]] for r in own]
                ),
                "tokens_per_step": spread([r["tokens_per_step"] for r in own]),
                "rows_per_step": spread([r["rows_per_step"] for r in own]),
            }
        cells.append(dict(zip(("kind", "batch", "context"), place, strict=True)) | {"by": found})
    return cells


def goals(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say of each goal whether it is reached, by medians over rounds."""

    def values(name: str, other: str = BARE) -> dict[str, float]:
        return {
            f"{c['kind']} B={c['batch']} {c['context']}": round(
                c["by"][name]["times_bare"]["median"] / c["by"][other]["times_bare"]["median"], 3
            )
            for c in cells
        }

    found = []
    for text, least, ratios in (
        *(
            (f"{name}: at least 0.98 x bare in every cell", 0.98, values(name))
            for name in (OWN, ROWS, AUTO)
        ),
        (f"{AUTO}: at least 0.97 x {ROWS} in every cell", 0.97, values(AUTO, ROWS)),
    ):
        worst = min(ratios, key=lambda cell: ratios[cell])
        short = {cell: value for cell, value in ratios.items() if value < least}
        found.append(
            {"goal": text, "reached": not short, "worst": f"{ratios[worst]} ({worst})"}
            | {"short": short}
        )
    return found


def show(result: dict[str, Any], markdown: bool) -> None:
    """Print the table and the goals."""
    names = [OWN, ROWS, AUTO]
    columns = ("text", "B", "context", *(f"{name}, x bare" for name in names), "tokens a step")
    lines = []
    for cell in result["cells"]:
        by = cell["by"]
        ratios = ["{median:.2f} ({min:.2f}-{max:.2f})".format(**by[n]["times_bare"]) for n in names]
        steps = " / ".join(f"{by[name]['tokens_per_step']['median']:.2f}" for name in names)
        lines.append((cell["kind"], str(cell["batch"]), f"{cell['context']:,}", *ratios, steps))
    if markdown:
        for line in (columns, ["---"] * len(columns), *lines):
            print("| " + " | ".join(line) + " |")
    else:
        table = Table(*columns)
        for line in lines:
            table.add_row(*line)
        Console(width=130).print(table)
    for goal in result["goals"]:
        print(f"{'reached' if goal['reached'] else 'NOT reached'}: {goal['goal']}")
        print(f"    worst {goal['worst']}")


def plot(result: dict[str, Any], folder: Path) -> None:
    """Draw the speed against bare SGLang by context, a panel for each text and batch."""
    plt = pyplot()
    cells = result["cells"]
    panels = list(dict.fromkeys((cell["kind"], cell["batch"]) for cell in cells))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3 * len(panels), 3), squeeze=False, layout="constrained"
    )
    styles = {OWN: ("#0a6ebd", "o", "-"), ROWS: ("#c77700", "s", ":"), AUTO: ("#7b2fa8", "D", "-")}
    for (kind, batch), ax in zip(panels, axes.flat, strict=True):
        ax.axhline(1, color="black", linewidth=0.8)
        here = [cell for cell in cells if (cell["kind"], cell["batch"]) == (kind, batch)]
        contexts = [cell["context"] for cell in here]
        for name, (colour, marker, style) in styles.items():
            ratios = [cell["by"][name]["times_bare"]["median"] for cell in here]
            ax.plot(
                contexts,
                ratios,
                color=colour,
                marker=marker,
                linestyle=style,
                markersize=4,
                label=name,
            )
        ax.set_title(f"{kind}, B = {batch}")
        ax.set_xscale("log", base=2)
        ax.set_xticks(contexts, [f"{context // 1024}k" for context in contexts])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
    figure.supxlabel("context")
    figure.supylabel("times bare SGLang")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save_plot(figure, "paced_context", folder)


if __name__ == "__main__":
    main()
