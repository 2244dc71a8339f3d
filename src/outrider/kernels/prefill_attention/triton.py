"""Prefill attention in Triton: the tiles of paged attention, their splits one after another.

The same two functions in the same order as decode: if both use one tile, a position has the same
bits whether it was prefilled at once, in chunks, over a cached prefix, decoded or verified.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels import arch
from outrider.kernels.paged_attention.layout import Layout
from outrider.kernels.paged_attention.triton import (
    attend_split,
    load_rows,
    merge,
    split_start,
    store_rows,
    tile_rows,
    tile_splits,
)


@triton.jit(do_not_specialize_on_alignment=["slots", "tiles", "rows", "lens"])
def _prefill(
    q, k_cache, v_cache, slots, tiles, rows, lens, out,
    scale, softcap, window, out_scale,
    stride_qn, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh, stride_on, stride_oh,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    # the last tiles have the most keys: start with them
    i_t, i_h = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    p_tile = tiles + i_t * FIELDS
    i_row, i_head, b_len = tile_rows(p_tile, rows, lens, i_h, G, BLOCK_M)
    first, last, reach = tile_splits(p_tile, b_len, window, SPLIT, WINDOW)
    o_d = tl.arange(0, BLOCK_D)
    p_q = q + i_row.to(tl.int64) * stride_qn + i_head * stride_qh
    b_q = load_rows(p_q[:, None], b_len > 0, o_d, D, BLOCK_D)
    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i_s in range(first, last):
        start, end = split_start(i_s, SPLIT), split_start(i_s + 1, SPLIT)
        s_m, s_l, s_acc = attend_split(
            b_q, b_len, start, tl.minimum(end, reach), slots + tl.load(p_tile + 2),
            k_cache + i_h * stride_kh, v_cache + i_h * stride_vh, stride_ks, stride_vs,
            scale, softcap, window,
            D, BLOCK_D, BLOCK_M, BLOCK_N, PAGE, SOFTCAP, WINDOW,
        )  # fmt: skip
        b_m, b_l, b_acc = merge(b_m, b_l, b_acc, s_m, s_l, s_acc)
    i_row, i_head, o_len = tile_rows(p_tile, rows, lens, i_h, G, BLOCK_M)
    p_out = out + i_row.to(tl.int64) * stride_on + i_head * stride_oh
    store_rows(p_out, o_len > 0, b_l, b_acc, out_scale, o_d, D)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out_scale: float = 1.0,
) -> Tensor:
    """Attend from each row to its own past, the new keys included: they are in the cache already.

    Shapes as in `paged_attention`, whose layouts it takes.
    """
    (_, heads, dim), kv_heads, tile = q.shape, k_cache.shape[1], layout.tile
    out = torch.empty_like(q)
    _prefill[(len(layout.tiles), kv_heads)](
        q, k_cache, v_cache, layout.slots, layout.tiles, layout.rows, layout.lens, out,
        scale, softcap or 0.0, window or 0, out_scale,
        *q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2], *out.stride()[:2],
        G=heads // kv_heads, D=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_M=tile.rows,
        BLOCK_N=tile.keys, SPLIT=tile.split, PAGE=layout.page, SOFTCAP=softcap is not None,
        WINDOW=window is not None, FIELDS=layout.tiles.shape[1],
        **tile.options(arch(q.device), dim, True, softcap is not None),
    )  # fmt: skip
    return out
