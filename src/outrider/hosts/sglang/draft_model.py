"""A draft model in SGLang's own worker.

It shares the target's `req_to_token` and slot allocator and has cache buffers of its own, so one
slot id addresses both caches. Prompts are read with the target's own prefill batches: what the
radix cache keeps of the target, it keeps of the draft too. A draft's cache entry that was never
written (its request had opted out, or drafting was at rest) makes poor drafts, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from torch import Tensor

from outrider.core import Request
from outrider.hosts.sglang.rows import decode_rows


@dataclasses.dataclass
class DraftSequence:
    """One request's sequence: which line of `req_to_token` it has, and how much is cached."""

    req_pool_idx: int
    length: int


class SglangDraftModel:
    """Runs the draft model over rows, as decode batches, and catches up by prefill batches.

    What it has read of a request stays known as long as the host knows the request, also when the
    drafter is told to forget it (after a fault). The slots of a request change only with its
    prefill, which passes here too, read or skipped.

    max_rows: at most so many rows in one pass
    max_unread, max_catch_up: as in `DraftModel`; a decode row computes all logits, so `extend` is
        for few tokens only
    """

    max_unread = 8
    max_catch_up = 512

    def __init__(self, worker: TpModelWorker, max_rows: int) -> None:
        self.vocab_size: int = worker.model_config.vocab_size
        self.max_length: int = worker.model_config.context_len
        self._runner = worker.model_runner
        self._max_rows = max_rows
        self._sequences: WeakKeyDictionary[Any, DraftSequence] = WeakKeyDictionary()
        self._batch: Any = None

    def bind(self, batch: Any) -> None:
        """Take the host's batch whose requests will be drafted for next."""
        self._batch = batch

    def prefill(self, batch: Any) -> None:
        """Read the tokens of the host's prefill batch."""
        self._forward(batch)
        self._note_prefill(batch, is_read=True)

    def skip(self, batch: Any) -> None:
        """Note that a prefill batch of the host's was not read."""
        self._note_prefill(batch, is_read=False)

    def _note_prefill(self, batch: Any, is_read: bool) -> None:
        """Note how much of each request is cached after its prefill, or a chunk of it.

        The prefix is what the radix cache has, or the chunks before. Where those were skipped the
        cache has a gap, and all from there on is to be read again.
        """
        chunks = zip(batch.reqs, batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
        for req, prefix, extended in chunks:
            before = self._sequences.get(req)
            known = prefix if before is None else min(prefix, before.length)
            length = known + extended if is_read and known == prefix else known
            self._sequences[req] = DraftSequence(req.req_pool_idx, length)

    def open(self, request: Request) -> DraftSequence:
        """Return the request's sequence, with what is cached already."""
        req = request.req  # type: ignore[attr-defined]  # the worker's requests carry it
        sequence = self._sequences.get(req)
        if sequence is None or sequence.req_pool_idx != req.req_pool_idx:
            sequence = self._sequences[req] = DraftSequence(req.req_pool_idx, 0)
        return sequence

    def extend(self, segments: Sequence[tuple[DraftSequence, Sequence[int]]]) -> Tensor:
        """Append tokens to sequences. Return the logits after the last token of each, [B, V].

        The slots are those that the worker has given the target for the same positions.
        """
        tokens: list[int] = []
        lines: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        for sequence, new in segments:
            tokens += new
            lines += [sequence.req_pool_idx] * len(new)
            positions += range(sequence.length, sequence.length + len(new))
            ends.append(len(tokens) - 1)
        logits = []
        for start in range(0, len(tokens), self._max_rows):
            rows = slice(start, start + self._max_rows)
            found = self._rows(tokens[rows], lines[rows], positions[rows])
            wanted = [end - start for end in ends if start <= end < start + self._max_rows]
            # the next pass may overwrite them: all captured graphs share one buffer for logits
            is_last = start + self._max_rows >= len(tokens)
            logits.append(found if is_last and len(wanted) == len(found) else found[wanted])
        for sequence, new in segments:
            sequence.length += len(new)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def catch_up(self, segments: Sequence[tuple[DraftSequence, Sequence[int]]]) -> None:
        """Append tokens to sequences, as a prefill batch: logits of each last token only."""
        indices = torch.tensor([s.req_pool_idx for s, _ in segments], device=self._runner.device)
        self._forward(self._prefill_batch(indices, segments))
        for sequence, new in segments:
            sequence.length += len(new)

    def truncate(self, sequence: DraftSequence, length: int) -> None:
        """Forget the tokens beyond this length."""
        sequence.length = min(sequence.length, length)

    def close(self, sequence: DraftSequence) -> None:
        """Do nothing: the slots are the target's, and what is in them stays known."""

    def _rows(self, tokens: list[int], lines: list[int], positions: list[int]) -> Tensor:
        line = torch.tensor(lines, device=self._runner.device)
        position = torch.tensor(positions, device=self._runner.device)
        slots = self._slots(line, position)
        return self._forward(decode_rows(self._batch, tokens, line, positions, slots))

    def _prefill_batch(
        self, indices: Tensor, segments: Sequence[tuple[DraftSequence, Sequence[int]]]
    ) -> Any:
        """Return the host's prefill batch over these tokens.

        indices: [B] the sequences' req_pool_index
        """
        prefixes = [sequence.length for sequence, _ in segments]
        counts = [len(new) for _, new in segments]
        positions = [p for s, new in segments for p in range(s.length, s.length + len(new))]
        owners = torch.arange(len(segments)).repeat_interleave(torch.tensor(counts))
        line = indices[owners.to(indices.device)]
        seq_lens_cpu = torch.tensor(prefixes) + torch.tensor(counts)
        seq_lens = seq_lens_cpu.to(indices.device, non_blocking=True)
        return dataclasses.replace(
            self._batch,
            forward_mode=ForwardMode.EXTEND,
            input_ids=torch.tensor([t for _, new in segments for t in new], device=line.device),
            req_pool_indices=indices,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            seq_lens_sum=int(seq_lens_cpu.sum()),
            orig_seq_lens=seq_lens.to(torch.int32),
            out_cache_loc=self._slots(line, torch.tensor(positions, device=line.device)),
            is_extend_in_batch=True,
            all_extend_in_batch=True,
            extend_num_tokens=len(positions),
            extend_seq_lens=counts,
            extend_prefix_lens=prefixes,
            extend_logprob_start_lens=None,
            multimodal_inputs=None,
        )

    def _slots(self, line: Tensor, position: Tensor) -> Tensor:
        """Return the slots that the host has given these positions."""
        slots: Tensor = self._runner.req_to_token_pool.req_to_token[line, position]
        return slots.long()

    def run(self, batch: Any) -> Tensor:
        """Run the host's batch for nothing but the time it takes. Return its logits."""
        return self._forward(batch)

    def _forward(self, batch: Any) -> Tensor:
        batch = dataclasses.replace(
            batch, spec_info=None, return_logprob=False, capture_hidden_mode=CaptureHiddenMode.NULL
        )
        forward = ForwardBatch.init_new(batch, self._runner)
        logits: Tensor = self._runner.forward(forward).logits_output.next_token_logits
        return logits
