"""Keep drafts of chains as often as the target's law and the drafts' law overlap.

Trees stay with `core.verify_residual`: a sibling is judged by what the ones before it have left,
which takes a pass over the vocabulary for each rejected sibling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels import use_triton
from outrider.kernels.verify_residual import reference
from outrider.kernels.verify_residual.reference import Verified

__all__ = ["Verified", "check_chains", "verify_residual"]


def verify_residual(
    p: Tensor,
    q: Tensor | None,
    drafts: Tensor,
    rows_start: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_drafts: int,
) -> Verified:
    """Accept a draft x with probability min(1, p(x)/q(x)); else draw from what q left of p.

    What is emitted follows p. The coins are those of `core.verify_residual`, and so is the result.

    p:          [N, V] float32, the target's probabilities: a row for each root and each draft,
                request by request; rows may be strided
    q:          [N - B, V] float32: a row for each draft, the law that it was drawn from; None if
                nothing is claimed (`core.PointMass`)
    drafts:     [N] int64 the draft at each row; a root's entry is not read
    rows_start: [B + 1] int64 where each request's rows begin, and where the last one's end;
                requests without rows, which pad a batch, come last
    seeds, positions: [N] int64
    max_drafts: no request has more; known to the host
    """
    check_chains(p, q, drafts, rows_start, seeds, positions, max_drafts)
    if not use_triton(p.device):
        return reference.verify_residual(p, q, drafts, rows_start, seeds, positions, max_drafts)
    from outrider.kernels.verify_residual import triton

    return triton.verify_residual(p, q, drafts, rows_start, seeds, positions, max_drafts)


def check_chains(
    p: Tensor,
    q: Tensor | None,
    drafts: Tensor,
    rows_start: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_drafts: int,
) -> None:
    """Refuse arguments that do not fit together; reads shapes only, so it never waits."""
    for name, law in (("p", p), ("q", q)):
        if law is None:
            continue
        if law.dim() != 2 or law.dtype != torch.float32 or law.shape[1] != p.shape[1]:
            found = f"{tuple(law.shape)} {law.dtype}"
            raise ValueError(f"{name} must be [rows, V] float32 probabilities, not {found}")
        if law.shape[1] == 0 or (law.stride(1) != 1 and law.shape[1] > 1):
            raise ValueError(f"each row of {name} must be contiguous: call .contiguous() first")
    columns = {"drafts": drafts, "seeds": seeds, "positions": positions, "rows_start": rows_start}
    for name, column in columns.items():
        if column.dim() != 1 or column.dtype != torch.int64 or not column.is_contiguous():
            found = f"{tuple(column.shape)} {column.dtype}"
            raise ValueError(f"{name} must be a contiguous int64 vector, not {found}")
        if name != "rows_start" and len(column) != len(p):
            raise ValueError(f"{name} has {len(column)} entries for {len(p)} rows of p")
        if column.device != p.device:
            raise ValueError(f"{name} is on {column.device}, and should be on {p.device}")
    if not len(rows_start) or max_drafts < 0:
        raise ValueError("rows_start needs B + 1 entries, and max_drafts must not be negative")
