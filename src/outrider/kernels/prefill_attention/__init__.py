"""Attention of a prompt that has nothing cached before it."""

from outrider.kernels.prefill_attention.reference import prefill_attention

__all__ = ["prefill_attention"]
