"""Hooks for what SGLang lacks on CPU: seeded coins, grammar masks, row-invariant linear layers.

Three of them act with any algorithm: `murmur_hash32` always replaces a Triton kernel that cannot
run there; `support_triton` and `batch_invariant_mode` serve the attention backend `outrider`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider import core
from outrider.engines.sglang.arguments.chosen import ATTENTION_BACKEND, is_chosen
from outrider.engines.sglang.hooks.laying import HookTable, around
from outrider.kernels.row_invariant import RowInvariant


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
            return enable_row_invariance()
        return original(*args, **kwargs)

    @around("constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask")
    def apply_vocab_mask(
        self, original: Callable[..., Any], their: Any, logits: Any, vocab_mask: Any
    ) -> Any:
        """Apply grammars' masks on CPU, too: -inf for forbidden tokens, in place.

        logits: [N, V]; vocab_mask: [N, ceil(V / 32)] int32, a bit for each allowed token
        """
        if logits.device.type != "cpu":
            return original(their, logits=logits, vocab_mask=vocab_mask)
        bits = torch.arange(32, dtype=torch.int32)
        allowed = ((vocab_mask[:, :, None] >> bits) & 1).bool().flatten(1)
        logits.masked_fill_(~allowed[:, : logits.shape[1]], float("-inf"))
        return None

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
        """Hash (seed, position, column) on CPU, too, [N] x [N] x [M] -> [N, M].

        Each version has the function in another module.
        """
        if seed.device.type == "cpu":
            seeds = seed.to(torch.int64)[:, None]
            return core.murmur_hash32(seeds, positions[:, None], col_indices)
        return original(seed, positions, col_indices)


def enable_row_invariance() -> None:
    """Make this process's linear layers row invariant, for good.

    That is what `--enable-deterministic-inference` does on a GPU, by other means. SGLang calls it
    once for each model runner: a draft model's makes no difference.
    """
    if not RowInvariant.is_active():
        RowInvariant(triton=False).__enter__()
