"""Rows moved one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def kv_commit(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy row src[b, i] to dst[b, i] in every cache, i after i; -1 moves nothing.

    caches: each [S, ...]; src, dst: [B, N] slots
    """
    for i in range(src.shape[1]):
        moves = (src[:, i] >= 0) & (dst[:, i] >= 0)
        for cache in caches:
            cache[dst[moves, i].long()] = cache[src[moves, i].long()]
