"""A DFlash head as a draft model: one pass drafts a whole block.

How drafts are drawn (coins, siblings, when a request stops) is the draft model's: `drafters.model`.
It asks for the logits after each draft. The first time a pass is made, and the logits of the whole
block are kept; after that no pass is needed, since they do not depend on what was drawn. So q of a
draft is its own row of the block, after the request's own transforms (penalties see the drafts
before it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.core import Budget, Proposal, Request
from outrider.drafters.heads.dflash import BlockPass, DFlashHead
from outrider.drafters.heads.drafter import StateDrafter, ToldSequence
from outrider.drafters.model import DraftState


@dataclass(eq=False)
class BlockSequence(ToldSequence):
    """One request in a DFlash head. The cached rows are its context.

    block: logits of the drafts, [block size - 1, V], if the block is read
    used: how many tokens of the block count as read: the known one and drafts
    """

    block: Tensor | None = None
    used: int = 0

    @property
    def length(self) -> int:
        """How many tokens are read."""
        return self.cache.length + self.used

    def logits(self) -> Tensor:
        """Return the logits of the next draft, [V]."""
        assert self.block is not None
        self.used += 1
        return self.block[self.used - 1]


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
        return torch.stack([sequence.logits() for sequence, _ in segments])

    @torch.inference_mode()
    def catch_up(self, segments: Sequence[tuple[BlockSequence, Sequence[int]]]) -> None:
        """Read tokens as context."""
        self._read_context([(sequence, len(tokens)) for sequence, tokens in segments])

    def truncate(self, sequence: BlockSequence, length: int) -> None:
        """Forget the block, and the context beyond this length."""
        sequence.block, sequence.used = None, 0
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
        """Read a block for each sequence, which begins with this token, and keep its logits."""
        size, mask = self.head.block.size, self.head.block.mask_token_id
        device = self.head.fc.weight.device
        tokens = torch.full((len(starts), size), mask, device=device)
        tokens[:, 0] = torch.tensor([token for _, token in starts], device=device)
        first = torch.tensor([sequence.cache.length for sequence, _ in starts], device=device)
        positions = first[:, None] + torch.arange(size, device=device)
        attend = BlockPass([sequence.cache for sequence, _ in starts], size)
        states = self.head(tokens.flatten(), positions.flatten(), attend)
        drafts = states.view(len(starts), size, -1)[:, 1:]
        logits = self.head.logits(drafts.flatten(0, 1)).view(len(starts), size - 1, -1)
        for (sequence, _), block in zip(starts, logits, strict=True):
            sequence.block, sequence.used = block, 0


class DFlashDrafter(StateDrafter[BlockSequence]):
    """Drafts with a DFlash head, one pass a proposal.

    drafts_per_pass: so many drafts of a request cost one pass
    """

    def __init__(
        self, head: DFlashHead, vocab_size: int, min_survival: float = 0.1, siblings: int = 0
    ) -> None:
        super().__init__(BlockModel(head), head, vocab_size, min_survival, siblings)
        self.drafts_per_pass = head.block.size - 1

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Draft for all requests in one pass, if it may pay."""
        if np.minimum(budget.max_drafts, self.drafts_per_pass).sum() < budget.min_gain:
            return Proposal.empty(len(requests))
        # further drafts need no pass, so they need not promise to pay for one
        return super().propose(requests, replace(budget, min_gain=0.0))

    def _eager(
        self, requests: Sequence[Request], budget: Budget
    ) -> list[tuple[Request, DraftState[BlockSequence]]]:
        """Return the requests that may and want to draft one more token of their block."""
        eager = super()._eager(requests, budget)
        return [(r, state) for r, state in eager if len(state.drafts) < self.drafts_per_pass]

    def unread(self, request: Request) -> int:
        """Return how many rows the next pass will read: states of the target, and the block."""
        return super().unread(request) + self.drafts_per_pass
