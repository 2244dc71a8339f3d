"""Block verification of chains in three launches. Decisions are made in float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels import launch_options
from outrider.kernels.keyed_coins import ACCEPT, fork, murmur_hash32, uniform
from outrider.kernels.verify_residual.reference import Verified
from outrider.kernels.verify_residual.triton import (
    SPLIT,
    chain_of,
    draft_odds,
    draw_left,
    left_of,
    pick,
    recover_state,
)


@triton.jit
def _prefix_ratios(b_odds, count, DRAFTS: tl.constexpr):
    """Return r_1, r_2, ...: r_i = min(1, r_(i-1) p(x_i)/q(x_i)), [DRAFTS] float64."""
    o_k = tl.arange(0, DRAFTS)
    r = tl.full([], 1.0, tl.float64)
    b_r = tl.zeros([DRAFTS], tl.float64)
    for k in range(0, count):
        r = tl.minimum(r * tl.sum(tl.where(o_k == k, b_odds, 0.0), 0), 1.0)
        b_r = tl.where(o_k == k, r, b_r)
    return b_r


@triton.jit(do_not_specialize=["max_drafts"])
def mass_kernel(
    p,  # [N, V] float32
    q,  # [M, V] float32; with POINT, not read
    drafts,  # [N] int64
    rows_start,  # [B + 1] int64
    mass,  # [B, D - 1, S] float64
    stride_p,
    stride_q,
    V,
    max_drafts,
    POINT: tl.constexpr,
    DRAFTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up (r_i p - q)+ after the first i drafts, over one split; i = 1 ... count - 1."""
    i_b, i, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1) + 1, tl.program_id(2)
    start, q_start, count = chain_of(rows_start, i_b, max_drafts)
    if i < count:
        b_odds = draft_odds(p, q, drafts, start, q_start, i, V, stride_p, stride_q, POINT, DRAFTS)
        b_r = _prefix_ratios(b_odds, i, DRAFTS)
        r = tl.sum(tl.where(tl.arange(0, DRAFTS) == i - 1, b_r, 0.0), 0)
        p_row, q_row = p + (start + i) * stride_p, q + (q_start + i) * stride_q
        x = tl.load(drafts + start + i + 1)
        begin = i_s * SPLIT
        b_mass = tl.zeros([BLOCK], tl.float64)
        for i_v in range(begin, tl.minimum(begin + SPLIT, V), BLOCK):
            o_v = i_v + tl.arange(0, BLOCK)
            b_mass += left_of(p_row, q_row, x, r, o_v, V, V, POINT)
        p_mass = mass + (i_b * tl.num_programs(1) + i - 1) * tl.num_programs(2) + i_s
        tl.store(p_mass, tl.sum(b_mass, 0))


@triton.jit(do_not_specialize=["max_drafts"])
def draw_kernel(
    p,
    q,
    drafts,
    rows_start,
    seeds,  # [N] int64
    positions,  # [N] int64
    mass,
    num_accepted,  # [B] int64
    best,  # [B, S] float64
    winner,  # [B, S] int32
    stride_p,
    stride_q,
    V,
    max_drafts,
    POINT: tl.constexpr,
    DRAFTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the longest prefix that passes, and draw from one split of what follows it."""
    i_b, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_splits = tl.num_programs(1)
    start, q_start, count = chain_of(rows_start, i_b, max_drafts)
    if count >= 0:
        b_odds = draft_odds(
            p, q, drafts, start, q_start, count, V, stride_p, stride_q, POINT, DRAFTS
        )
        b_r = _prefix_ratios(b_odds, count, DRAFTS)
        o_i, o_s = tl.arange(0, DRAFTS) + 1, tl.arange(0, SPLITS)
        p_mass = mass + (i_b * (max_drafts - 1) + o_i - 1)[:, None] * num_splits + o_s[None, :]
        m_mass = (o_i < count)[:, None] & (o_s < num_splits)[None, :]
        b_mass = tl.sum(tl.load(p_mass, m_mass, other=0.0), 1)  # [DRAFTS] S_i

        # S / (S + 1 - r), where its limit 0 / 0 is 1; the whole chain passes with r itself
        b_rest = b_mass + (1 - b_r)
        b_h = tl.where(b_mass > 0, b_mass / tl.where(b_rest > 0, b_rest, 1.0), 0.0)
        b_h = tl.where((b_mass > 0) | (b_r < 1), b_h, 1.0)
        b_h = tl.where(o_i == count, b_r, b_h)
        position = tl.load(positions + start)
        seed = fork(tl.load(seeds + start), ACCEPT, position)
        b_yes = uniform(murmur_hash32(seed, position + o_i, o_i)) < b_h
        kept = tl.max(tl.where(b_yes & (o_i <= count), o_i, 0), 0)

        row, taken = start + kept, tl.where(kept < count, V, 0)
        x = tl.load(drafts + row + 1, kept < count, other=-1)
        r = tl.sum(tl.where(o_i == kept, b_r, 0.0), 0)
        scale = tl.where((kept > 0) & (kept < count), r, 1.0)  # r_0 is 1
        begin = i_s * SPLIT
        b_best, b_winner = draw_left(
            *(p + row * stride_p, q + (q_start + kept) * stride_q, x, scale),
            *(begin, tl.minimum(begin + SPLIT, V), V, taken),
            *(recover_state(seeds, positions, start, row), POINT, BLOCK),
        )
        tl.store(best + i_b * num_splits + i_s, b_best)
        tl.store(winner + i_b * num_splits + i_s, b_winner)
        if i_s == 0:
            tl.store(num_accepted + i_b, kept.to(tl.int64))
    elif i_s == 0:
        tl.store(num_accepted + i_b, start * 0)


def verify_block(
    p: Tensor,
    q: Tensor | None,
    drafts: Tensor,
    rows_start: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_drafts: int,
) -> Verified:
    """Launch `mass_kernel`, `draw_kernel` and `pick_kernel`; see the reference."""
    batch, vocab_size = len(rows_start) - 1, p.shape[1]
    counts = seeds.new_empty(batch)
    if not batch:
        return Verified(counts, counts)
    splits = triton.cdiv(vocab_size, SPLIT)
    inner = max(0, max_drafts - 1)  # prefixes that are neither empty nor the longest chain
    mass = torch.empty(batch, inner, splits, dtype=torch.float64, device=p.device)
    best = torch.empty(batch, splits, dtype=torch.float64, device=p.device)
    winner = torch.empty(batch, splits, dtype=torch.int32, device=p.device)
    q_rows = p if q is None else q
    chains = (p, q_rows, drafts, rows_start)
    sizes = (p.stride(0), q_rows.stride(0), vocab_size, max_drafts)
    drafts_block = triton.next_power_of_2(max(1, max_drafts))
    tile = {"POINT": q is None, "DRAFTS": drafts_block, "SPLIT": SPLIT, "BLOCK": 1024}
    if inner:
        mass_kernel[(batch, inner, splits)](*chains, mass, *sizes, **tile, **launch_options(4))
    draw_kernel[(batch, splits)](
        *(*chains, seeds, positions, mass, counts, best, winner, *sizes),
        **tile,
        SPLITS=triton.next_power_of_2(splits),
        **launch_options(8),
    )
    return pick(p, rows_start, seeds, positions, counts, best, winner, max_drafts)
