"""Causal attention of a whole prompt to itself, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from each position to itself and all before it.

    q: [L, Hq, D]; k: [L, Hkv, D]; v: [L, Hkv, Dv]; window and softcap as in paged_attention
    -> [L, Hq, Dv]
    """
    length = len(q)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if softcap is None and (window is None or window >= length):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(length, device=q.device)
    visible = i[None, :] <= i[:, None]
    if window is not None:
        visible = visible & (i[None, :] > i[:, None] - window)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ v.float()).to(q.dtype)[0].transpose(0, 1)
