"""A draft model in SGLang's own worker.

It shares the target's `req_to_token` and slot allocator and has cache buffers of its own, so one
slot id addresses both caches. Prompts are read with the target's own prefill batches: what the
radix cache keeps of the target, it keeps of the draft too. A draft's cache entry that was never
written (its request had opted out, or drafting was at rest) makes poor drafts, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from outrider.engines.sglang.batches import SglangBatch, copied_rows, forward_batch
from outrider.engines.sglang.copies import changed
from outrider.engines.sglang.drafts.draft_weights import quantize
from outrider.engines.sglang.drafts.heads import draft_kind
from outrider.engines.sglang.drafts.sequences import DraftSequence, SlotSequences, segment_rows
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.device import owners_and_places, to_device
from outrider.serving.profile import MODEL, load_profile
from outrider.serving.ranks import Message, Ranks


class SglangDraftModel(SlotSequences):
    """Runs the draft model over rows, as decode batches, and catches up by prefill batches.

    With tensor parallelism, rank 0 announces each pass, and the others `follow`.

    max_rows: at most so many rows in one pass
    max_unread, max_catch_up: as in `DraftModel`; a decode row computes all logits, so `extend` is
        for few tokens only
    has_run: whether a pass was announced to the other ranks since `bind`
    """

    max_unread = 8
    max_catch_up = 512

    def __init__(
        self,
        worker: TpModelWorker,
        max_rows: int,
        version: SglangVersion,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(version)
        self.vocab_size: int = worker.model_config.vocab_size
        self.max_length: int = worker.model_config.context_len
        self._runner = worker.model_runner
        self._max_rows = max_rows
        self._ranks = ranks or Ranks()
        self._batch: Any = None
        self._lengths: list[tuple[DraftSequence, int]] = []
        self._fault: str | None = None
        self.has_run = False

    def bind(self, batch: SglangBatch) -> None:
        """Take the batch whose requests will be drafted for next."""
        self._batch = batch.worker_batch
        self._lengths, self.has_run = [], False

    def undo(self, fault: str) -> None:
        """Forget what was read since `bind`, and raise when asked next: other ranks failed."""
        for sequence, length in reversed(self._lengths):
            sequence.reset(length)
        self._fault = fault

    def prefill(self, batch: Any) -> None:
        """Read the tokens of the host's prefill batch."""
        self._forward(batch)
        self.note_prefill(batch, is_read=True)

    def extend(self, segments: Sequence[tuple[DraftSequence, Sequence[int]]]) -> Tensor:
        """Append tokens to sequences. Return the logits after the last token of each, [B, V].

        The slots are those that the worker has given the target for the same positions.
        """
        tokens, lines, positions, counts = segment_rows(segments)
        ends = (np.cumsum(counts) - 1).tolist()
        self._begin(segments)
        logits = []
        for start in range(0, len(tokens), self._max_rows):
            rows = slice(start, start + self._max_rows)
            found = self._run(Message.DECODE, tokens[rows], lines[rows], positions[rows])
            wanted = [end - start for end in ends if start <= end < start + self._max_rows]
            # the next pass may overwrite them: all captured graphs share one buffer for logits
            is_last = start + self._max_rows >= len(tokens)
            logits.append(found if is_last and len(wanted) == len(found) else found[wanted])
        for sequence, new in segments:
            sequence.append(len(new))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def catch_up(self, segments: Sequence[tuple[DraftSequence, Sequence[int]]]) -> None:
        """Append tokens to sequences, as a prefill batch: logits of each last token only."""
        self._begin(segments)
        self._run(
            Message.EXTEND,
            [sequence.req_pool_idx for sequence, _ in segments],
            [sequence.length for sequence, _ in segments],
            [len(new) for _, new in segments],
            [token for _, new in segments for token in new],
        )
        for sequence, new in segments:
            sequence.append(len(new))

    def _begin(self, segments: Sequence[tuple[DraftSequence, Sequence[int]]]) -> None:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise RuntimeError(fault)
        self._lengths += [(sequence, sequence.length) for sequence, _ in segments]

    def _run(self, message: Message, *lists: list[int]) -> Tensor:
        """Make a pass, on all ranks. What can fail, fails before it is announced."""
        batch = self._pass(message, *lists)
        self._ranks.tell(message, *lists)
        self.has_run = True
        return self._forward(batch)

    def follow(self, message: Message, *lists: list[int]) -> None:
        """Make a pass that rank 0 has announced."""
        self._forward(self._pass(message, *lists))

    def _pass(self, message: Message, *lists: list[int]) -> Any:
        """Return SGLang's batch for a pass."""
        return (self._prefill if message is Message.EXTEND else self._decode)(*lists)

    def _decode(self, tokens: list[int], indices: list[int], positions: list[int]) -> Any:
        """Return SGLang's decode batch: a row for each token."""
        index = torch.tensor(indices, device=self._runner.device)
        slots = self._slots(index, torch.tensor(positions, device=index.device))
        return copied_rows(self._batch, tokens, index, positions, slots)

    def _prefill(
        self, indices: list[int], prefixes: list[int], counts: list[int], tokens: list[int]
    ) -> Any:
        """Return SGLang's prefill batch: some tokens of each request, behind a prefix."""
        owners, places = owners_and_places(np.array(counts))
        before, index = np.array(prefixes), torch.tensor(indices, device=self._runner.device)
        packed = np.stack([np.array(tokens), owners, before[owners] + places])
        token, owner, position = to_device(packed, index.device)
        ends = before + np.array(counts)
        return forward_batch(
            self._batch,
            token,
            index,
            to_device(ends, index.device),
            ends,
            self._slots(index[owner], position),
            forward_mode=ForwardMode.EXTEND,
            is_extend_in_batch=True,
            extend_num_tokens=len(tokens),
            extend_logprob_start_lens=None,
            multimodal_inputs=None,
            **{self._version.prefix_lens: prefixes, self._version.extend_lens: counts},
        )

    def _slots(self, pool_index: Tensor, position: Tensor) -> Tensor:
        """Return the slots that the host has given these positions."""
        slots: Tensor = self._runner.req_to_token_pool.req_to_token[pool_index, position]
        return slots.long()

    def run(self, batch: Any) -> Tensor:
        """Run the host's batch for nothing but the time it takes. Return its logits."""
        return self._forward(batch)

    def _forward(self, batch: Any) -> Tensor:
        batch = changed(batch, spec_info=None, return_logprob=False)
        forward = self._version.draft_batch(batch, self._runner)
        logits: Tensor = self._runner.forward(forward).logits_output.next_token_logits
        return logits


def make_draft_worker(
    version: SglangVersion, target_worker: Any, server_args: Any, **options: Any
) -> Any:
    """Load the draft model into a worker of SGLang's, beside the target; None if there is none."""
    if draft_kind(version.arguments(server_args)) != MODEL:
        return None
    worker = version.draft_worker(target_worker, server_args, **options)
    bits = load_profile().draft_bits
    if bits is not None:
        quantize(worker.model_runner.model, bits)
    return worker
