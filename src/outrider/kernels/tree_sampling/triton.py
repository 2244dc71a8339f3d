"""Verification of a tree of drafts in two launches: walk down the tree, then draw one token.

The walk follows pointers and reads a few numbers. The draw reads a whole row, so it needs many
lanes. Two launches let each have its own size, and what one writes comes before what the other
reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels import launch_options
from outrider.kernels.tree_sampling.reference import COIN_BITS as _COIN_BITS
from outrider.kernels.tree_sampling.reference import UNITS as _UNITS

BLOCK = 4096
NUM_WARPS = 8

UNITS = tl.constexpr(_UNITS)
COIN_BITS = tl.constexpr(_COIN_BITS)
TICKETS = tl.constexpr(1 << _COIN_BITS)


@triton.jit
def walk_kernel(
    predicts,  # [>= B * T]
    accept_index,  # [B, S]
    accept_token_num,  # [B]
    nodes,  # [B] the last accepted node of each request
    candidates,  # [B, T]
    retrive_index,  # [B, T]
    retrive_next_token,  # [B, T]
    retrive_next_sibling,  # [B, T]
    uniform_samples,  # [B, T]
    target_probs,  # [B, T, V]
    draft_probs,  # [B, T, V]
    threshold_single,
    threshold_acc,
    S,
    T,
    V,
):
    """Accept from the root down: at each node the child in whose share of [0, 1) the coin lies."""
    i_b = tl.program_id(0).to(tl.int64)
    i_first = i_b * T  # the request's root among all nodes
    i_node = tl.full([], 0, tl.int64)
    accepted = tl.full([], 0, tl.int32)
    slot = tl.load(retrive_index + i_first).to(tl.int64)
    tl.store(accept_index + i_b * S, slot)
    coin = tl.load(uniform_samples + i_first).to(tl.float32)
    mass = tl.full([], 0.0, tl.float32)
    i_child = tl.load(retrive_next_token + i_first).to(tl.int64)
    while (i_child != -1) & (accepted < S - 1):
        token = tl.load(candidates + i_first + i_child).to(tl.int64)
        o_p = (i_first + i_node) * V + token
        p = tl.load(target_probs + o_p)
        mass += p
        if (p > 0) & ((coin * threshold_acc < mass) | (p >= threshold_single)):
            tl.store(predicts + slot, token)
            accepted += 1
            i_node = i_child
            slot = tl.load(retrive_index + i_first + i_node).to(tl.int64)
            tl.store(accept_index + i_b * S + accepted, slot)
            coin = tl.load(uniform_samples + i_first + i_node).to(tl.float32)
            mass = tl.full([], 0.0, tl.float32)
            i_child = tl.load(retrive_next_token + i_first + i_node).to(tl.int64)
        else:
            tl.store(draft_probs + o_p, p)
            i_child = tl.load(retrive_next_sibling + i_first + i_child).to(tl.int64)
    tl.store(accept_token_num + i_b, accepted)
    tl.store(nodes + i_b, i_node)


@triton.jit
def _rest(p_target, p_draft, o_v, V, has_drafts):
    """Return what is left of the target's mass, [BLOCK] int64 units, and the target itself."""
    m_v = o_v < V
    b_target = tl.load(p_target + o_v, mask=m_v, other=0.0)
    b_draft = tl.load(p_draft + o_v, mask=tl.where(has_drafts, m_v, False), other=0.0)
    b_rest = b_target - b_draft
    return (tl.where(b_rest > 0, b_rest, 0.0) * UNITS).to(tl.int64), b_target


@triton.jit
def draw_kernel(
    predicts,  # [>= B * T]
    accept_token_num,  # [B]
    nodes,  # [B]
    retrive_index,  # [B, T]
    coins,  # [B]
    target_probs,  # [B, T, V]
    draft_probs,  # [B, T, V]
    S,
    T,
    V,
    BLOCK: tl.constexpr,
):
    """Draw the token after the last accepted node, by what the rejected drafts left of its row."""
    i_b = tl.program_id(0).to(tl.int64)
    i_row = i_b * T + tl.load(nodes + i_b)
    p_target, p_draft = target_probs + i_row * V, draft_probs + i_row * V
    # the deepest row has no drafts to take away
    has_drafts = tl.load(accept_token_num + i_b) < S - 1
    o_v = tl.arange(0, BLOCK)

    b_sum = tl.zeros([BLOCK], tl.int64)
    b_best = tl.zeros([BLOCK], tl.float32)
    b_best_at = o_v * 0
    for i_v in range(0, V, BLOCK):
        b_mass, b_target = _rest(p_target, p_draft, i_v + o_v, V, has_drafts)
        b_sum += b_mass
        b_best_at = tl.where(b_target > b_best, i_v + o_v, b_best_at)
        b_best = tl.where(b_target > b_best, b_target, b_best)
    total = tl.sum(b_sum)
    # nothing left: the most likely token of the target, the first if several are
    token = tl.min(tl.where(b_best == tl.max(b_best, axis=0), b_best_at, V))
    if total > 0:
        # floor(ticket * total / 2**31), in two parts so that no product exceeds 63 bits
        ticket = (tl.load(coins + i_b).to(tl.float32) * TICKETS).to(tl.int64)
        ticket = tl.minimum(ticket, TICKETS - 1)
        low = total & (TICKETS - 1)
        wanted = ticket * (total >> COIN_BITS) + ((ticket * low) >> COIN_BITS)
        # the first token whose running mass exceeds `wanted`: as many as do not come before it
        before = tl.full([], 0, tl.int64)
        token = tl.full([], 0, tl.int32)
        i_v = tl.full([], 0, tl.int32)
        while before <= wanted:
            b_mass, b_target = _rest(p_target, p_draft, i_v + o_v, V, has_drafts)
            b_upto = before + tl.cumsum(b_mass, axis=0)
            token += tl.sum((b_upto <= wanted).to(tl.int32))
            before += tl.sum(b_mass)
            i_v += BLOCK
    slot = tl.load(retrive_index + i_row).to(tl.int64)
    tl.store(predicts + slot, token)


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
    batch_size, size, vocab_size = target_probs.shape
    if batch_size == 0:
        return
    nodes = torch.empty(batch_size, dtype=torch.int32, device=predicts.device)
    walk_kernel[(batch_size,)](
        predicts,
        accept_index,
        accept_token_num,
        nodes,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        target_probs,
        draft_probs,
        float(threshold_single),
        max(float(threshold_acc), 1e-9),
        accept_index.shape[1],
        size,
        vocab_size,
        **launch_options(1),
    )
    draw_kernel[(batch_size,)](
        predicts,
        accept_token_num,
        nodes,
        retrive_index,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
        accept_index.shape[1],
        size,
        vocab_size,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
        **launch_options(NUM_WARPS),
    )
