"""Rows moved for all layers in one launch: a program for each request, cache and piece of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels import launch_options

BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["N"])
def commit_kernel(
    base,  # words: the cache with the lowest address
    offsets,  # [C] int64: where each cache begins, in words from `base`
    src,  # [B, N]
    dst,  # [B, N]
    N,
    W,
    stride,  # from row to row, in words
    ALIGN: tl.constexpr,  # every cache and row begins at a multiple of so many words
    BLOCK: tl.constexpr,
):
    """Move one piece of each row of a request, row after row."""
    i_b = tl.program_id(0).to(tl.int64)
    p_cache = base + tl.multiple_of(tl.load(offsets + tl.program_id(1)), ALIGN)
    o_w = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m_w = o_w < W
    # In order: a row may land where an earlier one came from. A lane moves the same words of every
    # row, so no lane waits for another.
    for i in range(N):
        i_src = tl.load(src + i_b * N + i).to(tl.int64)
        i_dst = tl.load(dst + i_b * N + i).to(tl.int64)
        if (i_src >= 0) & (i_dst >= 0) & (i_src != i_dst):
            b_row = tl.load(p_cache + i_src * stride + o_w, mask=m_w)
            tl.store(p_cache + i_dst * stride + o_w, b_row, mask=m_w)


def kv_commit(
    base: Tensor, offsets: Tensor, width: int, stride: int, align: int, src: Tensor, dst: Tensor
) -> None:
    """Copy row src[b, i] to dst[b, i] in every cache, i after i; -1 moves nothing.

    base, offsets, width, stride, align: from `Caches`; src, dst: [B, N] contiguous
    """
    batch_size, count = src.shape
    if batch_size and count:
        commit_kernel[(batch_size, len(offsets), triton.cdiv(width, BLOCK))](
            base,
            offsets,
            src,
            dst,
            count,
            width,
            stride,
            ALIGN=align,
            BLOCK=BLOCK,
            **launch_options(NUM_WARPS),
        )
