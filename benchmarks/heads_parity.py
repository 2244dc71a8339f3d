"""The same tokens as plain decoding with heads of every kind, good and bad: 200,000 tokens.

    python benchmarks/heads_parity.py            # 10 minutes on one core; needs no download
    python benchmarks/heads_parity.py --report   # the table and the goals of the last run

The target is the tiny one in the package, `exactness="bitwise"`. Heads are trained, random, or read
the wrong states: those of the token before (`shifted`), or of the layer below (`layers`). All may
cost speed only. Each drafts chains, and trees with siblings as leaves, for greedy requests, sampled
ones and ones with penalties. Exits with 1 if a goal is missed.
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

from common import different_tokens, load, write
from heads import TINY, openings
from rich.console import Console
from rich.progress import track
from rich.table import Table

import outrider
from outrider.report import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts" / "transformers"))
from adversaries import SAMPLING
from some_heads import made

RESULT = Path(__file__).parent / "results" / "heads_parity.json"
GOAL, REQUESTS, TOKENS, DRAFTS, SIBLINGS = 200_000, 24, 112, 8, 2
STATES = ("trained", "random", "shifted", "layers")
HEADS = [*(f"{kind} {state}" for kind in ("eagle3", "mtp", "dflash") for state in STATES)]
HEADS += ["eagle random"]
CELLS = list(product(HEADS, (0, SIBLINGS), SAMPLING))
"""Head, siblings of each draft, sampling."""


def main() -> None:
    """Compare and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", action="store_true", help="compare nothing")
    parser.add_argument("--out", type=Path, default=RESULT, help="result file")
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.report else compare(CELLS, REQUESTS, TOKENS)
    result["goals"] = goals(result)
    write("heads_parity", result, args.out)
    show(result)
    sys.exit(0 if all(goal["met"] for goal in result["goals"]) else 1)


def compare(cells: Sequence[tuple[str, int, str]], requests: int, tokens: int) -> dict[str, Any]:
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
    found = []
    for head, siblings, kind in track(cells, "comparing"):
        # leaves take the room that a chain leaves when it ends early
        drafter = made(head, target, min_survival=0.5 if siblings else 0.0, siblings=siblings)
        done = answers(kind, drafter, DRAFTS)
        found.append(
            {
                "head": head,
                "siblings": siblings,
                "sampling": kind,
                "tokens_compared": sum(map(len, plain[kind])),
                "tokens_different": different_tokens(done.outputs, plain[kind]),
                "drafted": done.stats.drafted,
                "leaves": done.stats.drafted - sum(done.stats.proposed_at.values()),
                "accept_length": round(done.stats.accept_length, 3),
                "fallbacks": dict(done.stats.fallbacks),
            }
        )
    return {
        **{"provenance": origin, "requests": requests, "tokens": tokens, "max_drafts": DRAFTS},
        "tokens_compared": sum(cell["tokens_compared"] for cell in found),
        "tokens_different": sum(cell["tokens_different"] for cell in found),
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "cells": found,
    }


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was to be shown, and whether it was."""
    compared, different = result["tokens_compared"], result["tokens_different"]
    idle = sum(not cell["drafted"] or bool(cell["fallbacks"]) for cell in result["cells"])
    leafless = sum(bool(cell["siblings"]) != bool(cell["leaves"]) for cell in result["cells"])
    return [
        {
            "goal": f"{GOAL:,} tokens or more are compared",
            "value": compared,
            "met": compared >= GOAL,
        },
        {"goal": "no token differs from plain decoding", "value": different, "met": not different},
        {"goal": "every head drafts, without fallbacks", "value": idle, "met": not idle},
        {"goal": "drafts with siblings are trees", "value": leafless, "met": not leafless},
        *speed_goals(result["cells"]),
    ]


def speed_goals(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return whether heads that read the wrong states are slower: else nothing was wrong."""
    length = {(c["head"], c["siblings"], c["sampling"]): c["accept_length"] for c in cells}
    wrong = [key for key in length if key[0].endswith(("shifted", "layers", "random"))]
    gaps = []
    for head, siblings, kind in wrong:
        trained = length.get((f"{head.split()[0]} trained", siblings, kind))
        if trained is not None:
            gaps.append(trained - length[head, siblings, kind])
    if not gaps:
        return []
    text = "a head that reads wrong states, or is random, gives fewer tokens a step"
    return [{"goal": text, "value": round(min(gaps), 3), "met": min(gaps) > 0}]


def show(result: dict[str, Any]) -> None:
    """Print how many tokens differ, by head; and how many tokens a step it gave."""
    table = Table("head", "compared", "different", "tokens a step: chain", "tree")
    for head in dict.fromkeys(cell["head"] for cell in result["cells"]):
        own = [cell for cell in result["cells"] if cell["head"] == head]
        lengths = (
            " / ".join(
                f"{c['accept_length']:.2f}" for c in own if bool(c["siblings"]) == with_siblings
            )
            for with_siblings in (False, True)
        )
        compared, different = (
            sum(c[f"tokens_{x}"] for c in own) for x in ("compared", "different")
        )
        table.add_row(head, f"{compared:,}", str(different), *lengths)
    console = Console(width=120)
    console.print(table)
    for goal in result["goals"]:
        console.print(f"{'met' if goal['met'] else 'missed'}: {goal['goal']} ({goal['value']})")


if __name__ == "__main__":
    main()
