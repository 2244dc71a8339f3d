"""How many KV slots each request of a batch holds before a decode step.

A step is launched before the scheduler knows what the last one emitted. So a request holds the
slots of two steps: 2 (K + 1) behind the tokens that the scheduler knows to be cached. A pool that
has fewer free slots still serves all that plain decoding serves: each request then holds what its
next token needs, the other free slots are shared equally, and a step has no more drafts than slots.

No row may write into a slot that its request does not hold. A step that is launched early may have
rows behind the end of a text. In such a pool their entries in the table are slot 0, which SGLang
uses for padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.core import Ints
from outrider.hosts.sglang.host import host
from outrider.hosts.sglang.rows import to_device, write_slots

MostCached = Callable[[Sequence[Any]], Ints]
"""Returns how many tokens of each of SGLang's requests may be cached after the steps in flight."""


@dataclass(frozen=True, eq=False)
class Holdings:
    """What requests hold, and what they would hold. All lengths end at whole pages.

    held: [B] now
    full: [B] with room for two steps of K drafts
    """

    held: Ints
    full: Ints

    @staticmethod
    def of(reqs: Sequence[Any], page_size: int, width: int) -> Holdings:
        """Return the holdings of these requests. width: columns of the table of slots"""
        caches = [host().cache_of(req) for req in reqs]
        held = np.array([cache.kv_allocated_len for cache in caches])
        known = np.array([cache.kv_committed_len for cache in caches])
        # near the end of the context the request's row of the table is full
        full = np.minimum(whole_pages(known + 2 * host().slots_per_step(), page_size), width)
        return Holdings(held, np.maximum(full, held))


def whole_pages(lengths: Ints, page_size: int) -> Ints:
    """Return these lengths, rounded up to whole pages."""
    pages: Ints = -(-lengths // page_size)
    return pages * page_size


def num_slots(held: Ints, wanted: Ints, page_size: int) -> int:
    """Return how many more slots of whole pages are wanted than held; below 0 if fewer are."""
    return int((whole_pages(wanted, page_size) - whole_pages(held, page_size)).sum())


class Reserve:
    """Gives requests their slots before each decode step."""

    def __init__(self, most_cached: MostCached) -> None:
        self._most_cached = most_cached

    def required(self, batch: Any, reqs: Sequence[Any]) -> int:
        """Return how many free slots the next step of these requests takes, at least.

        As many as any step may write. A pool that has fewer: as many as plain decoding takes.
        """
        size, width = _shape(batch)
        holdings = Holdings.of(reqs, size, width)
        wanted = num_slots(holdings.held, holdings.full, size)
        if wanted <= _free(batch):
            return wanted
        return max(0, num_slots(holdings.held, self._least(reqs, size, width), size))

    def take(self, batch: Any) -> Ints | None:
        """Give each request of a batch its slots.

        Returns for how many tokens each has slots, [B]; None if each has room for any step.
        """
        size, width = _shape(batch)
        holdings = Holdings.of(batch.reqs, size, width)
        held, wanted = holdings.held, holdings.full
        is_tight = num_slots(held, wanted, size) > _free(batch)
        if is_tight:
            least = self._least(batch.reqs, size, width)
            most = np.maximum(least, np.minimum(wanted, _ends(batch.reqs, size, width)))
            spare = _free(batch) - num_slots(held, least, size)
            wanted = least + _shares(most - least, spare, size)
        for req, length in zip(batch.reqs, wanted.tolist(), strict=True):
            host().cache_of(req).kv_allocated_len = length
        if is_tight:
            _give_back(batch, wanted, held)
        if (wanted > held).any():
            write_slots(batch, held, np.maximum(held, wanted))
        if is_tight:
            _park(batch, wanted, width)
        return wanted if is_tight else None

    def _least(self, reqs: Sequence[Any], page_size: int, width: int) -> Ints:
        """Return what requests must hold for one more token each: a slot for the last one."""
        needed = whole_pages(self._most_cached(reqs) + 1, page_size)
        return np.minimum(needed, _ends(reqs, page_size, width))


def _shape(batch: Any) -> tuple[int, int]:
    """Return the size of a page and the columns of the table of slots."""
    table = batch.req_to_token_pool.req_to_token
    return batch.token_to_kv_pool_allocator.page_size, table.shape[1]


def _free(batch: Any) -> int:
    """Return how many slots can be had, with those that only the prefix cache holds."""
    cached = int(batch.tree_cache.evictable_size())
    return int(batch.token_to_kv_pool_allocator.available_size()) + cached


def _ends(reqs: Sequence[Any], page_size: int, width: int) -> Ints:
    """Return how long the requests' texts may become, in whole pages.

    SGLang emits a token for a request that asks for none, as it does to cache a prompt.
    """
    texts = [len(r.origin_input_ids) + max(1, r.sampling_params.max_new_tokens) for r in reqs]
    return np.minimum(whole_pages(np.array(texts), page_size), width)


def _shares(wanted: Ints, spare: int, page_size: int) -> Ints:
    """Return how much of what is wanted each gets: all get the same, in whole pages."""
    each = max(0, spare) // max(1, len(wanted)) // page_size * page_size
    return np.minimum(wanted, each)


def _give_back(batch: Any, wanted: Ints, held: Ints) -> None:
    """Free the slots that requests hold behind what they should hold."""
    index, position = _cells(batch, wanted, np.maximum(held, wanted))
    if len(index):
        slots = batch.req_to_token_pool.req_to_token[index, position]
        batch.token_to_kv_pool_allocator.free(slots.long())


def _park(batch: Any, held: Ints, width: int) -> None:
    """Let the table name slot 0 for all positions behind what requests hold that a row may have."""
    behind = np.minimum(held + 2 * host().slots_per_step(), width)
    index, position = _cells(batch, held, behind)
    zeros = index.new_zeros(len(index)).int()
    batch.req_to_token_pool.write((index, position), zeros)


def _cells(batch: Any, starts: Ints, ends: Ints) -> tuple[Any, Any]:
    """Return the table's rows and columns of the requests' positions from `starts` to `ends`."""
    counts = ends - starts
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(owners)) - (counts.cumsum() - counts)[owners] + starts[owners]
    owner, position = to_device(np.stack([owners, positions]), batch.device)
    return batch.req_pool_indices[owner], position
