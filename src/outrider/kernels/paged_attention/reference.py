"""Paged attention in plain torch: the truth that faster kernels are compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.row_invariant import elementwise

SPLIT = 64
"""Keys are reduced in splits of this many positions, counted from position 0, in order."""


@dataclass(frozen=True)
class Tiles:
    """Query rows in tiles that share one sequence of keys.

    rows:  [T, R] the query row at each place of a tile; a tile's unused places repeat a row
    lens:  [T, R] how many positions each row attends to: itself and all before it
    slots: [T, L] the cache slot of each position; L is a multiple of SPLIT, 0 beyond the end
    out_tiles, out_places: [N] where to find each query row
    """

    rows: Tensor
    lens: Tensor
    slots: Tensor
    out_tiles: Tensor
    out_places: Tensor


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: Tiles,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from each row to its own past; a row's result depends on nothing else.

    The order of every sum is fixed by positions alone, and every product has the shape of one
    tile and one split. So a row has the same bits alone, beside drafts, and in any batch, as long
    as the tiles have the same number of places.

    q: [N, Hq, D]; k_cache: [S, Hkv, D]; v_cache: [S, Hkv, Dv]; slot 0 must hold finite numbers
    window: attend to the last so many positions only; softcap: c tanh(score / c)
    -> [N, Hq, Dv], computed in float32
    """
    num_tiles, places = tiles.rows.shape
    num_splits = tiles.slots.shape[1] // SPLIT
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    group = heads // kv_heads
    dim, v_dim = k_cache.shape[2], v_cache.shape[2]

    def by_split(cache: Tensor) -> Tensor:  # -> [T * splits * Hkv, SPLIT, D]
        gathered = cache[tiles.slots].float().view(num_tiles, num_splits, SPLIT, kv_heads, -1)
        return gathered.transpose(2, 3).reshape(num_tiles * num_splits * kv_heads, SPLIT, -1)

    k, v = by_split(k_cache), by_split(v_cache)
    # query heads of one kv head are rows of the same product (GQA)
    qt = q[tiles.rows].float().view(num_tiles, places, kv_heads, group, dim)
    qt = qt.permute(0, 2, 1, 3, 4).reshape(num_tiles, 1, kv_heads, places * group, dim)
    qt = qt.expand(-1, num_splits, -1, -1, -1).reshape(-1, places * group, dim)

    scores = torch.bmm(qt, k.transpose(1, 2)) * scale
    if softcap is not None:
        scores = softcap * elementwise(torch.tanh, scores / softcap)
    scores = scores.view(num_tiles, num_splits, kv_heads, places, group, SPLIT)
    position = torch.arange(tiles.slots.shape[1], device=q.device).view(1, num_splits, 1, SPLIT)
    lens = tiles.lens[:, None, :, None]  # [T, 1, R, 1]
    visible = position < lens
    if window is not None:
        visible = visible & (position >= lens - window)
    scores = scores.masked_fill(~visible[:, :, None, :, None, :], -math.inf)

    top = scores.amax((1, 5), keepdim=True)
    weights = elementwise(torch.exp, scores - top)
    sums = weights.sum(-1, keepdim=True)
    parts = torch.bmm(weights.view(-1, places * group, SPLIT), v)
    parts = parts.view(num_tiles, num_splits, kv_heads, places, group, v_dim)
    out, total = parts[:, 0], sums[:, 0]
    for split in range(1, num_splits):  # in order: a longer tile only adds zeros
        out, total = out + parts[:, split], total + sums[:, split]
    out = (out / total).permute(0, 2, 1, 3, 4).reshape(num_tiles, places, heads, v_dim)
    return out[tiles.out_tiles, tiles.out_places].to(q.dtype)
