"""DFlash heads in the target's slots: the context's keys and values are there, nothing else.

The keys and values of a context row follow from the target's states of it and its position, in all
layers (see `dflash`). So they are computed when the states are given, and a request that was never
drafted for has all that a block needs: nothing is read later.

A block is not kept: its keys and values go to scratch slots behind the target's, and the next pass
writes over them. Each of its rows sees the context and then the whole block, as rows of a decode
batch that see equally many slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core import Ints, Outcome, Request
from outrider.drafters.heads import DFlashHead, HeadConfig
from outrider.drafters.heads.blocks import BlockDrafter, OpenBlock, next_logits, read_blocks
from outrider.engines.sglang.attention.slots import PoolPass
from outrider.engines.sglang.drafts.sequences import DraftSequence, extended_rows
from outrider.engines.sglang.drafts.slot_heads import SlotHead
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.device import to_device

MAX_BLOCKS = 64
"""Blocks of one pass: so many have scratch slots. For more requests there are several passes."""


def positions_of(batch: Any, version: SglangVersion) -> Tensor:
    """Return the positions of the rows of a batch, as the target's workers take it, [N]."""
    mode = batch.forward_mode
    if mode.is_target_verify() or mode.is_decode():
        found: Tensor = batch.seq_lens - 1 if mode.is_decode() else batch.spec_info.positions
        return found
    return to_device(extended_rows(batch, version)[1], batch.out_cache_loc.device)


@dataclass(eq=False)
class BlockSlots(DraftSequence):
    """One request's sequence. Its context is given up to the token before the last.

    block: the one that was read, if any
    """

    block: OpenBlock | None = None

    def drop_block(self, length: int) -> None:
        """Forget the block. The context has so many tokens."""
        self.block = None
        self.reset(length)


class SglangBlocks(SlotHead):
    """Runs a DFlash head over contexts in the target's slots."""

    max_catch_up = 0

    def __init__(
        self, head: DFlashHead, runner: Any, captured: Sequence[int], version: SglangVersion
    ) -> None:
        super().__init__(head, runner, captured, version)
        self.head, self.max_unread, config = head, head.block.size, head.config
        num_scratch = MAX_BLOCKS * head.block.size
        slots = self._num_slots + num_scratch
        self._pool = self._new_pool(
            config.num_layers, 2, slots, config.num_kv_heads, config.head_dim
        )
        self._scratch = self._num_slots + torch.arange(num_scratch, device=self._table.device)

    @staticmethod
    def cell(config: HeadConfig) -> int:
        """Return the numbers of a key and a value in each layer."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim

    def drafter(self, vocab_size: int, **options: Any) -> SglangBlockDrafter:
        """Return a drafter with this head."""
        return SglangBlockDrafter(self, vocab_size, **options)

    def _keep(self, batch: Any, x: Tensor) -> None:
        slots = batch.out_cache_loc
        for (keys, values), given in zip(
            self._pool, self.head.context(x, positions_of(batch, self._version)), strict=True
        ):
            keys[slots], values[slots] = given

    def prefill(self, batch: Any) -> None:
        """Do nothing: the states that were given are all that it reads."""

    skip = prefill

    def open(self, request: Request) -> BlockSlots:
        """Return the request's sequence, all of its context known."""
        req = request.req  # type: ignore[attr-defined]  # the worker's requests carry it
        return BlockSlots(self._version.kv(req).req_pool_idx, request.length - 1)

    @torch.inference_mode()
    def extend(self, segments: Sequence[tuple[BlockSlots, Sequence[int]]]) -> Tensor:
        """Read tokens. Return the logits after the last one of each sequence, [B, V].

        The last token of a sequence without a block begins one; those before it are context.
        """
        self.raise_fault()
        fresh = [(s, tokens) for s, tokens in segments if s.block is None]
        for i in range(0, len(fresh), MAX_BLOCKS):
            self._read(fresh[i : i + MAX_BLOCKS])
        for sequence, tokens in segments:
            sequence.append(len(tokens))
        blocks = [sequence.block for sequence, _ in segments]
        return next_logits(self.head, [block for block in blocks if block is not None])

    def catch_up(self, segments: Sequence[tuple[BlockSlots, Sequence[int]]]) -> None:
        """Do nothing: the context is known."""

    def truncate(self, sequence: BlockSlots, length: int) -> None:
        """Forget the block, and the tokens beyond this length."""
        sequence.drop_block(min(sequence.length, length))

    def close(self, sequence: BlockSlots) -> None:
        """Do nothing: the slots are the target's."""

    @torch.inference_mode()
    def run(self, batch: Any) -> Tensor:
        """Read blocks of as many rows as the host's decode batch has, for the time it takes."""
        count = min(MAX_BLOCKS, -(-len(batch.seq_lens_cpu) // self.head.block.size))
        contexts = batch.seq_lens_cpu.numpy()[:count] - 1
        tokens, lines = batch.input_ids[:count], batch.req_pool_indices[:count]
        return next_logits(self.head, self._blocks(tokens, lines, contexts))

    def _read(self, fresh: Sequence[tuple[BlockSlots, Sequence[int]]]) -> None:
        """Read a block for each of these sequences, which begins with its last token."""
        last = [tokens[-1] for _, tokens in fresh]
        lines = [sequence.req_pool_idx for sequence, _ in fresh]
        contexts = np.array([sequence.length + len(tokens) - 1 for sequence, tokens in fresh])
        token, line = to_device(np.array([last, lines]), self._table.device)
        for (sequence, _), block in zip(fresh, self._blocks(token, line, contexts), strict=True):
            sequence.block = block

    def _blocks(self, tokens: Tensor, lines: Tensor, contexts: Ints) -> list[OpenBlock]:
        """Read blocks in one pass.

        tokens, lines: [B] on the device: what they begin with; lines of the host's table
        contexts: [B] on the host: how many tokens stand before each
        """
        size, batch, longest = self.head.block.size, len(contexts), int(contexts.max())
        before = to_device(contexts, self._table.device)
        owner = torch.arange(batch, device=before.device)
        scratch = self._scratch[: batch * size]
        # each block's own line of slots: its context, and behind it the block
        table = self._table.new_zeros(batch, longest + size)
        table[:, :longest] = self._table[lines, :longest]
        places = before[:, None] + torch.arange(size, device=before.device)
        table[owner[:, None], places] = scratch.view(batch, size).to(table.dtype)
        attend = PoolPass(
            self._pool,
            scratch,
            lines=owner.repeat_interleave(size),
            lens=(before + size).repeat_interleave(size),
            table=table,
            counts=np.full(batch, size),
            ends=contexts + size,
        )
        return read_blocks(self.head, tokens, before, attend)


class SglangBlockDrafter(BlockDrafter[BlockSlots]):
    """Drafts with a DFlash head whose contexts are in the target's slots."""

    def __init__(
        self, model: SglangBlocks, vocab_size: int, min_survival: float = 0.1, siblings: int = 0
    ) -> None:
        super().__init__(model, vocab_size, min_survival, siblings)
        self.name, self.drafts_per_pass = model.name, model.head.block.size - 1

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Forget the block: the context of the next one is given up to its first token."""
        for outcome in outcomes:
            sequence = self._states[outcome.request.id].sequence
            sequence.drop_block(outcome.request.length + len(outcome.tokens) - 1)

    def unread(self, request: Request) -> int:
        """Return how many rows the next pass will read: the block."""
        return 1 + self.drafts_per_pass
