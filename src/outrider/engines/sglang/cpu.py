"""What SGLang lacks on CPU: deterministic linear layers, seeded coins, and grammar masks."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider import core
from outrider.kernels.row_invariant import RowInvariant


def enable_row_invariance() -> None:
    """Make this process's linear layers row invariant, for good.

    That is what `--enable-deterministic-inference` does on a GPU, by other means. SGLang calls it
    once for each model runner: a draft model's makes no difference.
    """
    if not RowInvariant.is_active():
        RowInvariant(triton=False).__enter__()


def murmur_hash32(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Hash (seed, position, column), [N] x [N] x [M] -> [N, M]: SGLang's is a Triton kernel."""
    return core.murmur_hash32(seeds.to(torch.int64)[:, None], positions[:, None], columns)


def apply_vocab_mask(logits: Tensor, vocab_mask: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    logits: [N, V]; vocab_mask: [N, ceil(V / 32)] int32, a bit for each allowed token
    """
    bits = torch.arange(32, dtype=torch.int32)
    allowed = ((vocab_mask[:, :, None] >> bits) & 1).bool().flatten(1)
    logits.masked_fill_(~allowed[:, : logits.shape[1]], float("-inf"))
