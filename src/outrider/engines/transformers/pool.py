"""The paged cache: keys and values of all requests in one pool of slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 16
"""Slots are handed out in pages of this many."""


class CachedSequence:
    """One sequence's place in the pool.

    length: the tokens whose keys and values are kept
    slots: [capacity] the slot of each position
    """

    def __init__(self) -> None:
        self.length = 0
        self.pages: list[int] = []
        self.slots = torch.zeros(0, dtype=torch.int64)


class KVPool:
    """Pages of cache slots. It grows when it is full: a request is never lost for want of one.

    Page 0 is never handed out: its zeros stand where a tile has no key.
    """

    def __init__(self, num_pages: int = 64) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def used_pages(self) -> int:
        """How many pages are handed out."""
        return self._num_pages - 1 - len(self._free)

    def reserve(self, sequence: CachedSequence, length: int) -> None:
        """Give the sequence slots for so many tokens."""
        missing = -(-(length - len(sequence.slots)) // PAGE)
        if missing <= 0:
            return
        if missing > len(self._free):
            self._grow(max(missing, self._num_pages))
        pages = [self._free.pop() for _ in range(missing)]
        sequence.pages += pages
        starts = torch.tensor(pages)[:, None] * PAGE
        sequence.slots = torch.cat([sequence.slots, (starts + torch.arange(PAGE)).flatten()])

    def release(self, sequence: CachedSequence) -> None:
        """Take all of the sequence's pages back."""
        self._free += sequence.pages
        sequence.pages, sequence.length = [], 0
        sequence.slots = sequence.slots[:0]

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """Return a branch of a sequence: what the sequence has is shared, what follows is its own.

        The sequence must stay, or be extended by `adopt`, as long as the branch is used.
        """
        branch = CachedSequence()
        branch.length, branch.slots = sequence.length, sequence.slots[: sequence.length].clone()
        return branch

    @torch.inference_mode()
    def adopt(
        self,
        sequence: CachedSequence,
        branch: CachedSequence,
        others: Sequence[CachedSequence] = (),
    ) -> None:
        """Go on as a branch did: what it has beyond the sequence is copied.

        others: branches of that branch; they share the copy from now on
        """
        start, end = sequence.length, branch.length
        self.reserve(sequence, end)
        self._copy(branch.slots[start:end], sequence.slots[start:end])
        sequence.length = end
        for other in others:
            other.slots[start:end] = sequence.slots[start:end]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v, [N, Hkv, D], in these slots. Return the layer's whole cache."""
        if layer not in self._layers:
            size = self._num_pages * PAGE
            self._layers[layer] = (
                k.new_zeros((size, *k.shape[1:])),
                v.new_zeros((size, *v.shape[1:])),
            )
        k_cache, v_cache = self._layers[layer]
        k_cache[slots], v_cache[slots] = k, v
        return k_cache, v_cache

    @torch.inference_mode()
    def keep(self, sequence: CachedSequence, rows: Sequence[int]) -> None:
        """Keep, of the rows written beyond the sequence's length, these, in this order."""
        if list(rows) != list(range(len(rows))):
            start = sequence.length
            source = sequence.slots[[start + row for row in rows]]
            self._copy(source, sequence.slots[start : start + len(rows)])
        sequence.length += len(rows)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        for k_cache, v_cache in self._layers.values():
            k_cache[target], v_cache[target] = k_cache[source], v_cache[source]

    def _grow(self, pages: int) -> None:
        self._free = list(range(self._num_pages + pages - 1, self._num_pages - 1, -1)) + self._free
        self._num_pages += pages
        self._layers = {
            layer: (_longer(k, pages * PAGE), _longer(v, pages * PAGE))
            for layer, (k, v) in self._layers.items()
        }


def _longer(cache: Tensor, slots: int) -> Tensor:
    return torch.cat([cache, cache.new_zeros((slots, *cache.shape[1:]))])
