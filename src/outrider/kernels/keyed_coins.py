"""The coins of `outrider.core.coins`, for use inside Triton kernels: the same bits for a key.

Hashes and uniforms are equal to core's. Noise is computed in float64 by core's formula; a device's
`log` may differ from the CPU's in the last bit, so two tokens whose sums lie within about 1e-15 of
each other could change places, and nothing else could.

A draw takes the largest logit + noise, and the lowest token id of equals. Two float64 logarithms
for every token of a vocabulary would cost more than reading it, so `may_win` rules most of them
out by a comparison of integers with the odds; see there.
"""

from __future__ import annotations

import triton
import triton.language as tl

DRAFT = tl.constexpr(1)
ACCEPT = tl.constexpr(2)
RECOVER = tl.constexpr(3)
"""What a coin is for: the values of `core.Stream`."""


@triton.jit
def _mix(h, k):
    k *= 0xCC9E2D51
    h ^= ((k << 15) | (k >> 17)) * 0x1B873593
    return ((h << 13) | (h >> 19)) * 5 + 0xE6546B64


@triton.jit
def row_state(seed, position):
    """Return the state of the hash before the column, uint32: once a row, for all its tokens.

    seed, position: int64
    """
    h = (seed * 0).to(tl.uint32)
    h = _mix(h, seed.to(tl.uint32))
    h = _mix(h, (seed >> 32).to(tl.uint32))
    return _mix(h, position.to(tl.uint32))


@triton.jit
def hash_column(state, column):
    """Return the hash of a row's state and a column, uint32. column: any integer type."""
    h = _mix(state, column.to(tl.uint32)) ^ 16  # the length in bytes: seed 8, position 4, column 4
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def murmur_hash32(seed, position, column):
    """Return SGLang's hash of (seed, position, column), uint32, bit for bit."""
    return hash_column(row_state(seed, position), column)


@triton.jit
def uniform(h):
    """Return a hash's number in the open interval (0, 1), float64: below p with probability p."""
    return (h.to(tl.float64) + 0.5) * 2.0**-32


@triton.jit
def gumbel(h):
    """Return a hash's Gumbel noise, finite, float64."""
    u = tl.minimum(h.to(tl.float64) / 4294967295.0, 1 - 2.0**-33)
    # where u is 0 the largest float64 stands in for -log(0), as in core
    e = tl.where(h == 0, 1.7976931348623157e308, -tl.log(tl.where(h == 0, 1.0, u)))
    return -tl.log(e)


@triton.jit
def fork(seed, STREAM: tl.constexpr, start):
    """Return the seed of a stream for the block that starts at this position, int64."""
    state = row_state(seed, start)
    column = (seed * 0).to(tl.uint32) + 2 * STREAM
    # two hashes of 32 bits, 63 of them kept: seeds stay positive int64
    high, low = hash_column(state, column), hash_column(state, column + 1)
    return (high.to(tl.int64) << 31) | (low >> 1).to(tl.int64)


@triton.jit
def may_win(h, odds):
    """Return whether logit + noise can exceed the best so far: false only if it cannot.

    odds: exp(logit - best), float32 or float64

    logit + noise > best means -log(u) < odds, and 1 - u <= -log(u) for every u. The margin covers
    the rounding of the odds and of the difference. Once `best` has seen much of a row, about one
    token in the row is let through: the expected number is the sum of the odds.
    """
    gap = (4294967295 - h).to(tl.float32)  # (1 - u) * (2**32 - 1)
    return gap <= odds * (1.001 * 4294967295.0)


@triton.jit
def race(best, winner, b_logit, o_token, h):
    """Return the larger of the best so far and this tile's best logit + noise, and its token.

    best, winner: float64 and int32 scalars; tiles must come in ascending order of their tokens
    b_logit: [BLOCK] float64, -inf where no token is; o_token: [BLOCK] int32; h: [BLOCK] uint32
    """
    b_value = b_logit + gumbel(h)
    top = tl.max(b_value, 0)
    first = tl.min(tl.where(b_value == top, o_token, 0x7FFFFFFF), 0)
    return tl.maximum(best, top), tl.where(top > best, first, winner)


@triton.jit
def first_best(b_best, b_winner):
    """Return the winner of the parts of a row: of equals, the lowest token id.

    b_best: [S] float64; b_winner: [S] int32
    """
    return tl.min(tl.where(b_best == tl.max(b_best, 0), b_winner, 0x7FFFFFFF), 0)
