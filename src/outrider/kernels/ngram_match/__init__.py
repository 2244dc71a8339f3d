"""Prompt lookup on the device: what followed the last few tokens when they occurred before.

The same drafts as `outrider.drafters.NgramDrafter`, without bringing tokens to the host.
"""

from __future__ import annotations

from torch import Tensor

from outrider.kernels import use_triton
from outrider.kernels.ngram_match import reference

__all__ = ["ngram_match"]


def ngram_match(
    tokens: Tensor,
    lengths: Tensor,
    max_drafts: Tensor,
    width: int,
    min_n: int = 2,
    max_n: int = 4,
) -> tuple[Tensor, Tensor]:
    """Return the drafts of each request: the continuation of the longest, then latest, match.

    tokens:     [B, L] integers, each request's history from the left; the rest is not read
    lengths:    [B] integers, how long each history is: at most L
    max_drafts: [B] integers, the most drafts for each request
    width:      K, the places for drafts: no request gets more
    min_n, max_n: the shortest and longest n-gram to look up, in tokens
    -> drafts [B, K] like tokens, 0 where there is none; num_drafts [B] int32
    """
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.stride(1) != 1:
        raise ValueError("tokens must be [B, L] integers, each row contiguous")
    for name, tensor in (("lengths", lengths), ("max_drafts", max_drafts)):
        if tensor.shape != (len(tokens),) or tensor.is_floating_point():
            raise ValueError(f"{name} must be [{len(tokens)}] integers")
        if tensor.device != tokens.device or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous and on {tokens.device}, like tokens")
    if not 1 <= min_n <= max_n:
        raise ValueError("need 1 <= min_n <= max_n")
    if width < 0:
        raise ValueError("width must not be negative")
    if use_triton(tokens.device):
        from outrider.kernels.ngram_match import triton

        return triton.ngram_match(tokens, lengths, max_drafts, width, min_n, max_n)
    return reference.ngram_match(tokens, lengths, max_drafts, width, min_n, max_n)
