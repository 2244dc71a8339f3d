"""Speed inside SGLang beside bare SGLang: the real servers, side by side, taking turns.

    python benchmarks/speed_sglang.py [--tokens 40] [--rounds 2] [--batches 1 2 4 8]

Run it in the environment of scripts/setup-sglang-cpu. Each round asks every method in turn for the
same texts, while the other server is suspended; what counts is the ratio within a round. Greedy. A
batch of B is B requests sent at once. `same` counts the answers that are bare SGLang's: bf16 rounds
differently in batches of other shapes, in bare SGLang too, and a tie may then fall either way
(parity_sglang.py compares both in SGLang's deterministic mode, where none may).
"""

from __future__ import annotations

import argparse
from typing import Any

from common import PROMPTS, chat_ids, model_path, spread, write
from common_sglang import measure, outrider_flags, same_outputs, side_by_side
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoTokenizer

BARE = "bare sglang"
METHODS: dict[str, dict[str, Any]] = {
    "K = 0": {"max_drafts": 0},
    "ngram, K <= 8": {"drafter": "ngram", "max_drafts": 8},
    "model, K <= 3": {"drafter": "model", "max_drafts": 3},
    "model, K <= 6": {"drafter": "model", "max_drafts": 6},
}
FLAGS = [
    *("--dtype", "bfloat16", "--mem-fraction-static", "0.6", "--max-total-tokens", "6144"),
    *("--max-running-requests", "8", "--context-length", "1024", "--enable-metrics"),
]


def main() -> None:
    """Measure, print a table, and write benchmarks/results/speed_sglang.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--kinds", nargs="+", default=list(PROMPTS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--threads", default="2")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(model_path(args.target))
    ours = outrider_flags(args.draft, 8)
    runs: list[dict[str, Any]] = []
    servers = side_by_side(args.target, FLAGS, ours, args.threads)
    with Progress() as progress, servers as (bare, drafting):
        warm = [chat_ids(tokenizer, "Hello")]
        measure(bare, warm, 8, None)
        measure(drafting, warm, 8, {})
        cells = [(k, b, r) for r in range(args.rounds) for b in args.batches for k in args.kinds]
        names = [BARE, *args.methods]
        task = progress.add_task("measuring", total=len(cells) * len(names))
        for kind, batch, round_ in cells:
            texts = [PROMPTS[kind][(round_ + i) % len(PROMPTS[kind])] for i in range(batch)]
            # requests of one batch differ, so that each has a cache and drafts of its own
            prompts = [chat_ids(tokenizer, f"{text} ({i})") for i, text in enumerate(texts)]
            for name in names:
                server = bare if name == BARE else drafting
                found = measure(server, prompts, args.tokens, METHODS.get(name))
                runs.append(
                    {"kind": kind, "batch": batch, "round": round_, "method": name, **found}
                )
                progress.advance(task)
    report(runs, names, args)


def report(runs: list[dict[str, Any]], names: list[str], args: argparse.Namespace) -> None:
    """Say for each kind of text and batch how each method does against bare SGLang."""
    table = Table("text", "B", "method", "tokens/s", "x bare", "tokens/step", "in forwards", "same")
    summary = []
    for kind, batch in dict.fromkeys((run["kind"], run["batch"]) for run in runs):
        here = [run for run in runs if (run["kind"], run["batch"]) == (kind, batch)]
        plain = [run for run in here if run["method"] == BARE]
        for name in names:
            own = [run for run in here if run["method"] == name]
            speeds = [run["tokens"] / run["seconds"] for run in own]
            ratios = [p["seconds"] / run["seconds"] for run, p in zip(own, plain, strict=True)]
            same = sum(same_outputs(run, p) for run, p in zip(own, plain, strict=True))
            asked = sum(len(run["outputs"]) for run in own)
            cell: dict[str, Any] = {
                "kind": kind,
                "batch": batch,
                "method": name,
                "tokens_per_second": spread(speeds),
                "times_bare": spread(ratios),
                "same_tokens_as_bare": f"{same}/{asked}",
            }
            steps = sum(run["request_steps"] for run in own)
            total = sum(sum(run["parts"].values()) for run in own)
            if total:
                passes = ("draft_forward", "forward")
                forwards = sum(run["parts"][part] for run in own for part in passes)
                cell["tokens_per_step"] = round(sum(run["tokens"] for run in own) / steps, 3)
                cell["loop_efficiency"] = round(forwards / total, 3)
                cell["parts"] = {
                    part: round(sum(run["parts"][part] for run in own) / total, 3)
                    for part in own[0]["parts"]
                }
            summary.append(cell)
            shown = [
                f"{c['median']:.2f} ({c['min']:.2f}-{c['max']:.2f})"
                for c in (cell["tokens_per_second"], cell["times_bare"])
            ]
            more = [str(cell.get(key, "")) for key in ("tokens_per_step", "loop_efficiency")]
            table.add_row(kind, str(batch), name, *shown, *more, cell["same_tokens_as_bare"])
    Console(width=140).print(table)
    for run in runs:
        del run["outputs"]
    if not args.no_write:
        models = {"target": args.target, "draft": args.draft, "dtype": "bfloat16"}
        write("speed_sglang", {**models, "summary": summary, "runs": runs})


if __name__ == "__main__":
    main()
