"""A DFlash head as a draft model: one pass drafts a whole block.

How drafts are drawn (coins, siblings, when a request stops) is the draft model's: `drafters.model`.
It asks for the logits after each draft. The first time a pass is made, and the states of the whole
block are kept; after that no pass is needed, since they do not depend on what was drawn. So q of a
draft is its own row of the block, after the request's own transforms (penalties see the drafts
before it).

Where the context is kept is the host's: in a cache for each sequence (`BlockModel`), or in slots of
a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from outrider.core import Budget, Proposal, Request
from outrider.drafters.heads.dflash import BlockPass, DFlashHead
from outrider.drafters.heads.drafter import StateDrafter, ToldSequence
from outrider.drafters.heads.layers import Attend
from outrider.drafters.model import DraftState, ModelDrafter, S

LOGIT_BYTES = 256 << 20
"""What the logits of blocks may take at once: those of further drafts are computed when asked."""


@dataclass(eq=False)
class OpenBlock:
    """A block that was read.

    states: of its drafts, [block size - 1, H]
    used: of how many drafts the logits were given
    ahead: logits of the drafts after those, as far as they are computed
    """

    states: Tensor
    used: int = 0
    ahead: list[Tensor] = field(default_factory=list)

    def take(self) -> Tensor:
        """Return the logits of the next draft, [V]."""
        self.used += 1
        return self.ahead.pop(0)


def read_blocks(
    head: DFlashHead, tokens: Tensor, positions: Tensor, attend: Attend
) -> list[OpenBlock]:
    """Read a block for each sequence, in one pass.

    tokens, positions: [B] of the known tokens, with which blocks begin
    """
    size, device = head.block.size, tokens.device
    block = torch.full((len(tokens), size), head.block.mask_token_id, device=device)
    block[:, 0] = tokens
    places = positions[:, None] + torch.arange(size, device=device)
    states = head(block.flatten(), places.flatten(), attend)
    return [OpenBlock(mine) for mine in states.view(len(tokens), size, -1)[:, 1:]]


def next_logits(head: DFlashHead, blocks: Sequence[OpenBlock]) -> Tensor:
    """Return the logits of the next draft of each block, [B, V].

    The output layer is large and reads all its weights for any number of rows: it computes as many
    drafts of each block at once as LOGIT_BYTES hold.
    """
    if dry := [block for block in blocks if not block.ahead]:
        room = LOGIT_BYTES // (4 * head.config.vocab_size * len(dry))
        count = max(1, min(room, *(len(block.states) - block.used for block in dry)))
        rows = torch.cat([block.states[block.used : block.used + count] for block in dry])
        for block, mine in zip(dry, head.logits(rows).view(len(dry), count, -1), strict=True):
            block.ahead = [*mine]
    return torch.stack([block.take() for block in blocks])


@dataclass(eq=False)
class BlockSequence(ToldSequence):
    """One request in a DFlash head. The cached rows are its context.

    block: the one that was read, if any: the known token and drafts of it count as read
    """

    block: OpenBlock | None = None

    @property
    def length(self) -> int:
        """How many tokens are read."""
        return self.cache.length + (0 if self.block is None else self.block.used)


class BlockModel:
    """Runs a DFlash head for `ModelDrafter`. A prompt is read in pieces of `max_catch_up`."""

    def __init__(self, head: DFlashHead, max_unread: int = 512, max_catch_up: int = 2048) -> None:
        self.head = head
        self.vocab_size = head.config.vocab_size
        self.max_length = head.config.max_length - head.block.size
        self.max_unread, self.max_catch_up = max_unread, max_catch_up

    def open(self, request: Request) -> BlockSequence:
        """Return an empty sequence: states are told later."""
        return BlockSequence()

    @torch.inference_mode()
    def extend(self, segments: Sequence[tuple[BlockSequence, Sequence[int]]]) -> Tensor:
        """Read tokens. Return the logits after the last one of each sequence, [B, V].

        The last token of a sequence without a block begins one; those before it are context.
        """
        fresh = [(sequence, tokens) for sequence, tokens in segments if sequence.block is None]
        if fresh:
            self._read_context([(sequence, len(tokens) - 1) for sequence, tokens in fresh])
            self._read_blocks([(sequence, tokens[-1]) for sequence, tokens in fresh])
        blocks = [sequence.block for sequence, _ in segments]
        return next_logits(self.head, [block for block in blocks if block is not None])

    @torch.inference_mode()
    def catch_up(self, segments: Sequence[tuple[BlockSequence, Sequence[int]]]) -> None:
        """Read tokens as context."""
        self._read_context([(sequence, len(tokens)) for sequence, tokens in segments])

    def truncate(self, sequence: BlockSequence, length: int) -> None:
        """Forget the block, and the context beyond this length."""
        sequence.block = None
        sequence.cache.truncate(length)

    def close(self, sequence: BlockSequence) -> None:
        """Do nothing: the cache goes with the sequence."""

    def _read_context(self, rows: Sequence[tuple[BlockSequence, int]]) -> None:
        """Keep keys and values of so many states of each sequence."""
        rows = [(sequence, count) for sequence, count in rows if count]
        if not rows:
            return
        c = torch.cat([sequence.next_states(count) for sequence, count in rows])
        spans = [range(s.cache.length, s.cache.length + count) for s, count in rows]
        positions = torch.tensor([p for span in spans for p in span], device=c.device)
        counts = [count for _, count in rows]
        for layer, both in enumerate(self.head.context(c, positions)):
            split = [y.split_with_sizes(counts) for y in both]
            for (sequence, _), keys, values in zip(rows, *split, strict=True):
                sequence.cache.append(layer, keys, values)
        for sequence, count in rows:
            sequence.cache.length += count
            sequence.drop_read()

    def _read_blocks(self, starts: Sequence[tuple[BlockSequence, int]]) -> None:
        """Read a block for each sequence, which begins with this token."""
        sequences, device = [sequence for sequence, _ in starts], self.head.fc.weight.device
        tokens = torch.tensor([token for _, token in starts], device=device)
        positions = torch.tensor([s.cache.length for s in sequences], device=device)
        attend = BlockPass([s.cache for s in sequences], self.head.block.size)
        blocks = read_blocks(self.head, tokens, positions, attend)
        for sequence, block in zip(sequences, blocks, strict=True):
            sequence.block = block


class BlockDrafter(ModelDrafter[S]):
    """Drafts a block in one pass of the head.

    drafts_per_pass: so many drafts of a request cost one pass
    """

    drafts_per_pass: int

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Draft for all requests in one pass, if it may pay."""
        if np.minimum(budget.max_drafts, self.drafts_per_pass).sum() < budget.min_gain:
            return Proposal.empty(len(requests))
        # further drafts need no pass, so they need not promise to pay for one
        return super().propose(requests, replace(budget, min_gain=0.0))

    def _eager(
        self, requests: Sequence[Request], budget: Budget
    ) -> list[tuple[Request, DraftState[S]]]:
        """Return the requests that may and want to draft one more token of their block."""
        eager = super()._eager(requests, budget)
        return [(r, state) for r, state in eager if len(state.drafts) < self.drafts_per_pass]


class DFlashDrafter(BlockDrafter[BlockSequence], StateDrafter[BlockSequence]):
    """Drafts with a DFlash head, one pass a proposal."""

    def __init__(
        self, head: DFlashHead, vocab_size: int, min_survival: float = 0.1, siblings: int = 0
    ) -> None:
        super().__init__(BlockModel(head), head, vocab_size, min_survival, siblings)
        self.drafts_per_pass = head.block.size - 1

    def unread(self, request: Request) -> int:
        """Return how many rows the next pass will read: states of the target, and the block."""
        return super().unread(request) + self.drafts_per_pass
