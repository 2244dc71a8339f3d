"""Attention of many new rows: a prompt, or a chunk of one after what is cached."""

from __future__ import annotations

from torch import Tensor

from outrider.kernels.paged_attention import Layout, check_heads
from outrider.kernels.prefill_attention.reference import causal_attention

__all__ = ["causal_attention", "prefill_attention"]


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out_scale: float = 1.0,
) -> Tensor:
    """Attend from each row to its own past, the new keys included: they are in the cache already.

    Arguments as in `paged_attention`. Plain torch has `causal_attention` for prompts with nothing
    cached, and `paged_attention` for all others.
    """
    from outrider.kernels.prefill_attention import triton

    check_heads(q, k_cache, v_cache)
    return triton.prefill_attention(q, k_cache, v_cache, layout, scale, window, softcap, out_scale)
