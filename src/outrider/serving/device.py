"""Drafts that never leave the device: a step with drafts is launched before the last is known.

The device has the text of each request, and its length. A step looks the last tokens up in the text
(`ngram_match`) or lets a head draft (`HeadSteps`), lays out its rows at the lengths that it finds,
and moves the lengths on by what was accepted. So no launch waits for the CPU to read anything. The
CPU fetches drafts and tokens together, when it would have fetched the tokens of a plain step.

The price: the number of drafts is chosen before it is known whether they are good, and the CPU
knows only how long a text is at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core import Ints, Proposal, Request
from outrider.kernels.ngram_match import ngram_match

MAX_TEXT_BYTES = 1 << 27
"""Memory for texts on the device. Batches that it cannot hold are drafted for by the CPU."""


def to_device(array: NDArray[Any], device: Any) -> Tensor:
    """Copy an array to the device, without waiting for it."""
    on_cpu = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        on_cpu = on_cpu.pin_memory()  # the CPU may go on while it is copied
    return on_cpu.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Layout:
    """Which rows a step has, if each request has so many drafts.

    shape: a proposal of this shape; its tokens mean nothing
    owner, place: [N] the request of each row, and its place among that request's rows
    """

    shape: Proposal
    owner: Tensor
    place: Tensor

    @staticmethod
    def of(num_drafts: Ints, device: Any) -> Layout:
        """Return the layout for so many drafts of each request."""
        _, places = owners_and_places(num_drafts)
        shape = Proposal.unclaimed(np.zeros_like(places), num_drafts, places - 1)
        owner, place = to_device(np.stack(owners_and_places(num_drafts + 1)), device)
        return Layout(shape, owner, place)


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """The rows of a step with drafts that only the device knows yet.

    layout: which rows there are
    lens, lines: see `TextEnds`
    drafts: [B, K] the first of them have rows
    tokens, index, seq_lens, slots: [N] each row's token, its request's row in the table of slots,
        its length with the row, and its slot
    longest: [N] the largest that `seq_lens` may be, on the CPU
    """

    layout: Layout
    lens: Tensor
    lines: Tensor
    drafts: Tensor
    tokens: Tensor
    index: Tensor
    seq_lens: Tensor
    slots: Tensor
    longest: Ints


class Layouts:
    """The layouts of this step and of the one before it: mostly they are the same."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._kept: dict[bytes, Layout] = {}

    def of(self, num_drafts: Ints) -> Layout:
        """Return the layout for so many drafts of each request."""
        key = num_drafts.tobytes()
        if key not in self._kept:
            if len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = Layout.of(num_drafts, self._device)
        return self._kept[key]


@dataclass(frozen=True, eq=False)
class TextEnds:
    """Where the texts of a batch end on the device, which drafts from there.

    requests, num_drafts: [B] and how many drafts each has; one of them at least 1
    texts: [lines, L]
    lines, lens: [B] where each request's text is, and how much of it is cached
    longest: [B] the largest that `lens` may be, on the CPU
    index: [B] the requests' rows in the engine's table
    layout: of the rows of these drafts
    layouts: of recent steps
    """

    requests: Sequence[Any]
    num_drafts: Ints
    texts: Tensor
    lines: Tensor
    lens: Tensor
    longest: Ints
    index: Tensor
    layout: Layout
    layouts: Layouts

    @property
    def most(self) -> int:
        """The most drafts of a request: so many are made for each."""
        return int(self.num_drafts.max())


class DeviceTexts:
    """The texts of requests on the device, and the rows of steps that draft from them.

    table: the engine's table of slots, as wide as a text can be long. Texts that come within
        max_drafts + 2 of this width have drafts of the CPU
    min_n, max_n: the shortest and longest n-gram to look up, in tokens
    """

    def __init__(self, table: Tensor, min_n: int, max_n: int) -> None:
        self._table, self._min_n, self._max_n = table, min_n, max_n
        self.width = int(table.shape[1])
        self.max_requests = min(len(table), MAX_TEXT_BYTES // (4 * self.width))
        self._tokens: Tensor | None = None  # not before something drafts from it
        self._owners: list[int] = [-1] * self.max_requests  # the request that each line is of
        self._lines: dict[int, int] = {}  # the same by request
        self._written: dict[int, int] = {}  # how many tokens of its text the device has
        self._lines_on_device: tuple[Sequence[Request], Tensor] | None = None
        self._layouts = Layouts(table.device)

    def write(self, requests: Sequence[Request]) -> None:
        """Give the device what it lacks of the texts of a batch."""
        if self._tokens is None:
            shape = self.max_requests, self.width
            self._tokens = torch.zeros(shape, dtype=torch.int32, device=self._table.device)
        self._assign_lines(requests)
        starts = np.array([self._written[request.id] for request in requests])
        missing = [_tokens_from(r, n) for r, n in zip(requests, starts.tolist(), strict=True)]
        owners, places = owners_and_places(np.array([len(tokens) for tokens in missing]))
        packed = np.empty((3, len(owners)), np.int64)
        packed[0] = np.concatenate(missing)
        packed[1] = np.array([self._lines[request.id] for request in requests])[owners]
        packed[2] = starts[owners] + places
        tokens, line, place = to_device(packed, self._table.device)
        self._tokens[line, place] = tokens.int()
        self.note_written(requests)

    def note_written(self, requests: Sequence[Request]) -> None:
        """Note that the device has all that these requests have emitted."""
        for request in requests:
            if request.id in self._lines:
                self._written[request.id] = request.length

    def _assign_lines(self, requests: Sequence[Request]) -> None:
        """Give each request of a batch a line. Others lose theirs if there are not enough."""
        present = {request.id for request in requests}
        new = [request for request in requests if request.id not in self._lines]
        free = (line for line, owner in enumerate(self._owners) if owner not in present)
        for request, line in zip(new, free, strict=False):
            self._lines.pop(self._owners[line], None)
            self._written.pop(self._owners[line], None)
            self._lines[request.id], self._written[request.id] = line, 0
            self._owners[line] = request.id
        self._lines_on_device = None

    def ends(
        self,
        requests: Sequence[Request],
        num_drafts: Ints,
        index: Tensor,
        lens: Tensor,
        longest: Ints,
    ) -> TextEnds:
        """Return where these requests' texts end. The device has the texts."""
        assert self._tokens is not None
        lines, texts = self._lines_of(requests), self._tokens[:, : int(longest.max()) + 1]
        where = texts, lines, lens, longest, index
        return TextEnds(requests, num_drafts, *where, self._layouts.of(num_drafts), self._layouts)

    def look_up(self, ends: TextEnds) -> Tensor:
        """Return drafts that are looked up in the texts, [B, K]."""
        return look_up(ends.texts, ends.lines, ends.lens, ends.most, self._min_n, self._max_n)

    def rows(self, ends: TextEnds, drafts: Tensor) -> DeviceRows:
        """Return the rows of a step with these drafts, [B, K]."""
        layout, lines, lens = ends.layout, ends.lines, ends.lens
        where = ends.texts, lines, lens, ends.index, self._table
        laid_out = draft_rows(*where, layout.owner, layout.place, drafts)
        deepest = ends.longest[layout.shape.row_owners] + layout.shape.row_depths + 1
        return DeviceRows(layout, lens, lines, drafts, *laid_out, deepest)

    def advance(self, rows: DeviceRows, emitted: Tensor) -> tuple[Tensor, Tensor]:
        """Write what a step emitted to the texts. emitted: [N] after each of its rows

        Returns how many tokens of each request are cached then, [B], and what the CPU fetches,
        [N + B * K]: what follows each row, and the drafts.
        """
        assert self._tokens is not None
        layout = rows.layout
        return accept(
            emitted, rows.drafts, rows.lens, self._tokens, rows.lines, layout.owner, layout.place
        )

    def _lines_of(self, requests: Sequence[Request]) -> Tensor:
        if self._lines_on_device is None or self._lines_on_device[0] is not requests:
            lines = np.array([self._lines[request.id] for request in requests])
            self._lines_on_device = requests, to_device(lines, self._table.device)
        return self._lines_on_device[1]


def owners_and_places(counts: Ints) -> tuple[Ints, Ints]:
    """Return the owner of each item, given each request's number of items, and its place."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - (counts.cumsum() - counts)[owners]


def _tokens_from(request: Request, start: int) -> Ints:
    """Return the tokens of a text from a position on: of a long prompt, without a list of it."""
    if start >= len(request.prompt):
        return np.array(request.tokens_from(start), np.int64)
    parts = np.array(request.prompt, np.int64)[start:], np.array(request.output, np.int64)
    return np.concatenate(parts)


def look_up(
    texts: Tensor, lines: Tensor, lens: Tensor, most: int, min_n: int, max_n: int
) -> Tensor:
    """Return what followed the last tokens of each text when they last stood in it, [B, most].

    texts: [lines, L]
    lines, lens: [B] where each request's text is, and how much of it is cached
    """
    limits = torch.full_like(lens, most)
    return ngram_match(texts[lines], lens + 1, limits, most, min_n, max_n)[0].long()


def draft_rows(
    texts: Tensor,
    lines: Tensor,
    lens: Tensor,
    index: Tensor,
    table: Tensor,
    owner: Tensor,
    place: Tensor,
    drafts: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay rows out where the texts end.

    texts, lines, lens: see `look_up`
    index: [B] the requests' rows in the table
    table: of slots, by row and position
    owner, place: [N] of the rows
    drafts: [B, most]
    -> of the rows [N]: tokens, rows of the table, lengths, slots
    """
    tokens = torch.cat([texts[lines, lens.long()][:, None].long(), drafts], 1)
    position, pool_index = lens[owner] + place, index[owner]
    slots = table[pool_index, position].long()
    return tokens[owner, place], pool_index, (position + 1).to(lens.dtype), slots


def accept(
    emitted: Tensor,
    drafts: Tensor,
    lens: Tensor,
    texts: Tensor,
    lines: Tensor,
    owner: Tensor,
    place: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write what a step emitted behind the texts. Return the new lengths and what the CPU fetches.

    A row of a request that has no further row emits its last token: it accepts nothing.

    emitted: [N] after each row
    """
    size, most = drafts.shape
    found = emitted.new_full((size, most + 1), -1)
    found[owner, place] = emitted
    is_draft = found[:, 1:] >= 0  # whether it has a row, and so something follows it
    accepted = ((found[:, :most] == drafts) & is_draft).long().cumprod(1).sum(1)
    places = lens[:, None] + 1 + torch.arange(most + 1, device=emitted.device)
    # what was not accepted lies behind the end, and the next step writes over it
    texts[lines[:, None], places] = found.to(texts.dtype)
    return (lens + accepted + 1).to(lens.dtype), torch.cat([emitted, drafts.flatten()])


def unpack(fetched: Tensor, num_drafts: Ints, members: Ints | None) -> tuple[Tensor, Proposal]:
    """Return what a step emitted after each row, and its drafts.

    fetched: as `advance` returns it, on the CPU
    num_drafts: [B] of each request
    members: which requests are asked about; None for all
    """
    rows = len(num_drafts) + int(num_drafts.sum())
    emitted, drafts = fetched[:rows], fetched[rows:].view(len(num_drafts), -1)
    if members is not None:
        chosen = np.zeros(len(num_drafts), np.bool_)
        chosen[members] = True
        emitted = emitted[torch.from_numpy(np.repeat(chosen, num_drafts + 1))]
        drafts, num_drafts = drafts[torch.from_numpy(members)], num_drafts[members]
    owners, places = owners_and_places(num_drafts)
    tokens, sure = drafts.numpy()[owners, places], np.ones(len(places))
    return emitted, Proposal.found(tokens, num_drafts, places - 1, sure, trees=False)
