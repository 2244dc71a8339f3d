"""Outrider at the speed of a GPU: real SGLang servers on a paced device, side by side.

    python benchmarks/paced_sglang.py                # in scripts/setup-sglang-cpu's environment
    python benchmarks/paced_sglang.py --quick        # a few cells, in 2-3 minutes
    python benchmarks/paced_sglang.py --report       # table, goals and, with matplotlib, the plot

The device (tests/engines/sglang/paced, docs/paced.md) is made up: a pass is queued and costs what a
cost profile says, whoever reads its result waits, and what is read are recorded texts. All else is
real: SGLang's scheduler and HTTP, and everything of Outrider.

A cell is a kind of text and a batch of B requests. Each contender has a server of its own, of which
one works at a time while the others are suspended. Contenders take turns in every round; what
counts is the ratio of speeds within a round. Speed is that of the steps in which all B requests are
decoded: reading prompts, and requests that end one after the other, are left out. If one answer is
not the recorded text, the run stops and says no speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import IMAGES, pyplot, save_plot, spread, write
from rich.console import Console
from rich.table import Table

from outrider.engines.costs import PROFILES
from outrider.report import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "sglang"))
from paced.texts import KINDS, MIXED, prompts

RESULT = Path(__file__).parent / "results" / "paced_sglang.json"
OVERLAP, SYNC, NONE = "bare", "bare, no overlap", "none"
ADAPTIVE, WITH_MODEL = "adaptive", "adaptive + model"
MOST_DRAFTS = 24
CELLS = {
    1: (MIXED, *KINDS),
    4: (MIXED, "edit"),
    16: (MIXED, "edit"),
    64: (MIXED, *KINDS),
    256: (MIXED, "edit"),
}
"""Which kinds of text are tried at which batch. Mixed at B = 1 is one kind after the other."""

QUICK = {1: ("edit", "chat"), 64: (MIXED,)}
TOKENS = {1: 320, 4: 320, 16: 256, 64: 160, 256: 128}
"""Of each answer."""

Run = dict[str, Any]

CONTENDERS: dict[str, dict[str, Any]] = {
    OVERLAP: {},
    SYNC: {"flags": ("--disable-overlap-schedule",)},
    NONE: {"profile": {"drafter": "none"}},
    "suffix 4": {"profile": {"drafter": "suffix", "max_drafts": 4}},
    "device 4": {"profile": {"drafter": "device", "max_drafts": 4}},
    "device 12": {"profile": {"drafter": "device", "max_drafts": 12}},
    ADAPTIVE: {"profile": {"drafter": "adaptive", "max_drafts": MOST_DRAFTS}},
    WITH_MODEL: {
        "profile": {"drafter": "adaptive", "max_drafts": MOST_DRAFTS},
        "draft_model": True,
    },
}
"""Fields of paced_servers.Contender."""


def main() -> None:
    """Measure and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="h100-8b", choices=list(PROFILES))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--batches", type=int, nargs="+", help="instead of 1 4 16 64 256")
    parser.add_argument("--kinds", nargs="+", choices=[MIXED, *KINDS], help="at every batch")
    parser.add_argument(
        "--context", type=int, default=0, help="prompts have at least so many tokens"
    )
    parser.add_argument("--tokens", type=int, help="of each answer, at every batch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few cells, one round")
    parser.add_argument("--parts", action="store_true", help="also time the parts of our steps")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--out", type=Path, default=RESULT, help="result file")
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.report else measure(args)
    result |= summaries(result["runs"])
    write("paced_sglang", result, args.out)
    show(result, markdown=args.markdown)
    if pyplot() is not None:
        plot(result, IMAGES if args.out == RESULT else args.out.parent)


# -- measuring


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds of all cells. Return the runs, and what made them."""
    from paced_servers import ask, run, servers  # a report needs neither SGLang nor its environment

    cells = _cells(args)
    rounds = 1 if args.quick else args.rounds
    profile = PROFILES[args.device]
    result: dict[str, Any] = {
        "provenance": provenance(),
        "device": {"profile": profile.name, "source": profile.source},
        "context": args.context,
        "runs": [],
    }
    runs: list[Run] = result["runs"]
    started = time.monotonic()
    flags = size_flags(cells, partial(_most, args), args.context)
    with servers(args.device, _contenders(args.contenders), flags) as running:
        for batch in dict.fromkeys(batch for _, batch in cells):
            for server in running.values():  # control has met traffic before
                run(server, prompts(MIXED, batch, args.context, first=900), batch, 64)
        for round_ in range(rounds):
            for number, (kind, batch) in enumerate(cells):
                turn = (number + round_) % len(running)
                order = [*running.items()][turn:] + [*running.items()][:turn]
                asked = prompts(kind, batch, args.context, first=round_ * batch)
                for name, server in order:
                    found = ask(server, asked, batch, _most(args, batch))
                    place = {"contender": name, "kind": kind, "batch": batch, "round": round_}
                    runs.append({**place, **found})
                minutes = (time.monotonic() - started) / 60
                print(f"{minutes:4.1f} min, round {round_}, {_say(runs, kind, batch, round_)}")
                sys.stdout.flush()
    if args.parts:
        result["parts"] = measure_parts(args, cells)
    return result


def _cells(args: argparse.Namespace) -> list[tuple[str, int]]:
    table = dict(QUICK if args.quick else CELLS)
    batches = args.batches or list(table)
    return [(kind, batch) for batch in batches for kind in args.kinds or table.get(batch, (MIXED,))]


def size_flags(
    cells: Sequence[tuple[str, int]], tokens_at: Callable[[int], int], context: int = 0
) -> tuple[str, ...]:
    """Return the flags that make room for the largest cell.

    tokens_at: returns how many tokens an answer has at a batch size
    """
    sizes = [
        (batch, max(len(p.ids) for p in prompts(kind, batch, context)), tokens_at(batch))
        for kind, batch in [*cells, *((MIXED, batch) for _, batch in cells)]
    ]
    slots = max(batch * (prompt + tokens + 2 * MOST_DRAFTS + 8) for batch, prompt, tokens in sizes)
    length = max(prompt + tokens for _, prompt, tokens in sizes) + 64
    return (
        *("--max-running-requests", str(max(batch for batch, *_ in sizes) + 8)),
        *("--max-total-tokens", str(slots + 4096), "--mem-fraction-static", "0.5"),
        *("--context-length", str(length)),
    )


def _contenders(names: Sequence[str]) -> dict[str, Any]:
    from paced_servers import Contender

    return {name: Contender(**CONTENDERS[name]) for name in names}


def _most(args: argparse.Namespace, batch: int) -> int:
    return args.tokens or TOKENS.get(batch, 128)


def measure_parts(
    args: argparse.Namespace, cells: Sequence[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Return the milliseconds of a step by part, by Outrider's own metrics, which cost time too."""
    from common_sglang import seconds_by_part
    from paced_servers import ask, run, servers

    names, found = [n for n in (NONE, ADAPTIVE, WITH_MODEL) if n in args.contenders], []
    flags = (*size_flags(cells, partial(_most, args), args.context), "--enable-metrics")
    with servers(args.device, _contenders(names), flags) as running:
        for batch in dict.fromkeys(batch for _, batch in cells):
            for name, server in running.items():
                asked = prompts(MIXED, batch, args.context)
                run(server, asked, batch, 32)
                server.resume()
                before = seconds_by_part(server)
                measured = ask(server, asked, batch, _most(args, batch))
                server.resume()
                after = seconds_by_part(server)
                server.suspend()
                parts = {part: after[part] - before[part] for part in after}
                steps = measured["steps"] / max(1e-9, measured["seconds"]) * sum(parts.values())
                found.append(
                    {
                        "contender": name,
                        "batch": batch,
                        **{part: round(1000 * s / max(1, steps), 3) for part, s in parts.items()},
                    }
                )
    return found


def _say(runs: list[Run], kind: str, batch: int, round_: int) -> str:
    here = [r for r in runs if (r["kind"], r["batch"], r["round"]) == (kind, batch, round_)]
    speeds = ", ".join(f"{r['contender']} {r['tokens_per_second']:.0f}" for r in here)
    return f"{kind} B={batch}, tokens/s: {speeds}"


# -- reporting


def summaries(runs: list[Run]) -> dict[str, Any]:
    """Return the cells and the goals of these runs."""
    places = dict.fromkeys((run["kind"], run["batch"]) for run in runs)
    cells = [
        cell_summary([run for run in runs if (run["kind"], run["batch"]) == place])
        for place in sorted(places, key=lambda p: (([MIXED, *KINDS]).index(p[0]), p[1]))
    ]
    return {"cells": cells, "goals": check(cells)}


def cell_summary(runs: list[Run]) -> dict[str, Any]:
    """Say how the contenders do in one cell: medians over rounds, ratios within a round."""
    speed = {(run["contender"], run["round"]): run["tokens_per_second"] for run in runs}
    contenders = {}
    names = {run["contender"] for run in runs}
    for name in (name for name in CONTENDERS if name in names):
        own = [run for run in runs if run["contender"] == name]
        found: dict[str, Any] = {"tokens_per_second": spread([r["tokens_per_second"] for r in own])}
        for key, other in (("times_overlap", OVERLAP), ("times_no_overlap", SYNC)):
            both = [(speed[name, r["round"]], speed.get((other, r["round"]))) for r in own]
            ratios = [mine / theirs for mine, theirs in both if theirs]
            found[key] = spread(ratios) if ratios else None
        for key in (
            "tokens_per_step", "rows_per_step", "ideal_tokens_per_second", "share_of_ideal",
            "idle_ms_median", "idle_ms_p99",
        ):  # fmt: skip
            found[key] = round(statistics.median(r[key] for r in own), 3)
        contenders[name] = found
    return {"kind": runs[0]["kind"], "batch": runs[0]["batch"], "contenders": contenders}


def check(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say of each goal whether it is reached, by medians over rounds."""

    def goal(
        text: str, contender: str, key: str, limit: float, kind: str = "", batch: int = 0,
        most: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        values = {}
        for cell in cells:
            found = cell["contenders"].get(contender, {}).get(key)
            if found is None or kind not in ("", cell["kind"]) or batch not in (0, cell["batch"]):
                continue
            value = found["median"] if isinstance(found, dict) else found
            values[f"{cell['kind']} B={cell['batch']}"] = value
        if not values:
            return {"goal": text, "reached": None}
        worst = (max if most else min)(values, key=lambda name: values[name])
        short = {n: v for n, v in values.items() if (v > limit if most else v < limit)}
        return {
            "goal": text,
            "reached": not short,
            "cells": len(values),
            "worst": f"{values[worst]} ({worst})",
            "short": short,
        }

    text = "{} at least {} x bare without overlap, every cell"
    goals = [
        goal(text.format(name, least), name, "times_no_overlap", least)
        for name, least in ((ADAPTIVE, 1.0), (NONE, 0.97))
    ]
    text = "{} at least {} x bare with overlap, every cell"
    goals += [
        goal(text.format(name, least), name, "times_overlap", least)
        for name, least in ((ADAPTIVE, 0.98), (NONE, 0.97))
    ]
    for kind, batch, least in (
        ("edit", 1, 4),
        ("edit", 16, 2.5),
        ("edit", 64, 1.5),
        (MIXED, 16, 1.3),
    ):
        text = f"adaptive at least {least} x bare with overlap on {kind}, B = {batch}"
        goals.append(goal(text, ADAPTIVE, "times_overlap", least, kind, batch))
    text = "adaptive at least 0.85 of the ideal on edit, B = 1"
    goals.append(goal(text, ADAPTIVE, "share_of_ideal", 0.85, "edit", 1))
    for batch, limit in ((1, 0.8), (64, 2.0), (256, 5.0)):
        text = f"adaptive leaves the device idle for at most {limit} ms a step, B = {batch}"
        goals.append(goal(text, ADAPTIVE, "idle_ms_median", limit, batch=batch, most=True))
        text += ", 99th percentile within twice that"
        goals.append(goal(text, ADAPTIVE, "idle_ms_p99", 2 * limit, batch=batch, most=True))
    return goals


COLUMNS = (
    "text", "B", "contender", "tokens/s", "tokens a step", "x overlap", "x no overlap",
    "ideal tokens/s", "share", "idle ms", "p99",
)  # fmt: skip


def table_rows(cells: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Return the table, a line for each contender of each cell."""

    def said(value: dict[str, float] | None) -> str:
        return "" if value is None else "{median:.2f} ({min:.2f}-{max:.2f})".format(**value)

    for cell in cells:
        for name, found in cell["contenders"].items():
            yield (
                cell["kind"],
                str(cell["batch"]),
                name,
                f"{found['tokens_per_second']['median']:,.0f}",
                f"{found['tokens_per_step']:.2f}",
                said(found["times_overlap"]),
                said(found["times_no_overlap"]),
                f"{found['ideal_tokens_per_second']:,.0f}",
                f"{found['share_of_ideal']:.2f}",
                f"{found['idle_ms_median']:.2f}",
                f"{found['idle_ms_p99']:.2f}",
            )


def show(result: dict[str, Any], markdown: bool) -> None:
    """Print the table and the goals."""
    if markdown:
        for line in (COLUMNS, ["---"] * len(COLUMNS), *table_rows(result["cells"])):
            print("| " + " | ".join(line) + " |")
    else:
        table = Table(*COLUMNS)
        for line in table_rows(result["cells"]):
            table.add_row(*line, end_section=line[2] == WITH_MODEL)
        Console(width=150).print(table)
    for parts in result.get("parts", ()):
        print(f"ms a step: {parts}")
    for goal in result["goals"]:
        state = {True: "reached", False: "NOT reached", None: "not measured"}[goal["reached"]]
        print(f"{state}: {goal['goal']}")
        if goal["reached"] is not None:
            short = f"; {len(goal['short'])} of {goal['cells']} short" if goal["short"] else ""
            print(f"    worst {goal['worst']}{short}")


def plot(result: dict[str, Any], folder: Path) -> None:
    """Draw the speed against bare SGLang with overlap, a panel for each kind of text."""
    plt = pyplot()
    cells = result["cells"]
    kinds = list(dict.fromkeys(cell["kind"] for cell in cells))
    columns = min(3, len(kinds))
    rows = -(-len(kinds) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(3 * columns, 2.7 * rows), squeeze=False, layout="constrained"
    )
    styles = {
        SYNC: ("#000000", "x", "--"),
        NONE: ("#7a7a7a", "s", ":"),
        "suffix 4": ("#c77700", "^", ":"),
        ADAPTIVE: ("#0a6ebd", "o", "-"),
        WITH_MODEL: ("#7b2fa8", "D", "-"),
    }
    batches = sorted({cell["batch"] for cell in cells})
    for axes in grid.flat[len(kinds) :]:
        axes.remove()
    for axes, kind in zip(grid.flat, kinds, strict=False):
        axes.axhline(1, color="black", linewidth=0.8)
        for name, (colour, marker, style) in styles.items():
            found = [
                (cell["batch"], cell["contenders"][name]["times_overlap"])
                for cell in cells
                if cell["kind"] == kind and name in cell["contenders"]
            ]
            found = [(batch, value["median"]) for batch, value in found if value]
            axes.plot(
                *(zip(*found, strict=True) if found else ((), ())),
                color=colour, marker=marker, linestyle=style, markersize=4, label=name,
            )  # fmt: skip
        axes.set_title(kind)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    figure.supxlabel("batch")
    figure.supylabel("times bare SGLang with overlap")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save_plot(figure, "paced_sglang", folder)


if __name__ == "__main__":
    main()
