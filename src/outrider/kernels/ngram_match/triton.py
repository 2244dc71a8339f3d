"""Prompt lookup on the device: one program for each request, from the end of its history back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels import launch_options

BLOCK = 2048
NUM_WARPS = 8


@triton.jit
def match_kernel(
    tokens,  # [B, L]
    lengths,  # [B]
    max_drafts,  # [B]
    drafts,  # [B, width]
    num_drafts,  # [B]
    stride,  # of tokens
    width,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of 2 >= width
    BLOCK: tl.constexpr,
):
    """Find the longest and then latest place that ends as the history ends; copy what followed."""
    i_b = tl.program_id(0).to(tl.int64)
    p_row = tokens + i_b * stride
    end = tl.load(lengths + i_b).to(tl.int32)

    # best = n * 2**32 + e: the longest match wins, among those the latest
    best = tl.full([], 0, tl.int64)
    top = end  # places are the ends e of earlier n-grams: 1 <= e < end; those >= top are done
    # a match of MAX_N in a later block cannot be beaten by an earlier one
    while (top > 1) & (best < (MAX_N << 32)):
        o_e = top - BLOCK + tl.arange(0, BLOCK)
        b_alike = o_e >= 1
        b_n = tl.zeros([BLOCK], tl.int64)
        for j in tl.static_range(1, MAX_N + 1):
            b_alike = b_alike & (o_e >= j)
            # the j-th token from the end, here and at every place; a lane that lost stays lost
            last = tl.load(p_row + end - j, mask=end >= j, other=0)
            b_alike = b_alike & (tl.load(p_row + o_e - j, mask=b_alike, other=0) == last)
            b_n += b_alike.to(tl.int64)
        b_key = tl.where(b_n >= MIN_N, (b_n << 32) + o_e, 0)
        best = tl.maximum(best, tl.max(b_key, axis=0))
        top -= BLOCK

    start = (best & 0xFFFFFFFF).to(tl.int32)
    count = tl.minimum(tl.load(max_drafts + i_b).to(tl.int32), width)
    count = tl.where(start > 0, tl.maximum(count, 0), 0)
    tl.store(num_drafts + i_b, count)
    o_k = tl.arange(0, WIDTH)
    # a copy that reaches the end goes on with itself, as a repetition would
    o_from = start + o_k % tl.maximum(end - start, 1)
    b_draft = tl.load(p_row + o_from, mask=o_k < count, other=0)
    tl.store(drafts + i_b * width + o_k, b_draft, mask=o_k < width)


def ngram_match(
    tokens: Tensor, lengths: Tensor, max_drafts: Tensor, width: int, min_n: int, max_n: int
) -> tuple[Tensor, Tensor]:
    """Return what followed the last tokens when they occurred before. See the package."""
    batch_size = len(tokens)
    drafts = torch.empty((batch_size, width), dtype=tokens.dtype, device=tokens.device)
    num_drafts = torch.empty(batch_size, dtype=torch.int32, device=tokens.device)
    if batch_size:
        match_kernel[(batch_size,)](
            tokens,
            lengths,
            max_drafts,
            drafts,
            num_drafts,
            tokens.stride(0),
            width,
            MIN_N=min_n,
            MAX_N=max_n,
            WIDTH=triton.next_power_of_2(max(width, 1)),
            BLOCK=min(BLOCK, max(16, triton.next_power_of_2(tokens.shape[1]))),
            **launch_options(NUM_WARPS),
        )
    return drafts, num_drafts
