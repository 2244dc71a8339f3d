"""Which text each KV slot holds: a hash of the tokens up to the slot's own, set when it is written.

What a model keeps of a token depends on all tokens before it and on their positions. So the content
of a slot is named by the hash of a text: slots with one name have equal content. If a slot's name
is not that of the text for which it is read, the answer is wrong, whatever wrote it.

Plain NumPy, no engine: `sanitizer` says what SGLang's passes write and read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core import Ints

Hashes = NDArray[np.uint64]

NONE: Ints = np.empty(0, np.int64)

FREE, UNWRITTEN = np.uint64(0), np.uint64(1)
"""Names of slots that hold no text: free, and taken but not written yet."""


def terms(tokens: Any, positions: Any) -> Hashes:
    """Return what each token at its position adds to the hash of a text (splitmix64's mixer)."""
    x = np.asarray(tokens, np.int64).astype(np.uint64) << np.uint64(32)
    x = (x ^ np.asarray(positions, np.int64).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed


def text_hashes(
    tokens: Sequence[int] | Ints, start: int = 0, before: int | np.uint64 = 0
) -> Hashes:
    """Return the hash of a text up to each of these tokens.

    start: the position of the first of them
    before: the hash of the text before it; of an empty text, what else the content depends on
    """
    if not len(tokens):
        return np.empty(0, np.uint64)
    added = terms(tokens, np.arange(start, start + len(tokens)))
    hashes: Hashes = np.cumsum(added, dtype=np.uint64) + np.uint64(before)
    return hashes


class Violation(BaseException):
    """A slot is not what its reader takes it for. No fault of drafting: nothing may catch it."""


@dataclass(frozen=True)
class Write:
    """Who wrote a slot: the request, the position of the token, and the number of the pass."""

    request: str = ""
    position: int = -1
    at: int = -1

    def __str__(self) -> str:
        if self.at < 0:
            return "never written"
        return f"written by request {self.request} at position {self.position} in pass {self.at}"


NEVER = Write()


class Shadow:
    """Names the content of the slots of one cache.

    what: the cache, as a violation calls it
    num_read: how many slots were read and checked
    """

    def __init__(self, what: str, num_slots: int, page_size: int = 1) -> None:
        self.what, self._page_size = what, page_size
        self._names = np.full(num_slots, FREE)
        self._writes: list[Write] = [NEVER] * num_slots
        self.num_read = 0

    def begin(self, is_taken: NDArray[np.bool_]) -> None:
        """Begin with slots of which some are taken already, [num_slots]."""
        self._names[:] = np.where(is_taken, UNWRITTEN, FREE)

    def is_taken(self) -> NDArray[np.bool_]:
        """Return which slots are taken, [num_slots]."""
        taken: NDArray[np.bool_] = self._names != FREE
        return taken

    def names(self, slots: Ints) -> Hashes:
        """Return what these slots hold."""
        return self._names[slots]

    def write(self, slots: Ints, names: Hashes, writes: Sequence[Write]) -> None:
        """Note that these slots were written. Each must have been taken."""
        if (is_free := self._names[slots] == FREE).any():
            place = int(is_free.argmax())
            raise Violation(
                f"{self.what}: request {writes[place].request} writes position "
                f"{writes[place].position} to slot {slots[place]}, which is free"
            )
        self._names[slots] = names
        for slot, write in zip(slots.tolist(), writes, strict=True):
            self._writes[slot] = write

    def read(
        self,
        slots: Ints,
        names: Hashes,
        reader: str,
        start: int = 0,
        is_fine: Callable[[int], bool] | None = None,
    ) -> None:
        """Check that these slots hold the texts of these names.

        reader: the request that reads them, as a violation calls it
        start: the position of the first
        is_fine: says whether a slot may hold something else
        """
        self.num_read += len(slots)
        is_wrong = self._names[slots] != names
        if is_fine is not None:
            for place in np.flatnonzero(is_wrong).tolist():
                is_wrong[place] = not is_fine(int(slots[place]))
        self._refuse(slots, is_wrong, reader, start)

    def is_written(self, slot: int) -> bool:
        """Say whether a slot was written since it was taken."""
        return bool(self._names[slot] > UNWRITTEN)

    def is_written_by(self, slot: int, request: str) -> bool:
        """Say whether this request wrote this slot last."""
        return self._writes[slot].request == request

    def read_own(self, slots: Ints, request: str, reader: str, start: int) -> None:
        """Check that each of these slots was written by a request itself, at its position.

        start: the position of the first
        """
        writes = [self._writes[slot] for slot in slots.tolist()]
        is_own = [
            (write.request, write.position) == (request, position)
            for position, write in enumerate(writes, start)
        ]
        is_wrong = ~np.array(is_own, np.bool_) | (self._names[slots] <= UNWRITTEN)
        self._refuse(slots, is_wrong, reader, start)

    def _refuse(self, slots: Ints, is_wrong: NDArray[np.bool_], reader: str, start: int) -> None:
        if is_wrong.any():
            place = int(is_wrong.argmax())
            slot = int(slots[place])
            raise Violation(
                f"{self.what}: {reader} reads position {start + place} in slot {slot}, which "
                f"{self._holds(slot)} ({int(is_wrong.sum())} of {len(slots)} slots are wrong)"
            )

    def take(self, slots: Ints, tails: Ints = NONE) -> None:
        """Note that slots were given out, with their whole pages. Each must have been free.

        tails: the slots behind the ends of texts, in their last pages: they may be given again
        """
        is_fresh = ~np.isin(slots, tails)
        whole = self._whole_pages(slots[is_fresh])
        taken = whole[self._names[whole] != FREE]
        if len(taken) or len(np.unique(slots)) != len(slots):
            slot = int(taken[0]) if len(taken) else int(slots[0])
            raise Violation(f"{self.what}: slot {slot} is given out, and {self._holds(slot)}")
        self._names[whole] = self._names[slots] = UNWRITTEN

    def free(self, slots: Ints) -> None:
        """Note that slots were given back, with their whole pages. Each must have been taken."""
        pages = self._whole_pages(slots)
        is_taken = (self._names[pages] != FREE).any(1)
        if not is_taken.all():
            slot = int(pages[~is_taken][0, 0])
            raise Violation(f"{self.what}: slot {slot} is freed, and {self._holds(slot)}")
        self._names[pages] = FREE

    def _whole_pages(self, slots: Ints) -> Ints:
        """Return all slots of the pages of these slots, a row for each page."""
        size = self._page_size
        pages: Ints = np.unique(slots // size)[:, None] * size + np.arange(size)
        return pages

    def clear(self) -> None:
        """Note that all slots are free."""
        self._names[:] = FREE

    def _holds(self, slot: int) -> str:
        if self._names[slot] == FREE:
            return f"is free ({self._writes[slot]})"
        if self._names[slot] == UNWRITTEN:
            return f"was taken and not written since ({self._writes[slot]})"
        return f"holds another text: {self._writes[slot]}"
