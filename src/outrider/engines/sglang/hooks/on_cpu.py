"""Hooks for what SGLang lacks on CPU.

Three of them act with any algorithm: `murmur_hash32` always replaces a Triton kernel that cannot
run there; `support_triton` and `batch_invariant_mode` serve the attention backend `outrider`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.engines.sglang import cpu
from outrider.engines.sglang.arguments.chosen import ATTENTION_BACKEND, is_chosen
from outrider.engines.sglang.hooks.laying import HookTable, around


class CpuHooks(HookTable):
    """What SGLang is hooked by on CPU."""

    @around("mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup")
    def init_kv_copy(self, original: Callable[..., Any], their: Any) -> Any:
        """Do without a Triton kernel on CPU: we never move cache entries."""
        if their.device == "cpu":
            their._kv_copy_config = None
            return None
        return original(their)

    @around("batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode", always=True)
    def batch_invariant_mode(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make linear layers row invariant on CPU, too."""
        current = self.version.current_arguments()
        if (
            current is not None
            and current.device == "cpu"
            and (is_chosen(current) or current.attention_backend == ATTENTION_BACKEND)
        ):
            return cpu.enable_row_invariance()
        return original(*args, **kwargs)

    @around("constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask")
    def apply_vocab_mask(
        self, original: Callable[..., Any], their: Any, logits: Any, vocab_mask: Any
    ) -> Any:
        """Apply grammars' masks on CPU, too."""
        if logits.device.type == "cpu":
            return cpu.apply_vocab_mask(logits, vocab_mask)
        return original(their, logits=logits, vocab_mask=vocab_mask)

    @around("utils.common.support_triton", always=True)
    def support_triton(self, original: Callable[..., Any], backend: str) -> Any:
        """Say no for our own backend on CPU."""
        args = self.version.current_arguments()
        if backend == ATTENTION_BACKEND and args is not None and args.device == "cpu":
            return False
        return original(backend)

    def murmur_hash32(
        self, original: Callable[..., Any], seed: Any, positions: Any, col_indices: Any
    ) -> Any:
        """Hash on CPU, too. Each version has the function in another module."""
        if seed.device.type == "cpu":
            return cpu.murmur_hash32(seed, positions, col_indices)
        return original(seed, positions, col_indices)
