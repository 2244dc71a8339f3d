"""Heads whose memory is in the target's slots.

Every pass of the target, be it prefill, decode or verify, tells the heads the hidden states of its
rows (`tell`). What a head keeps of a row is in the row's slot. So it is found by the host's table,
wherever the row comes from: a prefix in the radix cache, a chunk, the first life of a request that
was retracted. A tree's slots are put in order in that table, and what heads keep with them. Nothing
leaves the device.

*Heads that read pairs* (EAGLE-3, MTP, EAGLE-1) keep one vector x, to which the states are reduced,
and their own keys and values. The pair of the token at position p (see `eagle3`) needs x of
position p - 1, and its keys and values are in the slot of p. The first token is no pair: attention
begins at position 1. When the head drafts, its own states stand in the slots of the tokens that the
target has yet to read. The pass that verifies the drafts writes over them. Drafts of a tree that
follow the same token cannot share a slot: each branch has scratch slots behind the target's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core import Budget, Ints, Outcome, Proposal, Request, is_whole
from outrider.drafters import ModelDrafter
from outrider.drafters.heads import Head, HeadConfig
from outrider.drafters.heads.drafter import StateReader
from outrider.engines.sglang.attention.slots import PoolPass
from outrider.engines.sglang.drafts.sequences import (
    DraftSequence,
    SlotSequences,
    extended_rows,
    segment_rows,
)
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.device import to_device
from outrider.serving.make_pool import PoolHead

FEW_ROWS = 32
"""Sequences with at most so many new rows are read side by side; one with more is a prompt."""

MAX_BRANCHES = 1024
"""Drafts of trees that can be read in a step: so many have scratch slots."""


class SlotHead(PoolHead):
    """A head that keeps what it knows of a token in the target's slot for it.

    captured: the layers whose states a pass of the target tells, as Transformers counts them
    weight_bytes, pool_bytes: what it takes on the device
    """

    def __init__(
        self, head: StateReader, runner: Any, captured: Sequence[int], version: SglangVersion
    ) -> None:
        config, self._version = head.config, version
        self.name, self.vocab_size = head.name, config.vocab_size
        self.max_length = int(runner.model_config.context_len)
        self._reader, self._num_captured = head, len(captured)
        self._table: Tensor = runner.req_to_token_pool.req_to_token
        columns = [captured.index(i) for i in head.hidden_layers]
        self._columns = torch.tensor(columns, device=self._table.device)
        self._num_slots = runner.token_to_kv_pool_allocator.size + runner.page_size
        shared = ("embed_tokens.weight", "lm_head.weight")[: 1 + (head.name != "eagle3")]
        weights = [w for name, w in head.state_dict().items() if name not in shared]
        self._dtype = next(w.dtype for w in weights if w.is_floating_point())
        self.weight_bytes, self.pool_bytes = sum(w.nbytes for w in weights), 0
        self._fault: str | None = None

    @staticmethod
    @abstractmethod
    def cell(config: HeadConfig) -> int:
        """Return how many numbers a head of this shape keeps of a token."""

    @abstractmethod
    def _keep(self, batch: Any, x: Tensor) -> None:
        """Keep the reduced states of a batch's rows, [N, H], in their slots."""

    @torch.inference_mode()
    def tell(self, batch: Any, states: Tensor) -> None:
        """Learn the target's states of a batch, as its workers take it.

        states: [N, captured * H]
        """
        if not len(batch.out_cache_loc):
            return
        try:
            each = states.unflatten(-1, (self._num_captured, -1)).index_select(1, self._columns)
            self._keep(batch, self._reader.reduce(each))
        except Exception as error:  # the target's step goes on; drafting learns of it when it asks
            self._fault = f"the target's states were not read: {error!r}"

    def _new_pool(self, *shape: int) -> Tensor:
        """Return a buffer with so many slots."""
        pool = torch.zeros(shape, dtype=self._dtype, device=self._table.device)
        self.pool_bytes += pool.nbytes
        return pool

    def raise_fault(self) -> None:
        """Raise if states could not be read since this was last asked."""
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise RuntimeError(fault)


@dataclass(eq=False)
class Branch(DraftSequence):
    """A branch of a request's sequence: what follows the text is in scratch slots.

    text: how many tokens are in the target's slots
    tail: the slots of those that follow
    """

    text: int = 0
    tail: tuple[int, ...] = ()

    def push(self, slot: int) -> None:
        """Append a token, which is in this slot."""
        self.tail = (*self.tail, slot)
        self.append(1)


class SglangHead(SlotSequences, SlotHead):
    """Runs a head that reads pairs over rows in the target's slots."""

    max_unread = few_rows = FEW_ROWS
    max_catch_up = 2048
    max_branches = MAX_BRANCHES

    def __init__(
        self, head: Head, runner: Any, captured: Sequence[int], version: SglangVersion
    ) -> None:
        SlotHead.__init__(self, head, runner, captured, version)
        SlotSequences.__init__(self, version)
        self.head, config = head, head.config
        slots, self._scratch = self._num_slots + MAX_BRANCHES, list[int]()
        self._scratch += range(self._num_slots, slots)
        self._x = self._new_pool(slots, config.hidden_size)
        self._pool = self._new_pool(1, 2, slots, config.num_kv_heads, config.head_dim)

    @staticmethod
    def cell(config: HeadConfig) -> int:
        """Return the numbers of x, a key and a value."""
        return config.hidden_size + 2 * config.num_kv_heads * config.head_dim

    def drafter(self, vocab_size: int, **options: Any) -> ModelDrafter[DraftSequence]:
        """Return a drafter with this head."""
        return SglangHeadDrafter(self, vocab_size, **options)

    def _keep(self, batch: Any, x: Tensor) -> None:
        self._x[batch.out_cache_loc] = x

    @torch.inference_mode()
    def prefill(self, batch: Any) -> None:
        """Read the tokens of the host's prefill batch, whose states were given."""
        owners, positions = extended_rows(batch, self._version)
        rows = np.flatnonzero(positions > 0)
        if len(rows):
            row, owner = to_device(np.stack([rows, owners[rows]]), self._table.device)
            lines = batch.req_pool_indices[owner]
            counts = np.bincount(owners[rows])
            self._read(batch.input_ids[row], lines, positions[rows], counts)
        self.note_prefill(batch, is_read=True)

    @torch.inference_mode()
    def extend(self, segments: Sequence[tuple[DraftSequence, Sequence[int]]]) -> Tensor:
        """Read tokens. Return the logits after the last one of each sequence, [B, V]."""
        self.raise_fault()
        if isinstance(segments[0][0], Branch):
            return self._extend_branches(segments)
        states, slots, counts = self._append(segments)
        if len(slots) > len(segments):
            ends = to_device(np.cumsum(counts) - 1, slots.device)
            states, slots = states[ends], slots[ends]
        self._x[slots] = states  # drafting goes on from them; the target has none for these
        return self.head.logits(states)

    @torch.inference_mode()
    def unroll(self, sequences: Sequence[DraftSequence], limits: Sequence[int]) -> UnrolledHead:
        """Begin to read on from the ends of sequences: see `UnrollingModel`."""
        lines = np.array([sequence.req_pool_idx for sequence in sequences])
        lengths = np.array([sequence.length for sequence in sequences])
        depths = np.arange(max(limits))[:, None]
        line, last = to_device(np.stack([lines, lengths - 1]), self._table.device)
        x = self._x[self._table[line, last].long()]
        ends = np.where(depths < limits, lengths + depths, 0)
        return self.unroll_from(x, line, to_device(ends, self._table.device), ends)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of states, [N, V]."""
        return self.head.logits(states)

    def unroll_from(self, x: Tensor, lines: Tensor, positions: Tensor, ends: Ints) -> UnrolledHead:
        """Begin to read on from states: see `UnrolledHead`."""
        return UnrolledHead(self.head, self._table, self._pool, x, lines, positions, ends)

    def fork(self, sequence: DraftSequence) -> Branch:
        """Return a branch, which goes on from the head's own state."""
        if isinstance(sequence, Branch):
            return replace(sequence)
        return Branch(sequence.req_pool_idx, sequence.length, sequence.length)

    def close(self, sequence: DraftSequence) -> None:
        """Give back the slot of a branch: the others are of branches before it, or the target's."""
        if isinstance(sequence, Branch) and sequence.tail:
            self._scratch.append(sequence.tail[-1])

    def _extend_branches(self, segments: Sequence[tuple[Any, Sequence[int]]]) -> Tensor:
        """Read one draft for each branch. Return the logits after it, [B, V]."""
        branches: list[Branch] = [branch for branch, _ in segments]
        device, count = self._table.device, len(branches)
        positions = np.array([branch.length for branch in branches])
        texts, deepest = [branch.text for branch in branches], 0
        before = [branch.tail[-1] if branch.tail else -1 for branch in branches]
        for branch in branches:
            branch.push(self._scratch.pop())
            deepest = max(deepest, len(branch.tail))
        # each branch's own line of slots: its text, and behind it what it has drafted
        longest = max(texts)
        tails = np.zeros((count, deepest), np.int64)
        places = np.full((count, deepest), longest + deepest)  # what is not there goes to the end
        for row, branch in enumerate(branches):
            depth = len(branch.tail)
            tails[row, :depth], places[row, :depth] = branch.tail, branch.text + np.arange(depth)
        given = [[tokens[0] for _, tokens in segments], [b.req_pool_idx for b in branches]]
        own = [branch.tail[-1] for branch in branches]
        token, line, last, slot, position = to_device(
            np.array([*given, before, own, positions]), device
        )
        table = self._table.new_zeros(count, longest + deepest + 1)
        table[:, :longest] = self._table[line, :longest]
        owner = torch.arange(count, device=device)
        columns = to_device(places, device), to_device(tails, device).to(table.dtype)
        table[owner[:, None], columns[0]] = columns[1]
        text_last = self._table[line, position - 1].long()
        attend = PoolPass(
            self._pool,
            slot,
            lines=owner,
            lens=position,
            table=table[:, 1:],
            counts=np.ones(count, np.int64),
            ends=positions,
        )
        x = self._x[torch.where(last < 0, text_last, last)]
        states = self.head(token, x, position, attend)
        self._x[slot] = states
        return self.head.logits(states)

    @torch.inference_mode()
    def catch_up(self, segments: Sequence[tuple[DraftSequence, Sequence[int]]]) -> None:
        """Read tokens."""
        self._append(segments)

    def run(self, batch: Any) -> Tensor:
        """Read the rows of the host's decode batch, for nothing but the time it takes."""
        positions = batch.seq_lens_cpu.numpy() - 1
        counts = np.ones(len(positions), np.int64)
        states, _ = self._read(batch.input_ids, batch.req_pool_indices, positions, counts)
        return self.head.logits(states)

    def _append(
        self, segments: Sequence[tuple[DraftSequence, Sequence[int]]]
    ) -> tuple[Tensor, Tensor, Ints]:
        """Read tokens. Return their rows' states and slots, and how many rows each sequence has."""
        # the first token is no pair
        tokens, lines, positions, counts = segment_rows(segments, first=1)
        token, line = to_device(np.array([tokens, lines]), self._table.device)
        states, slots = self._read(token, line, np.array(positions), np.array(counts))
        for sequence, new in segments:
            sequence.append(len(new))
        return states, slots, np.array(counts)

    def read(
        self, tokens: Tensor, lines: Tensor, positions: Tensor, counts: Ints, ends: Ints
    ) -> tuple[Tensor, Tensor]:
        """Read pairs. Return the states that follow and their slots, [N, H] and [N].

        tokens, lines, positions: [N] lines of the host's table. What is read at position 0 is of no
            use: the first token of a text is no pair.
        counts: rows of each sequence, on the host; they stand beside each other, in order
        ends: the largest position of each sequence, or more, on the host
        """
        slots = self._table[lines, positions].long()
        before = self._table[lines, (positions - 1).clamp(min=0)].long()
        attend = PoolPass(
            self._pool,
            slots,
            lines,
            lens=positions.clamp(min=1),  # positions 1 to p are p keys
            table=self._table[:, 1:],
            counts=counts,
            ends=ends,
            is_prompt=int(counts.max()) > FEW_ROWS,
        )
        return self.head(tokens, self._x[before], positions, attend), slots

    def _read(
        self, tokens: Tensor, lines: Tensor, positions: Ints, counts: Ints
    ) -> tuple[Tensor, Tensor]:
        """Read pairs at positions that the host knows, [N]."""
        counts = counts[counts > 0]
        ends = positions[np.cumsum(counts) - 1]
        return self.read(tokens, lines, to_device(positions, self._table.device), counts, ends)


class UnrolledHead:
    """Sequences that go on from the head's own states, by tokens on the device: see `Unrolled`.

    table, pool: of the head
    x: [B, H] the states that they go on from
    lines: [B] of the table
    positions: [K, B] of each token to read; 0 for one that is of no use
    ends: [K, B] the largest that these may be, on the host
    """

    def __init__(
        self,
        head: Head,
        table: Tensor,
        pool: Tensor,
        x: Tensor,
        lines: Tensor,
        positions: Tensor,
        ends: Ints,
    ) -> None:
        self._head, self._table, self._pool = head, table[:, 1:], pool
        self._x, self._lines, self._ends, self._depth = x, lines, ends, 0
        # the first token of a text is no pair: its keys and values can be anything
        self._positions, self._slots = positions, table[lines, positions].long()
        self._lens, self._counts = positions.clamp(min=1), np.ones(len(x), np.int64)

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> Tensor:
        """Read one more token of each sequence, [B]. Return the logits after it, [B, V]."""
        depth = self._depth
        attend = PoolPass(
            self._pool,
            self._slots[depth],
            self._lines,
            self._lens[depth],
            self._table,
            self._counts,
            self._ends[depth],
        )
        self._x = self._head(tokens, self._x, self._positions[depth], attend)
        self._depth += 1
        return self._head.logits(self._x)


class SglangHeadDrafter(ModelDrafter[DraftSequence]):
    """Drafts with a head whose states are in the target's slots.

    depth: if given, every step has so many drafts, however sure the head is of them. Such steps can
        be launched ahead: see `head_steps`.
    """

    def __init__(
        self,
        model: SglangHead,
        vocab_size: int,
        min_survival: float | None = None,
        siblings: int = 0,
        width: int = 0,
        depth: int | None = None,
    ) -> None:
        if depth is not None:
            if not is_whole(depth, 1) or depth >= FEW_ROWS:
                raise ValueError(f"need a whole depth, 1 <= depth < {FEW_ROWS}")
            if min_survival is not None or siblings or width:
                raise ValueError("depth is for chains of one length: no other option goes with it")
            min_survival = 0.0
        min_survival = 0.3 if min_survival is None else min_survival
        super().__init__(model, vocab_size, min_survival, siblings, width)
        self.name, self.depth = model.name, depth

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Draft, no deeper than asked for."""
        if self.depth is not None:
            budget = replace(budget, max_drafts=np.minimum(budget.max_drafts, self.depth))
        return super().propose(requests, budget)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Forget the drafts, right or not: they are read again with the target's states."""
        for outcome in outcomes:
            sequence = self._states[outcome.request.id].sequence
            self._model.truncate(sequence, outcome.request.length)
