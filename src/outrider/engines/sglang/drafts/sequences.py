"""What is known of requests that are drafted for in the target's slots.

A draft model and a head keep what they compute for a token in the slot that the target has for it,
in buffers of their own. So they share the host's table, and what the radix cache keeps of the
target, it keeps of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from outrider.core import Ints, Request
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.device import owners_and_places


@dataclass
class DraftSequence:
    """One request's sequence: its index in `req_to_token`, and how much is cached."""

    req_pool_idx: int
    length: int

    def append(self, count: int) -> None:
        """Note that so many more tokens were read."""
        self.length += count

    def reset(self, length: int) -> None:
        """Note that so many tokens are read, and what they are read from is the target's."""
        self.length = length


class SlotSequences:
    """How much of each request was read.

    It stays known as long as the host knows the request, also when the drafter has to forget it
    (after a fault). The slots of a request change only with its prefill, which passes here too,
    read or skipped.
    """

    def __init__(self, version: SglangVersion) -> None:
        self._version = version
        self._sequences: WeakKeyDictionary[Any, DraftSequence] = WeakKeyDictionary()

    def skip(self, batch: Any) -> None:
        """Note that a prefill batch of the host's was not read."""
        self.note_prefill(batch, is_read=False)

    def note_prefill(self, batch: Any, is_read: bool) -> None:
        """Note how much of each request is cached after its prefill, or a chunk of it.

        The prefix is what the radix cache has, or the chunks before. Where those were skipped the
        cache has a gap, and all from there on is to be read again.
        """
        prefixes, counts = self._version.prefill_lens(batch)
        for req, prefix, extended in zip(batch.reqs, prefixes, counts, strict=True):
            before = self._sequences.get(req)
            known = prefix if before is None else min(prefix, before.length)
            length = known + extended if is_read and known == prefix else known
            self._sequences[req] = DraftSequence(self._version.kv(req).req_pool_idx, length)

    def open(self, request: Request) -> DraftSequence:
        """Return the request's sequence, with what is cached already."""
        req = request.req  # type: ignore[attr-defined]  # the worker's requests carry it
        sequence = self._sequences.get(req)
        pool_index = self._version.kv(req).req_pool_idx
        if sequence is None or sequence.req_pool_idx != pool_index:
            sequence = self._sequences[req] = DraftSequence(pool_index, 0)
        return sequence

    def truncate(self, sequence: DraftSequence, length: int) -> None:
        """Forget the tokens beyond this length."""
        sequence.reset(min(sequence.length, length))

    def close(self, sequence: DraftSequence) -> None:
        """Do nothing: the slots are the target's, and what is in them stays known."""

    def num_read(self, request: Request) -> int:
        """Return how many tokens of a request were read."""
        return self.open(request).length

    def note_read(self, request: Request) -> None:
        """Note that all of a request was read."""
        self.open(request).reset(request.length)


def segment_rows(
    segments: Sequence[tuple[DraftSequence, Sequence[int]]], first: int = 0
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the rows of tokens that sequences read: tokens, lines of the table and positions.

    Also returns how many rows each sequence has. first: the first position that has a row
    """
    tokens, lines, positions, counts = list[int](), list[int](), list[int](), list[int]()
    for sequence, new in segments:
        start = max(first, sequence.length)
        own = new[start - sequence.length :]
        tokens += own
        lines += [sequence.req_pool_idx] * len(own)
        positions += range(start, start + len(own))
        counts.append(len(own))
    return tokens, lines, positions, counts


def extended_rows(batch: Any, version: SglangVersion) -> tuple[Ints, Ints]:
    """Return which request each row of SGLang's prefill batch belongs to, and its position."""
    prefixes, counts = version.prefill_lens(batch)
    owners, places = owners_and_places(np.asarray(counts))
    return owners, places + np.asarray(prefixes)[owners]
