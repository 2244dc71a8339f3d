"""Paged attention in Triton: split-KV, one binary for decode, chains and trees.

A row's answer is a fold over splits of its keys: `attend_split` reduces one split, `merge` adds it
to what the splits before gave. Where splits begin depends on the position alone (`splits`), so
neither the batch nor the number of rows changes what is added to what. Here splits run in parallel
and `_combine` folds them in order; `prefill_attention` runs the same two functions one after
another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels import arch, launch_options
from outrider.kernels.paged_attention.layout import Layout
from outrider.kernels.paged_attention.splits import SAME

LOG2_E = tl.constexpr(1.4426950408889634)
_WAVES_OF_PROGRAMS = 4


@triton.jit
def load_rows(p_rows, m_rows, o_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load [rows, BLOCK_D]: zeros where a row is masked, and beyond D."""
    m = m_rows[:, None]
    if D < BLOCK_D:
        m = m & (o_d < D)[None, :]
    return tl.load(p_rows + o_d[None, :], mask=m, other=0.0)


@triton.jit
def attend_split(
    b_q,  # [M, D] query rows
    b_len,  # [M] how many positions each of them attends to
    start,  # the split's positions: [start, end)
    end,
    p_slots,  # the table of slots (or pages), at position 0
    p_k,  # the caches, at this kv head
    p_v,
    stride_ks,
    stride_vs,
    scale,
    softcap,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Reduce one split: the largest score of each row, the sum of its weights, and of its values.

    Scores are in units of log 2. A row that sees nothing of the split gets (-inf, 0, 0).
    """
    o_d = tl.arange(0, BLOCK_D)
    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(start, end, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        b_slot = tl.load(p_slots + o_n // PAGE, mask=m_n, other=0).to(tl.int64)
        if PAGE > 1:
            b_slot = b_slot * PAGE + o_n % PAGE
        # an 8-bit cache is widened here; its scale is part of `scale`
        b_k = load_rows(p_k + b_slot[:, None] * stride_ks, m_n, o_d, D, BLOCK_D).to(b_q.dtype)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale  # [M, N]
        if SOFTCAP:
            b_s = softcap * (2 * tl.sigmoid(2 * b_s / softcap) - 1)  # tanh
        visible = o_n[None, :] < b_len[:, None]
        if WINDOW:
            visible = visible & (o_n[None, :] >= b_len[:, None] - window)
        b_s = tl.where(visible, b_s * LOG2_E, float("-inf"))
        m_new = tl.maximum(b_m, tl.max(b_s, 1))
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        b_w = tl.exp2(b_s - m_ref[:, None])
        fade = tl.exp2(b_m - m_ref)
        b_l = b_l * fade + tl.sum(b_w, 1)
        b_v = load_rows(p_v + b_slot[:, None] * stride_vs, m_n, o_d, D, BLOCK_D).to(b_q.dtype)
        b_acc = tl.dot(b_w.to(b_q.dtype), b_v, b_acc * fade[:, None], input_precision="ieee")
        b_m = m_new
    return b_m, b_l, b_acc


@triton.jit
def merge(b_m, b_l, b_acc, s_m, s_l, s_acc):
    """Add the next split to the sum of those before it."""
    m_new = tl.maximum(b_m, s_m)
    m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
    fade, gain = tl.exp2(b_m - m_ref), tl.exp2(s_m - m_ref)
    return m_new, b_l * fade + s_l * gain, b_acc * fade[:, None] + s_acc * gain[:, None]


@triton.jit
def tile_rows(p_tile, p_rows, p_lens, i_h, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the row, head and length at each place of a tile; the length is 0 where it is empty.

    Query heads of one kv head are rows of the same product.
    """
    o_m = tl.arange(0, BLOCK_M)
    place, count = tl.load(p_tile), tl.load(p_tile + 1).to(tl.int32)
    m_row = o_m < count * G
    i_row = tl.load(p_rows + place + o_m // G, mask=m_row, other=0)
    b_len = tl.load(p_lens + i_row, mask=m_row, other=0)
    return i_row, i_h * G + o_m % G, b_len


@triton.jit
def split_start(i_s, SPLIT: tl.constexpr, SAME: tl.constexpr = SAME):
    """Return the first position of a split, as `splits.split_start` does."""
    block = i_s // SAME
    return SPLIT * (block + 1) * (SAME // 2 * block + i_s % SAME)


@triton.jit
def split_of(position, SPLIT: tl.constexpr, SAME: tl.constexpr = SAME):
    """Return the split of a position."""
    units = position // SPLIT
    # halfway between two integers' squares: no rounding of the root reaches the next integer
    root = tl.sqrt(units.to(tl.float32) + 1.5).to(tl.int32)
    block = (root - 1) // 2
    return SAME * block + (units - SAME // 2 * block * (block + 1)) // (block + 1)


@triton.jit
def tile_splits(p_tile, b_len, window, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """Return the splits [first, last) that a tile's rows see, and its longest row's length."""
    first, last = tl.load(p_tile + 3).to(tl.int32), tl.load(p_tile + 4).to(tl.int32)
    reach = tl.max(b_len, 0)
    last = tl.minimum(last, tl.where(reach > 0, split_of(tl.maximum(reach - 1, 0), SPLIT) + 1, 0))
    if WINDOW:
        shortest = tl.min(tl.where(b_len > 0, b_len, reach), 0)
        first = tl.maximum(first, split_of(tl.maximum(shortest - window, 0), SPLIT))
    return first, last, reach


@triton.jit(do_not_specialize_on_alignment=["slots", "tails", "tiles", "rows", "lens", "parts"])
def _partial(
    q, k_cache, v_cache, slots, tails, tiles, rows, lens, parts, part_acc, part_stats,
    scale, softcap, window,
    stride_qn, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    p_tile, i_h = tiles + tl.program_id(0) * FIELDS, tl.program_id(1)
    i_row, i_head, b_len = tile_rows(p_tile, rows, lens, i_h, G, BLOCK_M)
    first, last, reach = tile_splits(p_tile, b_len, window, SPLIT, WINDOW)
    o_d = tl.arange(0, BLOCK_D)
    p_q = q + i_row.to(tl.int64) * stride_qn + i_head * stride_qh
    b_q = load_rows(p_q[:, None], b_len > 0, o_d, D, BLOCK_D)
    # the grid is fixed while lengths grow: splits are strided over programs
    for i_s in range(first + tl.program_id(2), last, tl.num_programs(2)):
        start, end = split_start(i_s, SPLIT), split_start(i_s + 1, SPLIT)
        p_slots = tl.where(tl.load(p_tile + 5) == 0, slots, tails) + tl.load(p_tile + 2)
        b_m, b_l, b_acc = attend_split(
            b_q, b_len, start, tl.minimum(end, reach), p_slots,
            k_cache + i_h * stride_kh, v_cache + i_h * stride_vh, stride_ks, stride_vs,
            scale, softcap, window,
            D, BLOCK_D, BLOCK_M, BLOCK_N, PAGE, SOFTCAP, WINDOW,
        )  # fmt: skip
        # read again what the loop above would have to keep in registers
        i_row, i_head, _ = tile_rows(p_tile, rows, lens, i_h, G, BLOCK_M)
        m_part = b_l != 0.0  # the row sees some of this split
        o_part = (tl.load(parts + i_row, mask=m_part, other=0) + i_s).to(tl.int64) * H + i_head
        tl.store(part_stats + o_part * 2, b_m, mask=m_part)
        tl.store(part_stats + o_part * 2 + 1, b_l, mask=m_part)
        m_acc = m_part[:, None] & (o_d < D)[None, :]
        tl.store(part_acc + o_part[:, None] * D + o_d[None, :], b_acc, mask=m_acc)


@triton.jit(do_not_specialize_on_alignment=["lens", "parts"])
def _combine(
    part_acc, part_stats, lens, parts, out, window, out_scale, stride_on, stride_oh,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    i_row, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g = o_g < G
    m_out = m_g[:, None] & (o_d < D)[None, :]
    length, i_part = tl.load(lens + i_row), tl.load(parts + i_row)
    first = 0
    if WINDOW:
        first = split_of(tl.maximum(length - window, 0), SPLIT)
    b_m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    last = tl.where(length > 0, split_of(tl.maximum(length - 1, 0), SPLIT) + 1, 0)
    for i_s in range(first, last):
        o_part = (i_part + i_s).to(tl.int64) * H + i_h * G + o_g
        s_m = tl.load(part_stats + o_part * 2, mask=m_g, other=float("-inf"))
        s_l = tl.load(part_stats + o_part * 2 + 1, mask=m_g, other=0.0)
        s_acc = tl.load(part_acc + o_part[:, None] * D + o_d[None, :], mask=m_out, other=0.0)
        b_m, b_l, b_acc = merge(b_m, b_l, b_acc, s_m, s_l, s_acc)
    store_rows(out + i_row * stride_on + (i_h * G + o_g) * stride_oh, m_g, b_l, b_acc, out_scale,
               o_d, D)  # fmt: skip


@triton.jit
def store_rows(p_rows, m_rows, b_l, b_acc, out_scale, o_d, D: tl.constexpr):
    """Divide by the sum of weights and store; a row that saw nothing (padding) becomes 0."""
    b_o = b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None] * out_scale
    m = m_rows[:, None] & (o_d < D)[None, :]
    tl.store(p_rows[:, None] + o_d[None, :], b_o.to(p_rows.dtype.element_ty), mask=m)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 304
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out_scale: float = 1.0,
    programs: int | None = None,
) -> Tensor:
    """Attend from each row to its own past; see the reference. Safe to capture in a graph.

    programs: how many share the splits of a tile and kv head; None: enough to fill the device
    """
    (n, heads, dim), kv_heads, tile = q.shape, k_cache.shape[1], layout.tile
    out = torch.empty_like(q)
    part_acc = torch.empty(layout.num_parts, heads, dim, dtype=torch.float32, device=q.device)
    part_stats = torch.empty(layout.num_parts, heads, 2, dtype=torch.float32, device=q.device)
    shape = {
        "H": heads,
        "G": heads // kv_heads,
        "D": dim,
        "BLOCK_D": triton.next_power_of_2(dim),
        "SPLIT": tile.split,
        "WINDOW": window is not None,
    }
    options = tile.options(arch(q.device), dim, softcap=softcap is not None)
    tails = layout.slots if layout.tails is None else layout.tails
    num_tiles = len(layout.tiles)
    if programs is None:  # by rows: a layout for graphs has tiles that are empty without a tree
        programs = _WAVES_OF_PROGRAMS * _processors(q.device) // (n * kv_heads)
    programs = max(1, min(programs, layout.max_splits))
    _partial[(num_tiles, kv_heads, programs)](
        q, k_cache, v_cache, layout.slots, tails, layout.tiles, layout.rows, layout.lens,
        layout.parts, part_acc, part_stats, scale, softcap or 0.0, window or 0,
        *q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2],
        **shape, BLOCK_M=tile.rows, BLOCK_N=tile.keys, PAGE=layout.page,
        SOFTCAP=softcap is not None, FIELDS=layout.tiles.shape[1], **options,
    )  # fmt: skip
    _combine[(n, kv_heads)](
        part_acc, part_stats, layout.lens, layout.parts, out, window or 0, out_scale,
        *out.stride()[:2],
        **shape, BLOCK_G=triton.next_power_of_2(heads // kv_heads),
        **launch_options(1),
    )  # fmt: skip
    return out
