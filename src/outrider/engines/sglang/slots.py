"""How many KV slots each request of a batch holds before a decode step.

A step is launched before the scheduler knows what the last one emitted. So a request holds the
slots of two steps: 2 (K + 1) behind the tokens that the scheduler knows to be cached, and up to
SLOTS_AHEAD more while the pool has many. A pool that has fewer free slots still serves all that
plain decoding serves: each request then holds what its next token needs, the other free slots are
shared equally, and a step has no more drafts than slots.

No row may write into a slot that its request does not hold. A step that is launched early may have
rows behind the end of a text. In such a pool their entries in the table are slot 0, which SGLang
uses for padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from outrider.core import Ints
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.device import owners_and_places, to_device

SLOTS_AHEAD = 32
"""Further slots that a request is given whenever one lacks some, so that not every step has to
allocate. Only if they are at most one in MIN_POOL_SHARE of the free ones."""

MIN_POOL_SHARE = 8

MostCached = Callable[[Sequence[Any]], Ints]
"""Returns how many tokens of each of SGLang's requests may be cached after the steps in flight."""


def whole_pages(lengths: Ints, page_size: int) -> Ints:
    """Return these lengths, rounded up to whole pages."""
    pages: Ints = -(-lengths // page_size)
    return pages * page_size


def num_slots(held: Ints, wanted: Ints, page_size: int) -> int:
    """Return how many more slots of whole pages are wanted than held; below 0 if fewer are."""
    return int((whole_pages(wanted, page_size) - whole_pages(held, page_size)).sum())


class Slots:
    """Gives requests their slots before each decode step."""

    def __init__(self, version: SglangVersion, most_cached: MostCached) -> None:
        self._version, self._most_cached = version, most_cached
        self._step = 0  # slots that a step may need, as SGLang says when it is first asked

    def required(self, batch: Any, reqs: Sequence[Any]) -> int:
        """Return how many free slots the next step of these requests takes, at least.

        As many as any step may write. A pool that has fewer: as many as plain decoding takes.
        """
        size, width = _shape(batch)
        held, full = self._holdings(reqs, size, width)
        wanted = num_slots(held, full, size)
        if wanted <= _free(batch):
            return wanted
        return max(0, num_slots(held, self._least(reqs, size, width), size))

    def take(self, batch: Any) -> Ints | None:
        """Give each request of a batch its slots.

        Returns for how many tokens each has slots, [B]; None if each has room for any step.
        """
        size, width = _shape(batch)
        held, wanted = self._holdings(batch.reqs, size, width)
        if (wanted <= held).all():
            return None
        free = _free(batch)
        more = np.minimum(wanted + whole_pages(np.array(SLOTS_AHEAD), size), width)
        if num_slots(held, more, size) * MIN_POOL_SHARE <= free:
            wanted = np.maximum(more, held)
        is_tight = num_slots(held, wanted, size) > free
        if is_tight:
            least = self._least(batch.reqs, size, width)
            most = np.maximum(least, np.minimum(wanted, _ends(batch.reqs, size, width)))
            spare = free - num_slots(held, least, size)
            wanted = least + _shares(most - least, spare, size)
        for req, length in zip(batch.reqs, wanted.tolist(), strict=True):
            self._version.kv(req).kv_allocated_len = length
        if is_tight:
            _give_back(batch, wanted, held)
        if (wanted > held).any():
            self._write(batch, held, np.maximum(held, wanted))
        if is_tight:
            behind = wanted + 2 * self._step
            _park(batch, wanted, np.minimum(behind, width))
        return wanted if is_tight else None

    def _holdings(self, reqs: Sequence[Any], page_size: int, width: int) -> tuple[Ints, Ints]:
        """Return what requests hold, and what they would hold with room for two steps of K drafts.

        Both end at whole pages. width: columns of the table of slots
        """
        caches = [self._version.kv(req) for req in reqs]
        held = np.array([cache.kv_allocated_len for cache in caches])
        known = np.array([cache.kv_committed_len for cache in caches])
        # near the end of the context the request's row of the table is full
        self._step = self._step or self._version.slots_per_step()
        needed = whole_pages(known + 2 * self._step, page_size)
        return held, np.maximum(np.minimum(needed, width), held)

    def _least(self, reqs: Sequence[Any], page_size: int, width: int) -> Ints:
        """Return what requests must hold for one more token each: a slot for the last one."""
        needed = whole_pages(self._most_cached(reqs) + 1, page_size)
        return np.minimum(needed, _ends(reqs, page_size, width))

    def _write(self, batch: Any, held: Ints, wanted: Ints) -> None:
        """Write new slots for the positions from `held` up to `wanted` to SGLang's table, [B].

        A page holds positions of one request, in their order. The page that a request ends in is
        its own already, as far as it is not full: only what comes after it is allocated.
        """
        new, size = wanted - held, batch.token_to_kv_pool_allocator.page_size
        owners, places = owners_and_places(new)
        positions = places + held[owners]
        begun, pages = -(-held // size), -(-wanted // size) - -(-held // size)
        slots = self._version.alloc_slots(batch.tree_cache, int(pages.sum()) * size)
        packed = np.stack([owners, positions, positions])
        if size > 1:  # which page, among those that requests end in and the new ones behind them
            fresh = positions // size - begun[owners]
            first = len(new) + (pages.cumsum() - pages)[owners]
            packed[2] = np.where(fresh < 0, owners, first + fresh)
        owner, position, page = to_device(packed, batch.device)
        index, table = batch.req_pool_indices[owner], batch.req_to_token_pool
        if size > 1:
            last = to_device(held - 1, batch.device)
            ends = table.req_to_token[batch.req_pool_indices, last] // size
            slots = torch.cat([ends, slots[::size] // size])[page] * size + position % size
        table.write((index, position), slots.to(torch.int32))


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


def _park(batch: Any, starts: Ints, ends: Ints) -> None:
    """Let the table name slot 0 for the requests' positions from `starts` to `ends`."""
    index, position = _cells(batch, starts, ends)
    batch.req_to_token_pool.write((index, position), index.new_zeros(len(index)).int())


def _cells(batch: Any, starts: Ints, ends: Ints) -> tuple[Any, Any]:
    """Return the table's rows and columns of the requests' positions from `starts` to `ends`."""
    owners, places = owners_and_places(ends - starts)
    owner, position = to_device(np.stack([owners, places + starts[owners]]), batch.device)
    return batch.req_pool_indices[owner], position
