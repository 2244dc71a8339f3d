"""Draw the target's token at every row, and keep the drafts that are those tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.coins import KeyedCoins
from outrider.kernels import use_triton
from outrider.kernels.sample_match import reference
from outrider.kernels.sample_match.reference import Matched

__all__ = ["DeviceCoins", "Matched", "match", "sample"]


class DeviceCoins(KeyedCoins):
    """`KeyedCoins` that draw in one pass on a GPU, without a row of noise for each of logits."""

    def draw(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draw one token for each row, by softmax(logits): argmax of logits + Gumbel noise."""
        if logits.dtype == torch.float64 or not use_triton(logits.device):
            return super().draw(logits, seeds, positions)
        one = torch.ones(len(logits), device=logits.device)
        off = torch.zeros_like(one)
        return sample(logits, one, off.to(torch.int32), one, off, seeds, positions)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Return the token that plain decoding emits after each row, whatever was drafted: [N] int64.

    The distribution is `core.target_distribution`'s (temperature, top-k, top-p, min-p, in this
    order), and the coin that of `core.KeyedCoins.draw`.

    logits:      [N, V] float32, bfloat16 or float16; rows may be strided; NaN counts as -inf
    temperature: [N] float32; 0 is greedy, the lowest id of equals
    top_k:       [N] int32 or int64; 0 and below, V and above: off
    top_p:       [N] float32; 1: off
    min_p:       [N] float32; 0: off
    seeds, positions: [N] int64
    """
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits must be [N, V] with V > 0, not {tuple(logits.shape)}")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"logits are {logits.dtype}: pass them as float32, bfloat16 or float16")
    if logits.stride(1) != 1:
        raise ValueError("each row of the logits must be contiguous: call .contiguous() first")
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    for name, column in floats.items():
        _check_column(name, column, len(logits), (torch.float32,), logits.device)
    _check_column("top_k", top_k, len(logits), (torch.int32, torch.int64), logits.device)
    for name, column in (("seeds", seeds), ("positions", positions)):
        _check_column(name, column, len(logits), (torch.int64,), logits.device)
    arguments = (logits, temperature, top_k, top_p, min_p, seeds, positions)
    if not use_triton(logits.device):
        return reference.sample(*arguments)
    from outrider.kernels.sample_match import triton

    return triton.sample(*arguments)


def match(
    tokens: Tensor, drafts: Tensor, parents: Tensor, rows_start: Tensor, max_depth: int
) -> Matched:
    """Accept each draft while it is the token that the target emits at its parent.

    Of equal siblings the first is taken, as in `core.match`.

    tokens:     [N] int64 the target's own token at each row
    drafts:     [N] int64 the draft at each row; a root's entry is not read
    parents:    [N] int64 the row of each draft's parent, counted from its request's root (a chain:
                0, 1, 2, ...); before the row itself; a root's entry is not read
    rows_start: [B + 1] int64 where each request's rows begin, and where the last one's end
    max_depth:  D, the most drafts that a request may keep
    """
    for name, column in (("tokens", tokens), ("drafts", drafts), ("parents", parents)):
        _check_column(name, column, len(tokens), (torch.int64,), tokens.device)
    _check_column("rows_start", rows_start, len(rows_start), (torch.int64,), tokens.device)
    if not len(rows_start) or max_depth < 0:
        raise ValueError("rows_start needs B + 1 entries, and max_depth must not be negative")
    if not use_triton(tokens.device):
        return reference.match(tokens, drafts, parents, rows_start, max_depth)
    from outrider.kernels.sample_match import triton

    return triton.match(tokens, drafts, parents, rows_start, max_depth)


def _check_column(
    name: str, column: Tensor, rows: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if column.shape != (rows,) or column.dtype not in dtypes or not column.is_contiguous():
        kinds = " or ".join(str(dtype) for dtype in dtypes)
        found = f"{tuple(column.shape)} {column.dtype}"
        raise ValueError(f"{name} must be a contiguous [{rows}] {kinds}, not {found}")
    if column.device != device:
        raise ValueError(f"{name} is on {column.device}, and should be on {device}")
