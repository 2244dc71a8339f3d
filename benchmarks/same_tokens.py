"""The same tokens as plain decoding, on a real pair of models.

    python benchmarks/same_tokens.py [--target NAME] [--draft NAME] [--tokens 64]

Plain decoding of all requests side by side is the reference; no other cell may differ in a single
token, be it drafted, alone, or in other company. `exactness="lossless"` is run once beside it, to
show what it is that `bitwise` adds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from common import PROMPTS, chat_ids, different_tokens, load, model_path, write
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "transformers"))

# drafter, K, batch, sampling, exactness
CELLS = [
    ("none", 0, 1, "greedy", "bitwise"),
    ("model", 4, 6, "greedy", "bitwise"),
    ("ngram", 8, 6, "greedy", "bitwise"),
    ("random", 3, 6, "greedy", "bitwise"),
    ("ragged", 8, 6, "greedy", "bitwise"),
    ("model", 8, 3, "greedy", "bitwise"),
    ("model", 6, 1, "greedy", "bitwise"),
    ("none", 0, 1, "T=0.7", "bitwise"),
    ("model", 3, 6, "T=0.7", "bitwise"),
    ("ragged", 5, 6, "T=0.7", "bitwise"),
    ("model", 5, 3, "T=0.7", "bitwise"),
    ("none", 0, 1, "T=1, top-p, penalties", "bitwise"),
    ("model", 2, 6, "T=1, top-p, penalties", "bitwise"),
    ("ngram", 4, 6, "T=1, top-p, penalties", "bitwise"),
    ("ragged", 6, 6, "T=1, top-p, penalties", "bitwise"),
    ("random", 6, 6, "greedy", "lossless"),
]


def main() -> None:
    """Compare, and write benchmarks/results/same_tokens.json."""
    from adversaries import SAMPLING, RaggedDrafter, RandomDrafter
    from transformers import AutoTokenizer

    import outrider
    from outrider.drafters import ModelDrafter
    from outrider.engines.transformers import Runner

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=80)
    args = parser.parse_args()
    target, draft = (
        load(args.target, args.dtype),
        outrider.quantized_copy(load(args.draft, args.dtype), 8),
    )
    vocab = target.config.vocab_size
    tokenizer = AutoTokenizer.from_pretrained(model_path(args.target))
    prompts = [chat_ids(tokenizer, text) for texts in PROMPTS.values() for text in texts]
    drafters: dict[str, Any] = {
        "none": lambda: "none",
        "ngram": lambda: "ngram",
        "model": lambda: ModelDrafter(Runner(draft), vocab, min_survival=0.1),
        "random": lambda: RandomDrafter(vocab),
        "ragged": lambda: RaggedDrafter(vocab),
    }

    def generate(drafter: str, k: int, chosen: list[int], kind: str, exactness: str) -> Any:
        more = {"max_tokens": args.tokens, "ignore_eos": True}
        return outrider.generate(
            target,
            [prompts[i] for i in chosen],
            drafter=drafters[drafter](),
            max_drafts=k,
            sampling=[SAMPLING[kind] | more | {"seed": i} for i in chosen],
            exactness=exactness,
        )

    cells, plain = [], {}
    with Progress() as progress:
        task = progress.add_task("comparing", total=len(CELLS) + len(SAMPLING))
        for kind in SAMPLING:
            everyone = list(range(len(prompts)))
            plain[kind] = generate("none", 0, everyone, kind, "bitwise").outputs
            progress.advance(task)
        for drafter, k, batch, kind, exactness in CELLS:
            chosen = list(range(len(prompts)))[:batch]
            started = time.perf_counter()
            done = generate(drafter, k, chosen, kind, exactness)
            different = different_tokens(done.outputs, [plain[kind][i] for i in chosen])
            cells.append(
                {
                    "drafter": drafter,
                    "max_drafts": k,
                    "batch": batch,
                    "sampling": kind,
                    "exactness": exactness,
                    "tokens_compared": args.tokens * batch,
                    "tokens_different": different,
                    "accept_length": round(done.stats.accept_length, 3),
                    "fallbacks": dict(done.stats.fallbacks),
                    "seconds": round(time.perf_counter() - started, 1),
                }
            )
            progress.console.print(cells[-1])
            progress.advance(task)
    bitwise = [cell for cell in cells if cell["exactness"] == "bitwise"]
    summary = {
        "tokens_compared": sum(cell["tokens_compared"] for cell in bitwise),
        "tokens_different": sum(cell["tokens_different"] for cell in bitwise),
    }
    print(summary)
    models = {"target": args.target, "draft": f"{args.draft}, int8", "dtype": args.dtype}
    write("same_tokens", {**models, **summary, "cells": cells})
    sys.exit(1 if summary["tokens_different"] else 0)


if __name__ == "__main__":
    main()
