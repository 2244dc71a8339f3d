"""Logits of prefill, decode and verify against vanilla Transformers.

    python benchmarks/logits.py [--model NAME ...] [--positions 64]

For each model, type and phase: how often the most likely token agrees, where it first does not,
and how close the two best tokens were there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from common import load, model_path, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from outrider.engines.transformers import Runner
from outrider.engines.transformers.passes import Segment

TEXT = (
    "The outrider came to the bridge at noon. He asked the toll-keeper whether the road beyond it "
    "was clear, and the toll-keeper said that it had been clear in the morning, but that a cart "
    "had gone over since and not come back. def road(x): return [y for y in x if y.clear] "
    "So the outrider rode on, slowly, and looked left and right, and counted the trees."
)
ROWS = 5


def vanilla(model: Any, ids: Sequence[int], start: int, phase: str) -> Tensor:
    """Return the logits at positions >= start by Transformers itself."""
    with torch.inference_mode():
        if phase == "prefill":
            return model(torch.tensor([ids])).logits[0, start:]
        cache = DynamicCache(config=model.config)
        model(torch.tensor([ids[:start]]), past_key_values=cache, use_cache=True)
        size = 1 if phase == "decode" else ROWS
        rows = [
            model(torch.tensor([ids[i : i + size]]), past_key_values=cache, use_cache=True).logits[
                0
            ]
            for i in range(start, len(ids), size)
        ]
        return torch.cat(rows)


def ours(
    model: Any, ids: Sequence[int], start: int, phase: str, exactness: str = "lossless"
) -> Tensor:
    """Return the same logits by Outrider."""
    runner = Runner(model, exactness)  # type: ignore[arg-type]
    sequence = runner.open()
    if phase == "prefill":
        return runner.run([Segment(sequence, ids)])[start:]
    runner.extend([(sequence, ids[:start])])
    size = 1 if phase == "decode" else ROWS
    rows = []
    for i in range(start, len(ids), size):
        tokens = ids[i : i + size]
        rows.append(runner.run([Segment(sequence, tokens)]))
        runner.pool.keep(sequence, range(len(tokens)))
    return torch.cat(rows)


def compare(a: Tensor, b: Tensor) -> dict[str, Any]:
    """Compare two sets of rows: ours, a, with vanilla's, b."""
    a, b = a.float(), b.float()
    differing = (a.argmax(-1) != b.argmax(-1)).nonzero().flatten().tolist()
    top = b.topk(2, dim=-1).values
    margins = (top[:, 0] - top[:, 1])[differing].tolist()
    return {
        "positions": len(a),
        "argmax_equal": len(a) - len(differing),
        "first_divergence": differing[0] if differing else None,
        "largest_margin_where_differing": max(margins, default=None),
        "median_margin": (top[:, 0] - top[:, 1]).median().item(),
        "max_abs_difference": (a - b).abs().max().item(),
    }


def main() -> None:
    """Compare, print a table, and write benchmarks/results/logits.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = ["stories15m", "qwen2.5-coder-0.5b-instruct", "src/outrider/assets/tiny/draft"]
    parser.add_argument("--model", nargs="+", default=default)
    parser.add_argument("--positions", type=int, default=60)
    args = parser.parse_args()
    cells = [
        (m, d, e)
        for m in args.model
        for d in ("float32", "bfloat16")
        for e in ("lossless", "bitwise")
    ]
    results = []
    table = Table("model", "type", "exactness", "phase", "argmax equal", "margin", "max |diff|")
    for name, dtype, exactness in track(cells, "comparing"):
        model = load(name, dtype)
        ids = AutoTokenizer.from_pretrained(model_path(name)).encode(TEXT)
        start = max(8, len(ids) - args.positions)
        for phase in ("prefill", "decode", "verify"):
            expected = vanilla(model, ids, start, phase)
            found = compare(ours(model, ids, start, phase, exactness), expected)
            architecture = type(model).__name__
            cell = {"model": name, "architecture": architecture, "dtype": dtype}
            results.append({**cell, "exactness": exactness, "phase": phase, **found})
            table.add_row(
                f"{name.rsplit('/', 1)[-1]} ({architecture})",
                dtype,
                exactness,
                phase,
                f"{found['argmax_equal']}/{found['positions']}",
                str(found["largest_margin_where_differing"]),
                f"{found['max_abs_difference']:.2g}",
            )
    Console(width=140).print(table)
    write("logits", {"results": results})


if __name__ == "__main__":
    main()
