"""Prompt lookup by trying every place, of all requests at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def ngram_match(
    tokens: Tensor, lengths: Tensor, max_drafts: Tensor, width: int, min_n: int, max_n: int
) -> tuple[Tensor, Tensor]:
    """Return what followed the last tokens when they occurred before. See the package."""
    texts, ends = tokens.cpu().numpy(), lengths.cpu().numpy().astype(np.int64)[:, None]
    batch, length = texts.shape
    places = np.arange(length)  # the ends e of earlier n-grams
    alike = places < ends
    matched = np.zeros((batch, length), np.int64)
    for j in range(1, min(max_n, length) + 1):
        # the j-th token from the end, here and at every place
        last = np.take_along_axis(texts, np.maximum(ends - j, 0), 1)
        alike[:, j:] &= texts[:, : length - j] == last
        alike[:, :j] = False
        if not alike.any():
            break
        matched += alike
    # the longest match wins, among those the latest
    keys = np.where(matched >= min_n, (matched << 32) + places, 0)
    start = keys.max(1, initial=0)[:, None] & 0xFFFFFFFF
    counts = np.where(start[:, 0] > 0, max_drafts.cpu().numpy().clip(0, width), 0)
    # a copy that reaches the end goes on with itself, as a repetition would
    steps = np.arange(width)
    at = np.minimum(start + steps % np.maximum(ends - start, 1), max(length - 1, 0))
    drafts = np.zeros((batch, width), texts.dtype)
    if length:
        drafts = np.where(steps < counts[:, None], np.take_along_axis(texts, at, 1), drafts)
    found = torch.from_numpy(drafts), torch.from_numpy(counts.astype(np.int32))
    return found[0].to(tokens.device), found[1].to(tokens.device)
