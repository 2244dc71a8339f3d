"""What `train_head.py` minimises: the cross entropy of drafts to the target's distribution.

EAGLE-3 and MTP heads are unrolled over several draft steps. DFlash fills in blocks that begin
anywhere in the text. Earlier drafts weigh more: a later one counts only if they are accepted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from outrider.drafters.heads import DFlashHead, Eagle3Head, MTPHead

UNROLLED, DECAY = 4, 0.8
"""Draft steps in training, and the weight of each one against the one before it."""

ANCHORS = 12
"""Blocks in a piece of text, for DFlash."""

AnyHead = Eagle3Head | MTPHead | DFlashHead


class UnrolledPass:
    """Lets all rows of a batch draft at once: see `unrolled_loss`.

    seen: keys and values of each draft step so far
    """

    def __init__(self, batch: int, rows: int) -> None:
        self._shape = (batch, rows)
        self._seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what each row finds: see `Attend`."""
        rows, dim, groups = self._shape[1], q.shape[-1], q.shape[1] // k.shape[1]
        q, k, v = (y.view(*self._shape, -1, dim).transpose(1, 2) for y in (q, k, v))
        self._seen.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        (first, values), own = self._seen[0], self._seen[1:]
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = [(q @ first.transpose(-1, -2)).masked_fill(hidden, -math.inf)]
        scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in own]
        shares = (torch.cat(scores, -1) * dim**-0.5).softmax(-1)
        mixed = shares[..., :rows] @ values
        for i, (_, value) in enumerate(own):
            mixed = mixed + shares[..., rows + i, None] * value
        return mixed.transpose(1, 2).flatten(0, 1)


def unrolled_loss(head: Eagle3Head | MTPHead, target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the cross entropy to the target's distribution, over the draft steps.

    In draft step s, row i has the pair of token i + 1 + s. It sees the pairs of rows up to i that
    the target has read, and of its own row those of the draft steps before.
    """
    states, logits = look(head, target, tokens)
    ids = slice(None)
    if isinstance(head, Eagle3Head):
        ids = torch.arange(len(head.d2t)) + head.d2t
    goal = logits[..., ids].softmax(-1)
    batch, rows = len(tokens), tokens.shape[1] - 1 - UNROLLED
    x = head.reduce(states[:, :rows].flatten(0, 1))
    attend, losses = UnrolledPass(batch, rows), []
    for s in range(UNROLLED):
        positions = torch.arange(1 + s, 1 + s + rows).repeat(batch)
        x = head(tokens[:, 1 + s : 1 + s + rows].flatten(), x, positions, attend)
        drafted = head.logits(x)[:, ids]
        losses.append(
            functional.cross_entropy(drafted, goal[:, 1 + s : 1 + s + rows].flatten(0, 1))
        )
    return weighted(losses, DECAY)


class AnchoredPass:
    """Lets blocks that begin at anchors look at the context before them, and at themselves.

    context: keys and values in each layer, [B * length, kv heads, D]
    allowed: [B, 1, rows of blocks, length + rows of blocks]
    """

    def __init__(self, context: list[tuple[Tensor, Tensor]], allowed: Tensor) -> None:
        self._context, self._allowed = context, allowed

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what each row finds: see `Attend`."""
        batch = len(self._allowed)

        def split(y: Tensor) -> Tensor:
            return y.view(batch, -1, *y.shape[1:]).transpose(1, 2)

        keys, values = (
            torch.cat([split(c), split(own)], 2)
            for c, own in zip(self._context[layer], (k, v), strict=True)
        )
        found = functional.scaled_dot_product_attention(
            split(q), keys, values, attn_mask=self._allowed, enable_gqa=True
        )
        return found.transpose(1, 2).flatten(0, 1)


def block_loss(head: DFlashHead, target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the cross entropy to the target's distribution, over blocks that begin anywhere."""
    states, logits = look(head, target, tokens)
    (batch, length), size = tokens.shape, head.block.size
    anchors = 1 + torch.rand(batch, length - size).argsort(-1)[:, :ANCHORS]
    places = (anchors[..., None] + torch.arange(size)).flatten(1)  # [B, rows]
    blocks = torch.full_like(places, head.block.mask_token_id)
    blocks[:, ::size] = tokens.gather(1, anchors)
    begins = anchors.repeat_interleave(size, 1)[..., None]
    before = torch.arange(length) < begins
    same = begins == anchors.repeat_interleave(size, 1)[:, None]
    context = head.context(head.reduce(states.flatten(0, 1)), torch.arange(length).repeat(batch))
    attend = AnchoredPass(context, torch.cat([before, same], -1)[:, None])
    x = head(blocks.flatten(), places.flatten(), attend)
    # the state before a token has the target's distribution of it
    goal = logits.softmax(-1)[torch.arange(batch)[:, None], places - 1]
    drafted = head.logits(x).view(batch, -1, size, logits.shape[-1])
    goal = goal.view(drafted.shape)
    losses = [
        functional.cross_entropy(drafted[:, :, j].flatten(0, 1), goal[:, :, j].flatten(0, 1))
        for j in range(1, size)
    ]
    return weighted(losses, DECAY)


@torch.no_grad()
def look(head: AnyHead, target: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states that the head reads, [B, length, layers, H], and the target's logits."""
    out = target(tokens, output_hidden_states=True)
    return torch.stack([out.hidden_states[i] for i in head.hidden_layers], 2), out.logits


def weighted(losses: list[Tensor], decay: float) -> Tensor:
    """Return the mean of losses; each counts `decay` times as much as the one before it."""
    weights = [decay**s for s in range(len(losses))]
    return torch.stack([w * x for w, x in zip(weights, losses, strict=True)]).sum() / sum(weights)
