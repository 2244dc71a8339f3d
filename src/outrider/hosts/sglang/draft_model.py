"""A draft model in SGLang's own worker.

It shares the target's `req_to_token` and slot allocator and has cache buffers of its own, so one
slot id addresses both caches. Prompts are read with the target's own prefill batches: what the
radix cache keeps of the target, it keeps of the draft too. A draft's cache entry that was never
written (its request had opted out, or drafting was at rest) makes poor drafts, and nothing else.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from torch import Tensor

from outrider.core import Request
from outrider.hosts.sglang.rows import decode_rows


@dataclasses.dataclass
class DraftSequence:
    """One request's sequence: which line of `req_to_token` it has, and how much is cached."""

    req_pool_idx: int
    length: int


class SglangDraftModel:
    """Runs the draft model over rows, as decode batches.

    max_rows: at most so many rows in one pass
    seconds: time spent in forward passes so far
    """

    def __init__(self, worker: TpModelWorker, max_rows: int) -> None:
        self.vocab_size: int = worker.model_config.vocab_size
        self.max_length: int = worker.model_config.context_len
        self._runner = worker.model_runner
        self._max_rows = max_rows
        self._prefilled: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._batch: Any = None
        self.seconds = 0.0

    def bind(self, batch: Any) -> None:
        """Take the host's batch whose requests will be drafted for next."""
        self._batch = batch

    def prefill(self, batch: Any) -> None:
        """Read the tokens of the host's prefill batch."""
        self._forward(batch)
        read = zip(batch.reqs, batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
        for req, prefix, extended in read:
            self._prefilled[req] = prefix + extended

    def open(self, request: Request) -> DraftSequence:
        """Return the request's sequence, of which the prompt is cached already."""
        req = request.req  # type: ignore[attr-defined]  # the worker's requests carry it
        return DraftSequence(req.req_pool_idx, self._prefilled.pop(req, 0))

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

    def truncate(self, sequence: DraftSequence, length: int) -> None:
        """Forget the tokens beyond this length."""
        sequence.length = min(sequence.length, length)

    def close(self, sequence: DraftSequence) -> None:
        """Do nothing: the slots are the target's."""

    def _rows(self, tokens: list[int], lines: list[int], positions: list[int]) -> Tensor:
        line = torch.tensor(lines, device=self._runner.device)
        position = torch.tensor(positions, device=self._runner.device)
        slots = self._runner.req_to_token_pool.req_to_token[line, position].long()
        return self._forward(decode_rows(self._batch, tokens, line, positions, slots))

    def run(self, batch: Any) -> None:
        """Run the host's batch for nothing but the time it takes, which is not counted."""
        self._forward(batch)
        self.seconds = 0.0

    def _forward(self, batch: Any) -> Tensor:
        batch = dataclasses.replace(
            batch, spec_info=None, return_logprob=False, capture_hidden_mode=CaptureHiddenMode.NULL
        )
        started = time.perf_counter()
        forward = ForwardBatch.init_new(batch, self._runner)
        output = self._runner.forward(forward).logits_output
        self.seconds += time.perf_counter() - started
        logits: Tensor = output.next_token_logits
        return logits
