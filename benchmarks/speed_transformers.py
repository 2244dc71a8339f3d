"""Speed beside Transformers' own plain, assisted and prompt-lookup generation.

    python benchmarks/speed_transformers.py [--tokens 64] [--rounds 3]

All methods take turns in each round, so that a busy machine slows all of them; what counts is the
ratio within a round. Greedy, batch 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import PROMPTS, chat_ids, load, model_path, spread, write
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoTokenizer

import outrider

THEIRS = ("transformers plain", "transformers assisted", "transformers prompt lookup")


def methods(target: Any, draft: Any, tokens: int) -> dict[str, Callable[[list[int]], Any]]:
    """Return each method as a function from a prompt to its output ids, or a Generation."""
    draft8 = outrider.quantized_copy(draft, 8)

    def theirs(ids: list[int], **how: Any) -> list[int]:
        out = target.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, **how)
        return out[0, len(ids) :].tolist()

    def mine(ids: list[int], drafter: Any) -> Any:
        sampling = {"max_tokens": tokens}
        return outrider.generate(target, ids, drafter=drafter, sampling=sampling, max_drafts=12)

    return {
        THEIRS[0]: theirs,
        THEIRS[1]: lambda ids: theirs(ids, assistant_model=draft),
        THEIRS[2]: lambda ids: theirs(ids, prompt_lookup_num_tokens=10),
        "outrider ngram": lambda ids: mine(ids, "ngram"),
        "outrider model": lambda ids: mine(ids, draft),
        "outrider model int8": lambda ids: mine(ids, draft8),
    }


def main() -> None:
    """Measure, print a table, and write benchmarks/results/speed_transformers.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    target, draft = load(args.target, "bfloat16"), load(args.draft, "bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(model_path(args.target))
    ways = methods(target, draft, args.tokens)
    for way in ways.values():
        way(chat_ids(tokenizer, "Hello"))  # warm-up
    runs: list[dict[str, Any]] = []
    with Progress() as progress:
        count = args.rounds * sum(map(len, PROMPTS.values())) * len(ways)
        task = progress.add_task("measuring", total=count)
        for round_ in range(args.rounds):
            for kind, texts in PROMPTS.items():
                for i, text in enumerate(texts):
                    ids = chat_ids(tokenizer, text)
                    for name, way in ways.items():
                        started = time.perf_counter()
                        done = way(ids)
                        seconds = time.perf_counter() - started
                        output = done if isinstance(done, list) else done.outputs[0]
                        run = {"round": round_, "kind": kind, "prompt": i, "method": name}
                        run |= {"seconds": round(seconds, 3), "tokens": len(output)}
                        if not isinstance(done, list):
                            run["accept_length"] = round(done.stats.accept_length, 3)
                            run["acceptance_rate"] = round(done.stats.acceptance_rate, 3)
                        runs.append(run | {"output": output})
                        progress.advance(task)
    report(runs, list(ways), args)


def report(runs: list[dict[str, Any]], names: list[str], args: argparse.Namespace) -> None:
    """Say for each kind of text how each method does against Transformers' best one."""

    def find(kind: str, name: str) -> list[dict[str, Any]]:
        return [run for run in runs if run["kind"] == kind and run["method"] == name]

    table = Table("text", "method", "tokens/s", "x plain", "x best of Transformers", "same tokens")
    summary = []
    for kind in PROMPTS:
        plain = find(kind, THEIRS[0])
        speeds = {n: [r["tokens"] / r["seconds"] for r in find(kind, n)] for n in names}
        best = max(THEIRS, key=lambda name: statistics.median(speeds[name]))
        for name in names:
            over = {
                other: [a / b for a, b in zip(speeds[name], speeds[other], strict=True)]
                for other in (THEIRS[0], best)
            }
            pairs = zip(find(kind, name), plain, strict=True)
            same = sum(a["output"] == b["output"] for a, b in pairs)
            cell = {
                "kind": kind,
                "method": name,
                "tokens_per_second": spread(speeds[name]),
                "times_plain": spread(over[THEIRS[0]]),
                "times_best_of_transformers": spread(over[best]),
                "best_of_transformers": best,
                "same_tokens_as_transformers_plain": f"{same}/{len(plain)}",
            }
            summary.append(cell)
            row = [
                f"{c['median']:.2f} ({c['min']:.2f}-{c['max']:.2f})"
                for c in list(cell.values())[2:5]
            ]
            table.add_row(kind, name, *row, f"{same}/{len(plain)}")
    Console(width=140).print(table)
    for run in runs:
        del run["output"]
    models = {"target": args.target, "draft": args.draft, "dtype": "bfloat16", "batch": 1}
    write("speed_transformers", {**models, "summary": summary, "runs": runs})


if __name__ == "__main__":
    main()
