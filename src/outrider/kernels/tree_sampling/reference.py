"""Verification of a tree of drafts, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor

UNITS = 2.0**48
"""How many units of mass a probability of 1 is worth: masses are added as integers, exactly."""

COIN_BITS = 31
"""A coin is an integer below 2**31 when it meets the mass of the remaining tokens."""


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Write the accepted path of each request and the token after it. See the package."""
    threshold_acc = max(threshold_acc, 1e-9)
    for b in range(len(candidates)):
        node, accepted = 0, 0
        accept_index[b, 0] = retrive_index[b, 0]
        coin, mass = uniform_samples[b, 0], target_probs.new_zeros(())
        child = int(retrive_next_token[b, 0])
        while child != -1 and accepted < accept_index.shape[1] - 1:
            token = int(candidates[b, child])
            p = target_probs[b, node, token]
            mass = mass + p
            if p > 0 and (coin * threshold_acc < mass or p >= threshold_single):
                predicts[int(retrive_index[b, node])] = token
                node, accepted = child, accepted + 1
                accept_index[b, accepted] = retrive_index[b, node]
                coin, mass = uniform_samples[b, node], torch.zeros_like(mass)
                child = int(retrive_next_token[b, node])
            else:
                draft_probs[b, node, token] = p
                child = int(retrive_next_sibling[b, child])
        accept_token_num[b] = accepted

        rest = target_probs[b, node]
        if accepted < accept_index.shape[1] - 1:  # the deepest row has no drafts to take away
            rest = rest - draft_probs[b, node]
        coin = uniform_samples_for_final_sampling[b]
        predicts[int(retrive_index[b, node])] = draw(rest, coin, target_probs[b, node])


def draw(rest: Tensor, coin: Tensor, target: Tensor) -> int:
    """Draw a token by the positive part of `rest`: never one without mass.

    rest, target: [V]; coin: [] in [0, 1)
    If `rest` has rounded away to nothing, the most likely token of the target.
    """
    mass = (torch.where(rest > 0, rest, 0).double() * UNITS).long().cumsum(-1)
    if mass[-1] == 0:
        return int(torch.where(target > 0, target, 0).argmax())
    ticket = int(min(float(coin) * 2.0**COIN_BITS, 2.0**COIN_BITS - 1))
    return int((mass <= (ticket * int(mass[-1]) >> COIN_BITS)).sum())
