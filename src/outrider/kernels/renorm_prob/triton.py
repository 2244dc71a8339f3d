"""Top-k and top-p without sorting: search the threshold, then divide.

The bits of a non-negative float32, read as an integer, are in the order of the numbers. So the
threshold is found by bisection over integers, which ends with the exact value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels import launch_options
from outrider.kernels.renorm_prob.reference import UNITS as _UNITS

BLOCK = 1024  # lanes of the search, each with PIVOTS sums in registers
WIDE = 4096  # lanes of the two plain passes: 16 bytes for each thread
PIVOTS = 16
NUM_WARPS = 8

UNITS = tl.constexpr(_UNITS)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _find_last(p_row, V, needed, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr):
    """Return the largest t for which the entries with bits >= t reach `needed`; 0 if none does."""
    o_v = tl.arange(0, BLOCK)
    low = tl.full([], 0, tl.int32)
    high = tl.full([], INFINITY_BITS + 1, tl.int32)
    while high - low > 1:
        # P pivots cut [low, high) into P + 1 parts: 31 bits take 8 passes with P = 16
        step = (high - low + P) // (P + 1)
        b_pivot = tl.minimum(low + step * (1 + tl.arange(0, P)), high)  # [P]
        # one sum for each lane and pivot: lanes meet once, after the pass
        b_sum = tl.zeros([BLOCK, P], tl.int64 if BY_MASS else tl.int32)
        for i_v in range(0, V, BLOCK):
            b_p = tl.load(p_row + i_v + o_v, mask=i_v + o_v < V, other=-1.0).to(tl.float32)
            b_bits = b_p.to(tl.int32, bitcast=True)  # [BLOCK]; padding is below every pivot
            if BY_MASS:
                b_mass = (tl.where(b_p > 0, b_p, 0.0) * UNITS).to(tl.int64)  # NaN has none
                b_sum += tl.where(b_bits[:, None] >= b_pivot[None, :], b_mass[:, None], 0)
            else:
                b_sum += (b_bits[:, None] >= b_pivot[None, :]).to(tl.int32)
        # sums fall as pivots rise, so those that reach come first; the last pivot may be `high`
        b_reached = tl.where(b_pivot < high, tl.sum(b_sum, axis=0) >= needed, False)
        reached = tl.sum(b_reached.to(tl.int32))
        high = tl.minimum(low + step * (reached + 1), high)
        low += step * reached
    return low


@triton.jit
def renorm_kernel(
    probs,  # [N, V]
    limits,  # [N] int32: k, or float32: top_p
    out,  # [N, V] float32, contiguous
    stride_p,
    V,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    P: tl.constexpr,
):
    """Write one row: what is below the threshold becomes 0, the rest sums to 1."""
    i_n = tl.program_id(0).to(tl.int64)
    p_row, p_out = probs + i_n * stride_p, out + i_n * V
    limit = tl.load(limits + i_n)
    if BY_MASS:
        needed = tl.maximum((limit * UNITS).to(tl.int64), 1)
        keeps_all = limit >= 1
    else:
        needed = tl.maximum(limit, 1)
        keeps_all = limit >= V
    last = tl.full([], 0, tl.int32)
    if not keeps_all:
        last = _find_last(p_row, V, needed, BY_MASS, BLOCK, P)

    o_v = tl.arange(0, WIDE)
    b_sum = tl.zeros([WIDE], tl.float32)
    for i_v in range(0, V, WIDE):
        b_p = tl.load(p_row + i_v + o_v, mask=i_v + o_v < V, other=0.0).to(tl.float32)
        b_bits = b_p.to(tl.int32, bitcast=True)
        # a NaN is added too: it makes the whole row NaN
        b_sum += tl.where((b_bits >= last) | (b_p != b_p), b_p, 0.0)
    total = tl.sum(b_sum)
    total = tl.where(total == 0, 1.0, total)

    for i_v in range(0, V, WIDE):
        m_v = i_v + o_v < V
        b_p = tl.load(p_row + i_v + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_kept = tl.where(b_p.to(tl.int32, bitcast=True) >= last, b_p, 0.0)
        tl.store(p_out + i_v + o_v, b_kept / total, mask=m_v)


def top_k_renorm_prob(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """Keep the k largest of each row, and all that equal the last of them; make the row sum to 1.

    probs: [N, V]; top_k: [N] integers, or one for all -> [N, V] float32
    """
    return _launch(probs, _limits(probs, top_k, torch.int32), by_mass=False)


def top_p_renorm_prob(probs: Tensor, top_p: Tensor | float) -> Tensor:
    """Keep the fewest largest whose mass reaches top_p, and all that equal the last of them.

    probs: [N, V]; top_p: [N] floating point, or one for all -> [N, V] float32 rows that sum to 1
    """
    return _launch(probs, _limits(probs, top_p, torch.float32), by_mass=True)


def _limits(probs: Tensor, limit: Tensor | float, dtype: torch.dtype) -> Tensor:
    if isinstance(limit, Tensor):
        return limit.to(dtype).expand(len(probs)).contiguous()
    return torch.full((len(probs),), limit, dtype=dtype, device=probs.device)


def _launch(probs: Tensor, limits: Tensor, by_mass: bool) -> Tensor:
    count, vocab_size = probs.shape
    out = torch.empty((count, vocab_size), dtype=torch.float32, device=probs.device)
    if count:
        renorm_kernel[(count,)](
            probs,
            limits,
            out,
            probs.stride(0),
            vocab_size,
            BY_MASS=by_mass,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
            WIDE=min(WIDE, triton.next_power_of_2(vocab_size)),
            P=PIVOTS,
            **launch_options(NUM_WARPS),
        )
    return out
