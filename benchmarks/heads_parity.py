"""The same tokens as plain decoding with heads of every kind, good and bad: 200,000 tokens.

    python benchmarks/heads_parity.py                 # 15 minutes on one core; needs no download
    python benchmarks/heads_parity.py --shapes tree   # these; the others are kept of the last run
    python benchmarks/heads_parity.py --report        # the table and the goals of the last run

The target is the tiny one in the package, `exactness="bitwise"`. Heads are trained, random, or read
the wrong states: those of the token before (`shifted`), or of the layer below (`layers`). All may
cost speed only. Each drafts chains, chains with siblings as leaves, and, but for DFlash, EAGLE's
dynamic trees, for greedy requests, sampled ones and ones with penalties. Exits with 1 if a goal is
missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from common import different_tokens, load, show_goals, write
from heads import TINY, openings
from rich.console import Console
from rich.progress import track
from rich.table import Table

import outrider
from outrider.report import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "transformers"))
from adversaries import SAMPLING
from some_heads import made

RESULT = Path(__file__).parent / "results" / "heads_parity.json"
GOAL, REQUESTS, TOKENS = 200_000, 24, 112
DRAFTS = {"chain": 8, "leaves": 8, "tree": 16}
STATES = ("trained", "random", "shifted", "layers")
HEADS = [*(f"{kind} {state}" for kind in ("eagle3", "mtp", "dflash") for state in STATES)]
HEADS += ["eagle random"]
SHAPES = {
    "chain": {"min_survival": 0.0},
    "leaves": {"min_survival": 0.5, "siblings": 2},  # they take the room that a short chain leaves
    "tree": {"min_survival": 0.0, "width": 3},
}
"""What drafts look like, and the options that make them so."""

CELLS = [
    (head, shape, kind)
    for head, shape, kind in product(HEADS, SHAPES, SAMPLING)
    if shape != "tree" or not head.startswith("dflash")
]
"""Head, shape of its drafts, sampling."""


def main() -> None:
    """Compare and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", action="store_true", help="compare nothing")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--out", type=Path, default=RESULT, help="result file")
    args = parser.parse_args()
    asked = [] if args.report else [cell for cell in CELLS if cell[1] in args.shapes]
    kept = json.loads(args.out.read_text()) if set(asked) != set(CELLS) else {"shapes": {}}
    result = compare(asked, REQUESTS, TOKENS) if asked else {"shapes": {}}
    result = merged(result, {s: v for s, v in kept["shapes"].items() if s not in result["shapes"]})
    if args.report:
        result = {"provenance": kept["provenance"], **result}
    result["goals"] = goals(result)
    write("heads_parity", result, args.out)
    show(result)
    sys.exit(0 if all(goal["met"] for goal in result["goals"]) else 1)


def merged(result: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Return a result with these shapes of another run."""
    shapes = {s: {**kept, **result["shapes"]}[s] for s in SHAPES if s in kept | result["shapes"]}
    cells = [cell for shape in shapes.values() for cell in shape["cells"]]
    return {
        **{"requests": REQUESTS, "tokens": TOKENS, "max_drafts": DRAFTS},
        "tokens_compared": sum(cell["tokens_compared"] for cell in cells),
        "tokens_different": sum(cell["tokens_different"] for cell in cells),
        "shapes": shapes,
    }


def compare(cells: Sequence[tuple[str, str, str]], requests: int, tokens: int) -> dict[str, Any]:
    """Let every head draft for all requests; compare the ids with plain decoding's."""
    origin, started = provenance(), time.perf_counter()
    target = load(str(TINY / "target"), "float32")
    prompts = openings(requests)

    def answers(sampling: str, drafter: Any, max_drafts: int) -> Any:
        more = {"max_tokens": tokens, "ignore_eos": True}
        return outrider.generate(
            target,
            prompts,
            drafter=drafter,
            max_drafts=max_drafts,
            sampling=[SAMPLING[sampling] | more | {"seed": i} for i in range(requests)],
            exactness="bitwise",
        )

    plain = {kind: answers(kind, None, 0).outputs for kind in {kind for _, _, kind in cells}}
    found: dict[str, list[dict[str, Any]]] = {}
    for head, shape, kind in track(cells, "comparing"):
        done = answers(kind, made(head, target, **SHAPES[shape]), DRAFTS[shape])
        found.setdefault(shape, []).append(
            {
                "head": head,
                "shape": shape,
                "sampling": kind,
                "tokens_compared": sum(map(len, plain[kind])),
                "tokens_different": different_tokens(done.outputs, plain[kind]),
                "drafted": done.stats.drafted,
                "branched": done.stats.drafted - sum(done.stats.proposed_at.values()),
                "accept_length": round(done.stats.accept_length, 3),
                "fallbacks": dict(done.stats.fallbacks),
            }
        )
    minutes = round((time.perf_counter() - started) / 60, 1)
    same = {"provenance": origin, "minutes": minutes}
    shapes = {shape: {**same, "cells": cells} for shape, cells in found.items()}
    return merged({"shapes": shapes}, {})


def all_cells(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of all shapes."""
    return [cell for shape in result["shapes"].values() for cell in shape["cells"]]


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was to be shown, and whether it was."""
    compared, different = result["tokens_compared"], result["tokens_different"]
    cells = all_cells(result)
    idle = sum(not cell["drafted"] or bool(cell["fallbacks"]) for cell in cells)
    straight = sum((cell["shape"] == "chain") == bool(cell["branched"]) for cell in cells)
    return [
        {
            "goal": f"{GOAL:,} tokens or more are compared",
            "value": compared,
            "met": compared >= GOAL,
        },
        {"goal": "no token differs from plain decoding", "value": different, "met": not different},
        {"goal": "every head drafts, without fallbacks", "value": idle, "met": not idle},
        {"goal": "leaves and trees branch, chains do not", "value": straight, "met": not straight},
        *speed_goals(cells),
    ]


def speed_goals(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return whether heads that read the wrong states are slower: else nothing was wrong."""
    length = {(c["head"], c["shape"], c["sampling"]): c["accept_length"] for c in cells}
    wrong = [key for key in length if key[0].endswith(("shifted", "layers", "random"))]
    gaps = []
    for head, shape, kind in wrong:
        trained = length.get((f"{head.split()[0]} trained", shape, kind))
        if trained is not None:
            gaps.append(trained - length[head, shape, kind])
    if not gaps:
        return []
    text = "a head that reads wrong states, or is random, gives fewer tokens a step"
    return [{"goal": text, "value": round(min(gaps), 3), "met": min(gaps) > 0}]


def show(result: dict[str, Any]) -> None:
    """Print how many tokens differ, by head; and how many tokens a step it gave."""
    table = Table("head", "compared", "different", "tokens a step: chain", "leaves", "tree")
    for head in dict.fromkeys(cell["head"] for cell in all_cells(result)):
        own = [cell for cell in all_cells(result) if cell["head"] == head]
        lengths = (
            " / ".join(f"{c['accept_length']:.2f}" for c in own if c["shape"] == shape)
            for shape in SHAPES
        )
        compared, different = (
            sum(c[f"tokens_{x}"] for c in own) for x in ("compared", "different")
        )
        table.add_row(head, f"{compared:,}", str(different), *lengths)
    Console(width=120).print(table)
    show_goals(result["goals"])


if __name__ == "__main__":
    main()
