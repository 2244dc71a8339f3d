"""The adaptive drafter inside SGLang: against bare SGLang and each fixed choice.

    python benchmarks/adaptive_sglang.py --partial runs.jsonl     # in scripts/setup-sglang-cpu's
    python benchmarks/adaptive_sglang.py --report runs.jsonl      # where there is matplotlib

Two real servers side by side, of which one works at a time. A cell is a kind of text and a batch of
B requests. Its prompts are put into the prefix caches first; then each method writes as much of the
same greedy answers, with all B of them being decoded. What counts is the ratio of speeds within a
round. Each round has prompts of its own. Round 0 tries every method, on half as many tokens. Later
ones judge: bare SGLang, adaptive, and those two fixed choices which were the best of the cell in
round 0 (plain decoding is one of them), of which the better is *best fixed*: what luck there is
favours it. Round 0 does not count where there are others: the best of six noisy figures is too
good.

Fixed choices are what a user can set: a drafter with its default options, which may propose fewer
than K drafts, and K. What adaptive has learned in one cell it brings to the next, as on any server.

Runs are appended to --partial after every cell; with the same file a run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common import IMAGES, chat_ids, model_path, pyplot, save_plot, spread, write
from common_sglang import (
    Suspendable,
    fill_cache,
    measure,
    outrider_flags,
    same_outputs,
    side_by_side,
)
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoTokenizer

from outrider.bench.workloads import KINDS, VARIANTS, prompts
from outrider.report import provenance

BARE, ADAPTIVE = "bare", "adaptive"
FIXED: dict[str, dict[str, Any]] = {
    "plain": {"max_drafts": 0},
    "suffix 4": {"drafter": "suffix", "max_drafts": 4},
    "suffix 12": {"drafter": "suffix", "max_drafts": 12},
    "model 2": {"drafter": "model", "max_drafts": 2},
    "model 4": {"drafter": "model", "max_drafts": 4},
    "model 8": {"drafter": "model", "max_drafts": 8},
}
METHODS = {**FIXED, ADAPTIVE: {"drafter": ADAPTIVE}}
JUDGED = 2
"""How many fixed choices go on after round 0."""

MOST_DRAFTS = 12
FLAGS = [
    *("--dtype", "bfloat16", "--mem-fraction-static", "0.6", "--max-total-tokens", "20480"),
    *("--max-running-requests", "16", "--context-length", "2048", "--enable-metrics"),
]
# the draft model reads the prompts too: without its cache entries it would draft poorly
READ_BY_BOTH = {"drafter": "model", "max_drafts": 1}

Run = dict[str, Any]


def main() -> None:
    """Measure what is missing in the partial file, or only report what is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=48, help="of each answer, in the mean")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--draft-bits", type=int, choices=[4, 8], default=4)
    parser.add_argument("--trace", type=Path, help="a line for each step of the adaptive drafter")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--partial", type=Path, help="JSON lines, appended to after every cell")
    parser.add_argument("--report", type=Path, help="measure nothing: report this partial file")
    parser.add_argument("--out", type=Path, help="folder for result and plot instead of ours")
    args = parser.parse_args()
    file = args.report or args.partial or Path(tempfile.mkdtemp()) / "adaptive_sglang.jsonl"
    if args.report is None:
        run(args, file)
    report(file, args.out)


# -- measuring


def run(args: argparse.Namespace, file: Path) -> None:
    """Measure the cells that the partial file lacks, round 0 of all cells first."""
    setting = {"target": args.target, "draft": args.draft, "dtype": "bfloat16"}
    setting["draft_bits"] = args.draft_bits
    runs = _done(file, setting)
    done = {_place(run) for run in runs}
    cells = [
        (kind, batch, round_)
        for round_ in range(args.rounds)
        for batch in args.batches
        for kind in args.kinds
        if (kind, batch, round_) not in done
        and (kind, batch) != ("mixed", 1)  # that is code: one request is of one kind
    ]
    if not cells:
        return
    print(f"runs go to {file}")
    _append(file, [{**setting, "provenance": provenance()}])
    # after round 0
    spared = max(0, sum(name in FIXED for name in args.methods) - JUDGED)
    total = sum(1 + len(args.methods) - (spared if cell[2] else 0) for cell in cells)
    tokenizer = AutoTokenizer.from_pretrained(model_path(args.target))
    drafters: dict[str, dict[str, str]] = {name: {} for name in _drafters(args.methods)}
    if args.trace is not None:
        drafters[ADAPTIVE] = {"trace": str(args.trace.absolute())}
    profile = {"drafter": "model", "draft_bits": args.draft_bits, "drafters": drafters}
    servers = side_by_side(
        args.target,
        FLAGS,
        outrider_flags(args.draft, MOST_DRAFTS),
        args.threads,
        json.dumps(profile),
    )
    with servers as (bare, ours), Progress(speed_estimate_period=3600) as progress:
        task = progress.add_task("warming up", total=total)
        for batch in args.batches:  # texts that are not measured: control has met traffic before
            warm = [chat_ids(tokenizer, text) for text in prompts("mixed", batch, 90)]
            measure(bare, warm, 8, None)
            for name in args.methods[-2:]:
                measure(ours, warm, args.tokens, METHODS[name])
        progress.update(task, description="measuring")
        started = time.perf_counter()
        for number, (kind, batch, round_) in enumerate(cells):
            names = [BARE, *args.methods]
            if round_:
                best = best_fixed([run for run in runs if _place(run) == (kind, batch, 0)])
                judged = (BARE, *best[:JUDGED], ADAPTIVE)
                names = [name for name in names if name in judged]
            offset = round_ * batch % (VARIANTS + 1 - batch)
            ids = [chat_ids(tokenizer, text) for text in prompts(kind, batch, offset)]
            # nobody is always the first, or right after bare SGLang
            turn = number % len(names)
            tokens = args.tokens if round_ else args.tokens // 2
            found = measure_cell(
                bare, ours, ids, tokens, [*names[turn:], *names[:turn]],
                lambda: progress.advance(task),
            )  # fmt: skip
            new = [{"kind": kind, "batch": batch, "round": round_, **run} for run in found]
            runs += new
            _append(file, new)
            left = (time.perf_counter() - started) / (number + 1) * (len(cells) - number - 1)
            progress.console.print(
                f"{number + 1}/{len(cells)} {kind} B={batch} round {round_}: {_say(new)}"
                f" ({left / 60:.0f} min left)",
                highlight=False,
            )


def measure_cell(
    bare: Suspendable,
    ours: Suspendable,
    ids: list[list[int]],
    tokens: int,
    names: list[str],
    advance: Callable[[], None],
) -> list[Run]:
    """Let each method answer the same prompts, which the servers have read before."""
    fill_cache(bare, ids, None)
    fill_cache(ours, ids, READ_BY_BOTH)
    runs = {}
    for name in names:
        server = bare if name == BARE else ours
        runs[name] = measure(server, ids, tokens, METHODS.get(name))
        advance()
    for run in runs.values():
        run["same"] = same_outputs(run, runs[BARE])
    return [
        {"method": name, **{key: value for key, value in run.items() if key != "outputs"}}
        for name, run in runs.items()
    ]


def best_fixed(runs: list[Run]) -> list[str]:
    """Return the fixed methods that are in all rounds of a cell, the fastest first."""
    rounds = {run["round"] for run in runs}
    speeds = {name: [_speed(run) for run in runs if run["method"] == name] for name in FIXED}
    speeds = {name: found for name, found in speeds.items() if len(found) == len(rounds)}
    return sorted(speeds, key=lambda name: -statistics.geometric_mean(speeds[name]))


def _speed(run: Run) -> float:
    return float(run["tokens_per_second"])


def _drafters(methods: list[str]) -> list[str]:
    """Return the drafters that the server needs."""
    return list(dict.fromkeys(METHODS[name].get("drafter", "model") for name in methods))


def _place(run: Run) -> tuple[str, int, int]:
    return run["kind"], run["batch"], run["round"]


def _say(runs: list[Run]) -> str:
    speed = {run["method"]: _speed(run) for run in runs}
    return f"bare {speed[BARE]:.2f} tokens/s, " + ", ".join(
        f"{name} {speed[name] / speed[BARE]:.2f} x"
        for name in (*best_fixed(runs)[:1], ADAPTIVE)
        if name in speed
    )


# -- the partial file: a line for each session that wrote to it, and one for each run


def _done(file: Path, setting: dict[str, Any]) -> list[Run]:
    """Return the runs that are in the file already. They must be of the same models."""
    sessions, runs = read(file) if file.exists() else ([], [])
    if any(setting != {key: session[key] for key in setting} for session in sessions):
        raise SystemExit(f"{file} has runs of other models")
    return runs


def _append(file: Path, lines: list[dict[str, Any]]) -> None:
    with file.open("a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def read(file: Path) -> tuple[list[dict[str, Any]], list[Run]]:
    """Return the sessions and the runs of a partial file."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    sessions = [line for line in lines if "provenance" in line]
    return sessions, [line for line in lines if "method" in line]


# -- reporting


def report(file: Path, folder: Path | None) -> None:
    """Print the table and the goals; write the result and, with matplotlib, the plot."""
    (first, *more), runs = read(file)
    cells = [summary(list(own)) for own in _by_cell(runs)]
    goals = check(cells)
    show(cells, goals)
    result = {**first, "cells": cells, "goals": goals, "runs": runs}
    if more:
        result["resumed"] = [session["provenance"] for session in more]
    write("adaptive_sglang", result, folder and folder / "adaptive_sglang.json")
    if pyplot() is None:
        print(f"no matplotlib here: --report {file} where it is makes the plot")
    else:
        plot(cells, folder or IMAGES)


def _by_cell(runs: list[Run]) -> Iterable[list[Run]]:
    """Return the runs of each cell, by kind and batch."""
    places = {(KINDS.index(run["kind"]), run["batch"]) for run in runs}
    for kind, batch in sorted(places):
        yield [run for run in runs if (run["kind"], run["batch"]) == (KINDS[kind], batch)]


def summary(runs: list[Run]) -> dict[str, Any]:
    """Say of one cell how the methods do against bare SGLang, and adaptive against the best."""
    speed = {(run["method"], run["round"]): _speed(run) for run in runs}
    names = [name for name in (BARE, *METHODS) if (name, 0) in speed]
    rounds = sorted({run["round"] for run in runs})
    rounds = rounds[1:] or rounds  # the first one only chose
    best = next(iter(best_fixed([run for run in runs if run["round"] in rounds])), None)

    def times(method: str | None, other: str | None) -> dict[str, float] | None:
        own = [r for r in rounds if (method, r) in speed] or [0]  # most fixed choices have no other
        both = [r for r in own if {(method, r), (other, r)} <= speed.keys()]
        return spread([speed[method, r] / speed[other, r] for r in both]) if both else None

    plain = [run for run in runs if run["method"] == BARE and run["round"] in rounds]
    return {
        "kind": runs[0]["kind"],
        "batch": runs[0]["batch"],
        "rounds": len(rounds),
        "bare_tokens_per_second": spread([_speed(run) for run in plain]),
        "best_fixed": best,
        "best_fixed_times_bare": times(best, BARE),
        "adaptive_times_bare": times(ADAPTIVE, BARE),
        "adaptive_times_best_fixed": times(ADAPTIVE, best),
        "methods": {
            name: details([run for run in runs if run["method"] == name], times(name, BARE))
            for name in names
        },
    }


def details(runs: list[Run], times_bare: dict[str, float] | None) -> dict[str, Any]:
    """Say what one method did in one cell, over all rounds."""
    same, asked = sum(run["same"] for run in runs), runs[0]["batch"] * len(runs)
    found: dict[str, Any] = {"times_bare": times_bare, "same_as_bare": f"{same}/{asked}"}
    time_in = {part: sum(run["parts"][part] for run in runs) for part in runs[0]["parts"]}
    spent = sum(time_in.values())
    if spent:
        found["parts"] = {part: round(value / spent, 3) for part, value in time_in.items()}
    return found


def check(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say of each goal whether it is reached, by medians over rounds."""

    def median(cell: dict[str, Any], key: str) -> float | None:
        return cell[key] and cell[key]["median"]

    def goal(
        text: str, key: str, least: float, kind: str = "", batch: int = 0, above: bool = False
    ) -> dict[str, Any]:
        values = {
            f"{cell['kind']} B={cell['batch']}": value
            for cell in cells
            if kind in ("", cell["kind"]) and batch in (0, cell["batch"])
            if (value := median(cell, key)) is not None
        }
        short = {
            name: value
            for name, value in values.items()
            if value < least or (above and value == least)
        }
        found: dict[str, Any] = {"goal": text, "reached": not short if values else None}
        if values:
            worst = min(values, key=lambda name: values[name])
            found |= {"cells": len(values), "lowest": f"{values[worst]} ({worst})", "short": short}
        return found

    bare, fixed = "adaptive_times_bare", "adaptive_times_best_fixed"
    return [
        goal("adaptive at least 0.97 of the best fixed, in every cell", fixed, 0.97),
        goal("adaptive above the best fixed on mixed", fixed, 1.0, "mixed", above=True),
        goal("adaptive never below 0.98 of bare", bare, 0.98),
        goal("adaptive at least 3.0 x bare on edit, B = 1", bare, 3.0, "edit", 1),
        goal("adaptive at least 2.0 x bare on code, B = 1", bare, 2.0, "code", 1),
        goal("adaptive at least 1.3 x bare on mixed, B = 8", bare, 1.3, "mixed", 8),
    ]


def show(cells: list[dict[str, Any]], goals: list[dict[str, Any]]) -> None:
    """Print the table and the goals."""

    def said(value: dict[str, float] | None) -> str:
        return "" if value is None else "{median:.2f} ({min:.2f}-{max:.2f})".format(**value)

    columns = ("text", "B", "bare, tokens/s", "best fixed", "x bare")
    table = Table(*columns, "adaptive x bare", "adaptive / best fixed")
    for cell in cells:
        table.add_row(
            cell["kind"],
            str(cell["batch"]),
            said(cell["bare_tokens_per_second"]),
            cell["best_fixed"],
            said(cell["best_fixed_times_bare"]),
            said(cell["adaptive_times_bare"]),
            said(cell["adaptive_times_best_fixed"]),
        )
    console = Console(width=150)
    console.print(table)
    rounds = statistics.median(cell["rounds"] for cell in cells)
    console.print(f"median (smallest - largest) of {rounds:g} rounds\n")
    for batch in sorted({cell["batch"] for cell in cells}):
        found = [
            cell["adaptive_times_best_fixed"]["median"]
            for cell in cells
            if cell["batch"] == batch and cell["adaptive_times_best_fixed"]
        ]
        if found:
            mean = statistics.geometric_mean(found)
            console.print(f"B = {batch}: adaptive / best fixed, mean of its cells: {mean:.2f}")
    for goal in goals:
        state = {True: "reached", False: "NOT reached", None: "not measured"}[goal["reached"]]
        console.print(f"{state}: {goal['goal']}", highlight=False)
        if goal["reached"] is not None:
            short = f"; {len(goal['short'])} of {goal['cells']} short" if goal["short"] else ""
            console.print(f"    lowest {goal['lowest']}{short}", highlight=False)


def plot(cells: list[dict[str, Any]], folder: Path) -> None:
    """Draw the speed-up against the batch, a panel for each kind of text."""
    plt = pyplot()
    lines = (
        ("best_fixed_times_bare", "best fixed", "#7a7a7a", "s", "--"),
        ("adaptive_times_bare", "adaptive", "#0a6ebd", "o", "-"),
    )
    kinds = [kind for kind in KINDS if any(cell["kind"] == kind for cell in cells)]
    rows = -(-len(kinds) // 3)
    figure, grid = plt.subplots(
        rows, min(3, len(kinds)), figsize=(9, 2.7 * rows), sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes in grid.flat[len(kinds) :]:
        axes.remove()
    for axes, kind in zip(grid.flat, kinds, strict=False):
        own = [cell for cell in cells if cell["kind"] == kind]
        axes.axhline(1, color="black", linewidth=0.8)
        for key, label, colour, marker, style in lines:
            found = [(cell["batch"], cell[key]) for cell in own if cell[key]]
            if not found:
                continue
            middle = [value["median"] for _, value in found]
            reach = [
                [value["median"] - value["min"] for _, value in found],
                [value["max"] - value["median"] for _, value in found],
            ]
            axes.errorbar(
                [batch for batch, _ in found], middle, reach, color=colour, marker=marker,
                linestyle=style, markersize=4, elinewidth=0.8, label=label,
            )  # fmt: skip
        axes.set_title(kind)
        axes.set_xscale("log", base=2)
        batches = sorted({cell["batch"] for cell in cells})
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    figure.supxlabel("batch")
    figure.supylabel("times bare SGLang")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save_plot(figure, "adaptive_sglang", folder)


if __name__ == "__main__":
    main()
