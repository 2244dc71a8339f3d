"""The rows of each request in a pass: what they read and write, for the KV sanitizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.core import Ints
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.device import owners_and_places


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one request in a pass.

    line: the request's row in the table of slots
    tokens, positions, slots: [n]
    parents: [n] the row whose token each row's follows, among these; -1 for the first
    """

    line: int
    tokens: Ints
    positions: Ints
    slots: Ints
    parents: Ints


def ints(values: Any) -> Ints:
    """Return these values on the CPU."""
    found: Ints = np.asarray(values.cpu() if hasattr(values, "cpu") else values, np.int64)
    return found


def rows_of(batch: Any, version: SglangVersion) -> Iterator[Rows]:
    """Return the rows of each request in a pass over SGLang's batch."""
    mode, lines = batch.forward_mode, ints(batch.req_pool_indices)
    parents: Sequence[int] | None = None
    if mode.is_idle():
        return iter(())
    if mode.is_decode():
        positions, owners = ints(batch.seq_lens) - 1, lines
        starts = np.flatnonzero(np.append(True, lines[1:] != lines[:-1]))
        counts = np.diff(np.append(starts, len(lines)))
        parents = getattr(batch.spec_info, "parents", None)  # where drafts branch: see `TreeRows`
    else:
        if mode.is_target_verify():
            counts, prefixes = np.full(len(lines), batch.spec_info.draft_token_num), batch.seq_lens
        else:
            prefixes, counts = version.prefill_lens(batch)
        counts = ints(counts)
        requests, places = owners_and_places(counts)
        owners, positions = lines[requests], ints(prefixes)[requests] + places
    tokens, slots = ints(batch.input_ids), ints(batch.out_cache_loc)
    return split_rows(owners, tokens, positions, slots, counts, parents)


def split_rows(
    lines: Ints,
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    counts: Ints,
    parents: Sequence[int] | None = None,
    start: int = 0,
) -> Iterator[Rows]:
    """Return the rows of each request of a pass.

    Rows whose slot is padding, or that are parked before `start`, are discarded by the caller.

    lines, tokens, positions, slots: [N] of the rows
    counts: rows of each request, which stand beside each other
    parents: [N] the row whose token each row's follows; None for chains
    start: the first position that has a row
    """
    first = 0
    for count in counts.tolist():
        part = slice(first, first + count)
        kept = (slots[part] > 0) & (positions[part] >= start)
        before = np.arange(int(kept.sum())) - 1
        if parents is not None and kept.all():
            before = np.maximum(np.array(parents[part]) - first, -1)
        if len(before):
            own = tokens[part][kept], positions[part][kept], slots[part][kept]
            yield Rows(int(lines[first]), *own, before)
        first += count
