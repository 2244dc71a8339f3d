"""Prompt lookup by trying every place."""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_match(
    tokens: Tensor, lengths: Tensor, max_drafts: Tensor, width: int, min_n: int, max_n: int
) -> tuple[Tensor, Tensor]:
    """Return what followed the last tokens when they occurred before. See the package."""
    drafts = torch.zeros(len(tokens), width, dtype=tokens.dtype)
    num_drafts = torch.zeros(len(tokens), dtype=torch.int32)
    for b, row in enumerate(tokens.tolist()):
        history = row[: int(lengths[b])]
        end, count = len(history), min(int(max_drafts[b]), width)
        for n in range(min(max_n, end - 1), min_n - 1, -1):
            ends = range(n, end)
            found = [e for e in ends if history[e - n : e] == history[end - n :]]
            if found:
                # a copy that reaches the end goes on with itself, as a repetition would
                copy = history[found[-1] :]
                drafts[b, :count] = torch.tensor([copy[i % len(copy)] for i in range(count)])
                num_drafts[b] = count
                break
    return drafts.to(tokens.device), num_drafts.to(tokens.device)
