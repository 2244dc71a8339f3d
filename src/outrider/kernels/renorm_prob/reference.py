"""Top-k and top-p by sorting: the shortest correct form."""

from __future__ import annotations

import torch
from torch import Tensor

UNITS = 2.0**48
"""How many units of mass a probability of 1 is worth.

Masses are added as integers, so their sum does not depend on the order of its terms: the kernel and
this file keep the same tokens, however the kernel cuts the row.
"""


def top_k_renorm_prob(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """Keep the k largest of each row, and all that equal the last of them; make the row sum to 1.

    probs: [N, V]; top_k: [N] integers, or one for all -> [N, V] float32
    """
    p = probs.float()
    k = torch.as_tensor(top_k, device=p.device).expand(len(p)).long().clamp(1, p.shape[-1])
    last = p.sort(-1, descending=True).values.gather(-1, k[:, None] - 1)
    return _renormalise(p, last)


def top_p_renorm_prob(probs: Tensor, top_p: Tensor | float) -> Tensor:
    """Keep the fewest largest whose mass reaches top_p, and all that equal the last of them.

    probs: [N, V]; top_p: [N] floating point, or one for all -> [N, V] float32 rows that sum to 1
    """
    p = probs.float()
    wanted = torch.as_tensor(top_p, dtype=torch.float32, device=p.device).expand(len(p))
    ordered = p.sort(-1, descending=True).values
    mass = (ordered.nan_to_num(0) * UNITS).long().cumsum(-1)
    # at least one unit: the most likely token stays, whatever top_p is
    short = mass < (wanted * UNITS).long().clamp(min=1)[:, None]
    last = ordered.gather(-1, short.sum(-1, keepdim=True).clamp(max=p.shape[-1] - 1))
    return _renormalise(p, torch.where(wanted[:, None] >= 1, 0, last))


def _renormalise(p: Tensor, last: Tensor) -> Tensor:
    kept = torch.where(p >= last, p, 0).double()
    total = kept.sum(-1, keepdim=True)
    out = (kept / torch.where(total == 0, 1, total)).float()
    return out.masked_fill(p.isnan().any(-1, keepdim=True), torch.nan)
