"""Attention of a few query rows per request over a paged cache: decode and verify in one.

Rows of a chain share their request's keys and form tiles. Rows of a tree form tiles along its
branches, their keys in the order of the path: that makes each the row that plain decoding would
compute. Plain torch reads `Tiles`; the Triton kernels read a `Layout`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.paged_attention import reference
from outrider.kernels.paged_attention.layout import Layout, Past, Tile, branches, tree_pasts
from outrider.kernels.paged_attention.reference import SPLIT, Tiles

__all__ = [
    "SPLIT",
    "Layout",
    "Past",
    "Tile",
    "Tiles",
    "branches",
    "paged_attention",
    "tile_rows",
    "tree_pasts",
]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tiles | Layout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out_scale: float = 1.0,
) -> Tensor:
    """Attend from each row to its own past; a row's result depends on nothing else.

    q: [N, Hq, D]; k_cache, v_cache: [S, Hkv, D]
    rows: which rows share which keys: `Tiles` for plain torch, a `Layout` for Triton
    window: attend to the last so many positions only; softcap: c tanh(score / c)
    out_scale: what an 8-bit cache's values are to be multiplied with
    -> [N, Hq, D]
    """
    if isinstance(rows, Tiles):
        return reference.paged_attention(q, k_cache, v_cache, rows, scale, window, softcap)
    from outrider.kernels.paged_attention import triton

    check_heads(q, k_cache, v_cache)
    return triton.paged_attention(q, k_cache, v_cache, rows, scale, window, softcap, out_scale)


def check_heads(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise unless the kernels can read these: they take strides of all but the last dimension."""
    shapes = f"q {list(q.shape)}, keys {list(k_cache.shape)}, values {list(v_cache.shape)}"
    if any(x.stride(-1) != 1 for x in (q, k_cache, v_cache)):
        raise ValueError(f"the last dimension must be contiguous: {shapes}")
    if q.shape[1] % k_cache.shape[1] or k_cache.shape != v_cache.shape:
        raise ValueError(f"heads do not fit: {shapes}")


def tile_rows(
    pasts: Sequence[Past], places: int | None = None, device: torch.device | None = None
) -> Tiles:
    """Lay rows out in tiles. `places` fixes the rows of a tile; None takes the largest past's.

    Row results are comparable bit for bit only between tiles with equally many places.
    """
    size = places or max(len(past.rows) for past in pasts)
    cuts = [(past, i) for past in pasts for i in range(0, len(past.rows), size)]
    longest = max(max(past.lens) for past in pasts)
    slots = torch.zeros(len(cuts), -(-longest // SPLIT) * SPLIT, dtype=torch.int64)
    rows, lens = [], []
    where: dict[int, tuple[int, int]] = {}
    for tile, (past, start) in enumerate(cuts):
        chosen = list(past.rows[start : start + size])
        reach = list(past.lens[start : start + size])
        where.update({row: (tile, place) for place, row in enumerate(chosen)})
        rows.append(chosen + chosen[:1] * (size - len(chosen)))
        lens.append(reach + reach[:1] * (size - len(reach)))
        slots[tile, : len(past.slots)] = past.slots
    found = [where[row] for row in sorted(where)]
    return Tiles(
        rows=torch.tensor(rows, device=device),
        lens=torch.tensor(lens, device=device),
        slots=slots.to(device),
        out_tiles=torch.tensor([tile for tile, _ in found], device=device),
        out_places=torch.tensor([place for _, place in found], device=device),
    )
