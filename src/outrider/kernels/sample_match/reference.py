"""Sampling and matching in plain torch: distributions of `core.target`, coins of `core.coins`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.coins import KeyedCoins


class Matched(NamedTuple):
    """Which rows each request may keep, and the token that follows them.

    accepted:            [B, D] the row kept at each depth, counted from the request's root, which
                         is row 0; -1 beyond the last. (`core.Verdict` counts drafts: one less.)
    num_accepted_drafts: [B]
    next_tokens:         [B] the token after the last kept row; -1 for a request without rows
    """

    accepted: Tensor
    num_accepted_drafts: Tensor
    next_tokens: Tensor


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Return the token that plain decoding emits after each row, [N] int64.

    logits are divided and compared in float32; the masses that top-p compares are in float64
    """
    greedy = temperature == 0
    x = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    x = x.masked_fill(x.isnan(), -math.inf)
    vocab_size = x.shape[-1]
    best, order = x.sort(dim=-1, descending=True, stable=True)

    k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size).long()
    kth = best.gather(-1, k[:, None] - 1)
    p = best.double().masked_fill(best < kth, -math.inf).softmax(-1)
    late = (p.cumsum(-1) - p >= top_p.double()[:, None]) & (top_p < 1)[:, None]
    late[:, 0] = False  # rounding must not remove the most likely token
    removed = torch.zeros_like(late).scatter(-1, order, late)
    floor = best[:, :1] + min_p.double().log().float()[:, None]
    kept = x.masked_fill(removed | (x < kth) | (x < floor), -math.inf)
    return torch.where(greedy, x.argmax(-1), KeyedCoins().draw(kept, seeds, positions))


def match(
    tokens: Tensor, drafts: Tensor, parents: Tensor, rows_start: Tensor, max_depth: int
) -> Matched:
    """Accept each draft while it is the token that the target emits at its parent."""
    batch = len(rows_start) - 1
    accepted = tokens.new_full((batch, max_depth), -1)
    counts, next_tokens = tokens.new_zeros(batch), tokens.new_full((batch,), -1)
    for b in range(batch):
        start, end = int(rows_start[b]), int(rows_start[b + 1])
        at = depth = 0
        for row in range(1, end - start):
            follows = parents[start + row] == at and drafts[start + row] == tokens[start + at]
            if follows and depth < max_depth:
                accepted[b, depth], at, depth = row, row, depth + 1
        counts[b] = depth
        if end > start:
            next_tokens[b] = tokens[start + at]
    return Matched(accepted, counts, next_tokens)
