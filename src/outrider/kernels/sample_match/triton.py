"""Sampling by keyed coins, and matching, in three launches without a sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels import launch_options
from outrider.kernels.keyed_coins import first_best, hash_column, may_win, race, row_state
from outrider.kernels.sample_match.reference import Matched

SPLIT = 4096
"""Tokens of a row for one program: a single row of 151,936 still keeps 38 programs busy."""

LOWEST = tl.constexpr(-1.7976931348623157e308)
"""Below every sum of a finite logit and its noise."""


@triton.jit
def _load(p_row, o_v, V, temperature):
    """Return logits over the temperature, float32; -inf for NaN and beyond the row's end."""
    b_x = tl.load(p_row + o_v, o_v < V, other=float("-inf")).to(tl.float32)
    # `/` is an approximation on some devices; core's division rounds to nearest
    b_x = tl.div_rn(b_x, temperature)
    return tl.where(b_x == b_x, b_x, float("-inf"))


@triton.jit
def _is_filtered(i_n, temperature, top_k, top_p, min_p, V):
    """Return whether the row samples from a part of the vocabulary. A greedy row never does."""
    k, p = tl.load(top_k + i_n), tl.load(top_p + i_n)
    cut = ((k > 0) & (k < V)) | (p < 1) | (tl.load(min_p + i_n) > 0)
    return cut & (tl.load(temperature + i_n) != 0)


@triton.jit
def _draw(best, winner, b_x, o_v, state):
    """Return the best logit + noise so far and its token, this tile included."""
    h = hash_column(state, o_v)
    # odds of 1 and more always contend: the cap only avoids overflow
    b_lead = tl.minimum(b_x.to(tl.float64) - best, 0.0)
    b_contends = may_win(h, tl.exp(b_lead.to(tl.float32)))
    if tl.max(b_contends.to(tl.int32), 0) > 0:
        best, winner = race(best, winner, b_x.to(tl.float64), o_v, h)
    return best, winner


@triton.jit
def draw_kernel(
    logits,  # [N, V]
    temperature,  # [N] 0: greedy
    top_k,
    top_p,
    min_p,
    seeds,  # [N] int64
    positions,  # [N] int64
    best,  # [N, S] float64
    winner,  # [N, S] int32
    stride,
    V,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the best logit + noise of one split of an unfiltered row, and its token."""
    i_n, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if not _is_filtered(i_n, temperature, top_k, top_p, min_p, V):
        p_row = logits + i_n * stride
        t = tl.load(temperature + i_n)
        state = row_state(tl.load(seeds + i_n), tl.load(positions + i_n))
        start = i_s * SPLIT
        end = tl.minimum(start + SPLIT, V)
        b_best, b_winner = tl.full([], LOWEST, tl.float64), start
        if t == 0:  # no noise, so no logarithms
            for i_v in range(start, end, BLOCK):
                o_v = i_v + tl.arange(0, BLOCK)
                b_x = _load(p_row, o_v, V, 1.0).to(tl.float64)
                top = tl.max(b_x, 0)
                first = tl.min(tl.where(b_x == top, o_v, 0x7FFFFFFF), 0)
                b_winner = tl.where(top > b_best, first, b_winner)
                b_best = tl.maximum(b_best, top)
        else:
            for i_v in range(start, end, BLOCK):
                o_v = i_v + tl.arange(0, BLOCK)
                b_x = _load(p_row, o_v, V, t)
                b_best, b_winner = _draw(b_best, b_winner, b_x, o_v, state)
        tl.store(best + i_n * tl.num_programs(1) + i_s, b_best)
        tl.store(winner + i_n * tl.num_programs(1) + i_s, b_winner)


@triton.jit
def _largest(p_row, V, t, BLOCK: tl.constexpr):
    """Return the largest logit of a row."""
    b_max = tl.full([BLOCK], float("-inf"), tl.float32)
    for i_v in range(0, V, BLOCK):
        b_max = tl.maximum(b_max, _load(p_row, i_v + tl.arange(0, BLOCK), V, t))
    return tl.max(b_max, 0)


@triton.jit
def _kth_largest(p_row, V, t, k, BLOCK: tl.constexpr):
    """Return the k-th largest logit of a row: its digits of 8 bits, from the highest down."""
    found, shift = tl.full([], 0, tl.uint32), tl.full([], 24, tl.uint32)
    for _ in range(4):
        b_count = tl.zeros([256], tl.int32)
        for i_v in range(0, V, BLOCK):
            o_v = i_v + tl.arange(0, BLOCK)
            b_x = _load(p_row, o_v, V, t)
            b_bits = tl.where(b_x == 0, 0.0, b_x).to(tl.uint32, bitcast=True)  # -0 is 0
            # as unsigned integers these are in the order of the floats
            b_key = b_bits ^ tl.where(b_bits >= 0x80000000, 0xFFFFFFFF, 0x80000000)
            b_same = ((b_key ^ found) >> shift >> 8) == 0  # shares the digits found so far
            b_digit = ((b_key >> shift) & 0xFF).to(tl.int32)
            b_count += tl.histogram(b_digit, 256, (o_v < V) & b_same)
        b_above = tl.sum(b_count, 0) - tl.cumsum(b_count, 0)  # how many have a larger digit
        digit = tl.sum((b_above >= k).to(tl.int32), 0)
        k -= tl.max(tl.where(b_above < k, b_above, 0), 0)
        found |= digit.to(tl.uint32) << shift
        shift -= 8
    bits = found ^ tl.where(found >= 0x80000000, 0x80000000, 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mass_before(p_row, V, t, largest, x, token, BLOCK: tl.constexpr):
    """Return the sum of exp(logit - largest) over what is ordered before (x, token), float64."""
    b_mass = tl.zeros([BLOCK], tl.float64)
    for i_v in range(0, V, BLOCK):
        o_v = i_v + tl.arange(0, BLOCK)
        b_x = _load(p_row, o_v, V, t)
        b_before = (b_x > x) | ((b_x == x) & (o_v < token))
        if tl.max(b_before.to(tl.int32), 0) > 0:  # most tiles have nothing: spare their exp
            b_exp = tl.exp(b_x.to(tl.float64) - largest.to(tl.float64))
            b_mass += tl.where(b_before, b_exp, 0.0)
    return tl.sum(b_mass, 0)


@triton.jit
def _draw_filtered(p_row, V, t, k, p, min_p, state, BLOCK: tl.constexpr):
    """Return the token of a row with top-k, top-p or min-p.

    What is kept is a beginning of the order (larger logit, then lower id). So where the best of
    all candidates is not kept, nothing behind it is, and the search goes on before it.
    """
    largest = _largest(p_row, V, t, BLOCK)
    kth, floor = tl.full([], float("-inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
    if min_p > 0:
        floor = largest + tl.log(min_p.to(tl.float64)).to(tl.float32)
    floor = tl.minimum(floor, largest)  # the largest is kept: without a candidate, no search ends
    largest = tl.maximum(largest, -3.4028234663852886e38)  # a row of -inf alone has mass 0
    if (k > 0) & (k < V):
        kth = _kth_largest(p_row, V, t, k, BLOCK)
        floor = tl.maximum(floor, kth)
    limit = tl.full([], 0.0, tl.float64)
    if p < 1:
        limit = p.to(tl.float64) * _mass_before(p_row, V, t, largest, kth, V, BLOCK)

    x, token = tl.full([], float("-inf"), tl.float32), V  # candidates are ordered before this
    searching = True
    while searching:
        best, winner = tl.full([], LOWEST, tl.float64), 0
        for i_v in range(0, V, BLOCK):
            o_v = i_v + tl.arange(0, BLOCK)
            b_x = _load(p_row, o_v, V, t)
            b_before = (b_x > x) | ((b_x == x) & (o_v < token))
            b_x = tl.where(b_before & (b_x >= floor), b_x, float("-inf"))
            best, winner = _draw(best, winner, b_x, o_v, state)
        x, token = _load(p_row, winner, V, t), winner
        searching = False
        if p < 1:
            mass = _mass_before(p_row, V, t, largest, x, token, BLOCK)
            searching = (mass > 0) & (mass >= limit)  # nothing before it: always kept
    return token


@triton.jit
def pick_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    best,
    winner,
    tokens,  # [N] int64
    stride,
    V,
    S,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Name the token of each row: the best of its splits, or drawn here if it is filtered."""
    i_n = tl.program_id(0).to(tl.int64)
    if _is_filtered(i_n, temperature, top_k, top_p, min_p, V):
        k, p, m = tl.load(top_k + i_n), tl.load(top_p + i_n), tl.load(min_p + i_n)
        state = row_state(tl.load(seeds + i_n), tl.load(positions + i_n))
        t = tl.load(temperature + i_n)
        token = _draw_filtered(logits + i_n * stride, V, t, k, p, m, state, BLOCK)
        tl.store(tokens + i_n, token.to(tl.int64))
    else:
        o_s = tl.arange(0, SPLITS)
        b_best = tl.load(best + i_n * S + o_s, o_s < S, other=float("-inf"))
        b_winner = tl.load(winner + i_n * S + o_s, o_s < S, other=0x7FFFFFFF)
        tl.store(tokens + i_n, first_best(b_best, b_winner).to(tl.int64))


@triton.jit(do_not_specialize=["D"])
def match_kernel(
    tokens,  # [N] int64 the target's own
    drafts,  # [N] int64
    parents,  # [N] int64
    rows_start,  # [B + 1] int64
    accepted,  # [B, D] int64
    num_accepted,  # [B] int64
    next_tokens,  # [B] int64
    D,
    DEPTHS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Walk down one request's tree along the drafts that are the target's own tokens.

    Children stand behind their parents, and a walk only goes forward: one pass over the rows.
    """
    i_b = tl.program_id(0).to(tl.int64)
    start = tl.load(rows_start + i_b)
    count = tl.load(rows_start + i_b + 1) - start
    o_d = tl.arange(0, DEPTHS)
    b_accepted = tl.full([DEPTHS], -1, tl.int64)
    at, depth = start * 0, 0
    for i_r in range(0, count, ROWS):
        o_r = i_r + tl.arange(0, ROWS)
        m_r = (o_r > 0) & (o_r < count)
        b_parent = tl.load(parents + start + o_r, m_r, other=-1)
        b_draft = tl.load(drafts + start + o_r, m_r, other=-1)
        b_y = tl.load(tokens + start + b_parent, m_r & (b_parent >= 0), other=-2)
        b_parent = tl.where(b_draft == b_y, b_parent, -1)  # a draft that differs has no parent
        child = tl.min(tl.where(b_parent == at, o_r, count), 0)
        while (child < count) & (depth < D):
            b_accepted = tl.where(o_d == depth, child, b_accepted)
            at, depth = child, depth + 1
            child = tl.min(tl.where(b_parent == at, o_r, count), 0)
    tl.store(accepted + i_b * D + o_d, b_accepted, o_d < D)
    tl.store(num_accepted + i_b, depth)
    # a request of no rows, as in a padded batch, emits nothing
    tl.store(next_tokens + i_b, tl.load(tokens + start + at, count > 0, other=-1))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Launch `draw_kernel` and `pick_kernel`; see the reference."""
    num_rows, vocab_size = logits.shape
    tokens = seeds.new_empty(num_rows)
    if not num_rows:
        return tokens
    splits = triton.cdiv(vocab_size, SPLIT)
    best = torch.empty(num_rows, splits, dtype=torch.float64, device=logits.device)
    winner = torch.empty(num_rows, splits, dtype=torch.int32, device=logits.device)
    arguments = (logits, temperature, top_k, top_p, min_p, seeds, positions)
    stride = logits.stride(0)
    draw_kernel[(num_rows, splits)](
        *arguments, best, winner, stride, vocab_size, SPLIT=SPLIT, BLOCK=1024, **launch_options(4)
    )
    places = triton.next_power_of_2(splits)
    pick_kernel[(num_rows,)](
        *arguments,
        best,
        winner,
        tokens,
        stride,
        vocab_size,
        splits,
        places,
        BLOCK=2048,
        **launch_options(8),
    )
    return tokens


def match(
    tokens: Tensor, drafts: Tensor, parents: Tensor, rows_start: Tensor, max_depth: int
) -> Matched:
    """Launch `match_kernel`; see the reference."""
    batch = len(rows_start) - 1
    accepted = tokens.new_empty(batch, max_depth)
    counts, next_tokens = tokens.new_empty(batch), tokens.new_empty(batch)
    if batch:
        match_kernel[(batch,)](
            *(tokens, drafts, parents, rows_start, accepted, counts, next_tokens, max_depth),
            DEPTHS=triton.next_power_of_2(max(1, max_depth)),
            ROWS=32,
            **launch_options(1),
        )
    return Matched(accepted, counts, next_tokens)
