"""Judge each chain of drafts as a whole: keeps at least as many as `verify_residual`."""

from __future__ import annotations

from torch import Tensor

from outrider.kernels import use_triton
from outrider.kernels.verify_block import reference
from outrider.kernels.verify_residual import Verified, check_chains

__all__ = ["Verified", "verify_block"]


def verify_block(
    p: Tensor,
    q: Tensor | None,
    drafts: Tensor,
    rows_start: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_drafts: int,
) -> Verified:
    """Accept the longest prefix of a chain that passes, judging the block as a whole.

    What is emitted follows p. The coins are those of `core.verify_block`, and so is the result.
    The arguments are those of `verify_residual`.
    """
    check_chains(p, q, drafts, rows_start, seeds, positions, max_drafts)
    if not use_triton(p.device):
        return reference.verify_block(p, q, drafts, rows_start, seeds, positions, max_drafts)
    from outrider.kernels.verify_block import triton

    return triton.verify_block(p, q, drafts, rows_start, seeds, positions, max_drafts)
