"""Block verification of chains in plain torch: `core.verify_block`, in float64."""

from __future__ import annotations

from torch import Tensor

from outrider.core.coins import KeyedCoins
from outrider.core.rules import verify_block as core_verify_block
from outrider.kernels.verify_residual.reference import Verified, as_core, as_verified


def verify_block(
    p: Tensor,
    q: Tensor | None,
    drafts: Tensor,
    rows_start: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_drafts: int,
) -> Verified:
    """Accept the longest prefix of a chain that passes, judging the block as a whole."""
    law, proposal = as_core(p, q, drafts, rows_start, seeds, positions, max_drafts)
    return as_verified(core_verify_block(law, proposal, KeyedCoins()), len(rows_start) - 1)
