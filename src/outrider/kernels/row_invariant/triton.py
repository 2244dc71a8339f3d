"""Linear layers and RMSNorm in Triton whose rows do not depend on how many rows there are.

One tile and one order of sums for every number of rows: no split along K, no choice by shape. The
price is paid by passes of few rows, whose tile is mostly empty; they wait for the weights anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels import arch, launch_options

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x, weight, bias, out, num_rows, N, K, stride_xm, stride_wn, stride_wk, stride_om,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # programs that share a tile of weights run beside each other
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < num_rows, o_n < N
    p_x = x + o_m[:, None].to(tl.int64) * stride_xm
    p_w = weight + o_n[:, None].to(tl.int64) * stride_wn
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = (o_k < K)[None, :]
        b_x = tl.load(p_x + o_k[None, :], mask=m_m[:, None] & m_k, other=0.0)  # [M, K]
        b_w = tl.load(p_w + o_k[None, :] * stride_wk, mask=m_n[:, None] & m_k, other=0.0)  # [N, K]
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    if HAS_BIAS:
        b_acc += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    p_out = out + o_m[:, None].to(tl.int64) * stride_om + o_n[None, :]
    tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def _rms_norm(
    x, weight, out, eps, stride_x, stride_o,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    i_row, o_d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_x = tl.load(x + i_row * stride_x + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps)
    if HAS_WEIGHT:
        b_y = b_y * tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    tl.store(out + i_row * stride_o + o_d, b_y.to(out.dtype.element_ty), mask=m_d)


@triton.jit
def _row_mean(x, out, stride_x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    i_row, o_d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    b_x = tl.load(x + i_row * stride_x + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    tl.store(out + i_row, (tl.sum(b_x, 0) / D).to(out.dtype.element_ty))


def options(arch: str) -> dict[str, Any]:
    """Return the launch options of the linear layer for a processor: "gfx942", "sm_90", ..."""
    options = launch_options(4)
    if arch.startswith("gfx"):
        return {**options, "num_stages": 2, "matrix_instr_nonkdim": 16}
    return {**options, "num_stages": 3}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x: [.., K]; weight: [N, K]; bias: [N] -> [.., N]."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    (m, k), n = flat.shape, len(weight)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m:
        _linear[(triton.cdiv(m, BLOCK_M), triton.cdiv(n, BLOCK_N))](
            flat, weight, weight if bias is None else bias, out, m, n, k,
            flat.stride(0), *weight.stride(), out.stride(0), HAS_BIAS=bias is not None,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
            **options(arch(x.device)),
        )  # fmt: skip
    return out.view(*x.shape[:-1], n)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in float32, rounded once. x: [.., D]."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(flat)
    if len(flat):
        _rms_norm[(len(flat),)](
            flat, flat if weight is None else weight, out, eps, flat.stride(0), out.stride(0),
            D=x.shape[-1], BLOCK_D=triton.next_power_of_2(x.shape[-1]),
            HAS_WEIGHT=weight is not None, **launch_options(4),
        )  # fmt: skip
    return out.view(x.shape)


def row_mean(x: Tensor) -> Tensor:
    """Return the mean along the last dimension, kept: the reduction inside models' own RMSNorm."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(len(flat), dtype=x.dtype, device=x.device)
    if len(flat):
        _row_mean[(len(flat),)](
            flat, out, flat.stride(0), D=x.shape[-1],
            BLOCK_D=triton.next_power_of_2(x.shape[-1]), **launch_options(4),
        )  # fmt: skip
    return out.view(*x.shape[:-1], 1)
