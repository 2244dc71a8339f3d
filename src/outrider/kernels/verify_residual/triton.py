"""Residual verification of chains in two launches. Decisions are made in float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels import launch_options
from outrider.kernels.keyed_coins import (
    ACCEPT,
    RECOVER,
    first_best,
    fork,
    hash_column,
    may_win,
    murmur_hash32,
    race,
    row_state,
    uniform,
)
from outrider.kernels.verify_residual.reference import Verified

SPLIT = 4096
"""Tokens of a row for one program."""

LOWEST = tl.constexpr(-1.7976931348623157e308)
"""Below every sum of a logarithm of a probability and its noise."""


@triton.jit
def chain_of(rows_start, i_b, max_drafts):
    """Return a request's first row, the row of q of its first draft, and its number of drafts."""
    start = tl.load(rows_start + i_b)
    rows = tl.load(rows_start + i_b + 1) - start
    # each request before has one row that is no draft: q has no row for it
    return start, start - i_b, tl.minimum(rows - 1, max_drafts)


@triton.jit
def draft_odds(
    p,
    q,
    drafts,
    start,
    q_start,
    count,
    V,
    stride_p,
    stride_q,
    POINT: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Return p(x) / q(x) of each draft, 0 where q(x) is 0: [DRAFTS] float64."""
    o_k = tl.arange(0, DRAFTS)
    m_k = o_k < count
    b_x = tl.load(drafts + start + 1 + o_k, m_k, other=-1)
    m_x = m_k & (b_x >= 0) & (b_x < V)  # what is no token has no probability
    b_p = tl.load(p + (start + o_k) * stride_p + b_x, m_x, other=0.0).to(tl.float64)
    if POINT:
        b_odds = b_p
    else:
        b_q = tl.load(q + (q_start + o_k) * stride_q + b_x, m_x, other=0.0).to(tl.float64)
        b_odds = tl.where(b_q > 0, b_p / tl.where(b_q > 0, b_q, 1.0), 0.0)
    return b_odds


@triton.jit
def left_of(p_row, q_row, x, scale, o_v, V, taken, POINT: tl.constexpr):
    """Return (scale p - q)+ of a tile, float64: [BLOCK].

    taken: V, or 0 to leave all of p
    """
    b_p = tl.load(p_row + o_v, o_v < V, other=0.0).to(tl.float64)
    if POINT:
        b_q = tl.where((o_v == x) & (o_v < taken), 1.0, 0.0).to(tl.float64)
    else:
        b_q = tl.load(q_row + o_v, o_v < taken, other=0.0).to(tl.float64)
    return tl.maximum(scale * b_p - b_q, 0.0)


@triton.jit
def draw_left(
    p_row, q_row, x, scale, begin, end, V, taken, state, POINT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the best log((scale p - q)+) + noise among these tokens, and its token.

    Only differences of logarithms count: what is left need not be normalised.
    """
    best, winner = tl.full([], LOWEST, tl.float64), begin
    for i_v in range(begin, end, BLOCK):
        o_v = i_v + tl.arange(0, BLOCK)
        b_left = left_of(p_row, q_row, x, scale, o_v, V, taken, POINT)
        h = hash_column(state, o_v)
        b_contends = may_win(h, b_left * tl.exp(tl.minimum(-best, 600.0))) & (b_left > 0)
        if tl.max(b_contends.to(tl.int32), 0) > 0:
            b_log = tl.log(tl.where(b_left > 0, b_left, 1.0))
            b_log = tl.where(b_left > 0, b_log, float("-inf"))
            best, winner = race(best, winner, b_log, o_v, h)
    return best, winner


@triton.jit
def recover_state(seeds, positions, start, row):
    """Return the state of the coin that draws the token after `row`."""
    seed = fork(tl.load(seeds + start), RECOVER, tl.load(positions + start))
    return row_state(seed, tl.load(positions + row))


@triton.jit(do_not_specialize=["max_drafts"])
def draw_kernel(
    p,  # [N, V] float32
    q,  # [M, V] float32; with POINT, not read
    drafts,  # [N] int64
    rows_start,  # [B + 1] int64
    seeds,  # [N] int64
    positions,  # [N] int64
    num_accepted,  # [B] int64
    best,  # [B, S] float64
    winner,  # [B, S] int32
    stride_p,
    stride_q,
    V,
    max_drafts,
    POINT: tl.constexpr,
    DRAFTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the drafts that a request keeps, and draw from one split of what follows them.

    Every split counts: that takes two short reads, and saves a launch.
    """
    i_b, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, q_start, count = chain_of(rows_start, i_b, max_drafts)
    if count >= 0:
        o_k = tl.arange(0, DRAFTS)
        b_odds = draft_odds(
            p, q, drafts, start, q_start, count, V, stride_p, stride_q, POINT, DRAFTS
        )
        seed = fork(tl.load(seeds + start), ACCEPT, tl.load(positions + start))
        b_position = tl.load(positions + start + o_k, o_k < count, other=0)
        b_yes = uniform(murmur_hash32(seed, b_position, o_k)) < b_odds  # odds above 1: always
        kept = tl.min(tl.where(b_yes | (o_k >= count), count, o_k), 0)

        row, taken = start + kept, tl.where(kept < count, V, 0)
        x = tl.load(drafts + row + 1, kept < count, other=-1)
        begin = i_s * SPLIT
        b_best, b_winner = draw_left(
            *(p + row * stride_p, q + (q_start + kept) * stride_q, x, 1.0),
            *(begin, tl.minimum(begin + SPLIT, V), V, taken),
            *(recover_state(seeds, positions, start, row), POINT, BLOCK),
        )
        tl.store(best + i_b * tl.num_programs(1) + i_s, b_best)
        tl.store(winner + i_b * tl.num_programs(1) + i_s, b_winner)
        if i_s == 0:
            tl.store(num_accepted + i_b, kept.to(tl.int64))
    elif i_s == 0:
        tl.store(num_accepted + i_b, start * 0)


@triton.jit(do_not_specialize=["max_drafts"])
def pick_kernel(
    p,
    rows_start,
    seeds,
    positions,
    num_accepted,
    best,
    winner,
    next_tokens,  # [B] int64
    stride_p,
    V,
    S,
    max_drafts,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Name the token after the kept drafts: the best of the splits.

    Where rounding has left nothing of p, rejecting had probability 0: the draw is from p.
    """
    i_b = tl.program_id(0).to(tl.int64)
    start, _, count = chain_of(rows_start, i_b, max_drafts)
    token = (start * 0 - 1).to(tl.int32)
    if count >= 0:
        o_s = tl.arange(0, SPLITS)
        b_best = tl.load(best + i_b * S + o_s, o_s < S, other=LOWEST)
        b_winner = tl.load(winner + i_b * S + o_s, o_s < S, other=0x7FFFFFFF)
        token = first_best(b_best, b_winner)
        if tl.max(b_best, 0) == LOWEST:
            row = start + tl.load(num_accepted + i_b)
            state = recover_state(seeds, positions, start, row)
            p_row = p + row * stride_p
            _top, token = draw_left(p_row, p_row, -1, 1.0, 0, V, V, 0, state, True, BLOCK)
    tl.store(next_tokens + i_b, token.to(tl.int64))


def verify_residual(
    p: Tensor,
    q: Tensor | None,
    drafts: Tensor,
    rows_start: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_drafts: int,
) -> Verified:
    """Launch `draw_kernel` and `pick_kernel`; see the reference."""
    batch, vocab_size = len(rows_start) - 1, p.shape[1]
    counts = seeds.new_empty(batch)
    if not batch:
        return Verified(counts, counts)
    splits = triton.cdiv(vocab_size, SPLIT)
    best = torch.empty(batch, splits, dtype=torch.float64, device=p.device)
    winner = torch.empty(batch, splits, dtype=torch.int32, device=p.device)
    q_rows = p if q is None else q
    draw_kernel[(batch, splits)](
        *(p, q_rows, drafts, rows_start, seeds, positions, counts, best, winner),
        *(p.stride(0), q_rows.stride(0), vocab_size, max_drafts),
        POINT=q is None,
        DRAFTS=triton.next_power_of_2(max(1, max_drafts)),
        SPLIT=SPLIT,
        BLOCK=1024,
        **launch_options(8),
    )
    return pick(p, rows_start, seeds, positions, counts, best, winner, max_drafts)


def pick(
    p: Tensor,
    rows_start: Tensor,
    seeds: Tensor,
    positions: Tensor,
    counts: Tensor,
    best: Tensor,
    winner: Tensor,
    max_drafts: int,
) -> Verified:
    """Launch `pick_kernel`: the last step of both rules.

    counts: [B] drafts kept; best, winner: [B, S] of each split
    """
    next_tokens = torch.empty_like(counts)
    (batch, splits), vocab_size = best.shape, p.shape[1]
    pick_kernel[(batch,)](
        *(p, rows_start, seeds, positions, counts, best, winner, next_tokens),
        *(p.stride(0), vocab_size, splits, max_drafts),
        SPLITS=triton.next_power_of_2(splits),
        BLOCK=1024,
        **launch_options(4),
    )
    return Verified(counts, next_tokens)
