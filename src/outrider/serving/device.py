"""Drafts that never leave the device: a step with drafts is launched before the last is known.

The device has the text of each request, and its length. A step looks the last tokens up in the text
(`ngram_match`) or lets a head draft (`HeadSteps`), lays out its rows at the lengths that it finds,
and moves the lengths on by what was accepted. So no launch waits for the CPU to read anything. The
CPU fetches drafts and tokens together, when it would have fetched the tokens of a plain step.
Drafts are made for every request, also where none is verified: the CPU compares them with what is
emitted.

The price: the number of drafts is chosen before it is known whether they are good, and the CPU
knows only how long a text is at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.control.decision import DeviceDrafts
from outrider.core import Ints, Proposal, Request
from outrider.kernels.ngram_match import ngram_match
from outrider.serving.profile import LOOKUP

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
    lens, lines, index: see `TextEnds`
    drafts: [B, K] the first of them have rows
    tokens, owner_index, seq_lens, slots: [N] each row's token, its request's row in the table of
        slots, its length with the row, and its slot
    longest: [N] the largest that `seq_lens` may be, on the CPU
    """

    layout: Layout
    lens: Tensor
    lines: Tensor
    index: Tensor
    drafts: Tensor
    tokens: Tensor
    owner_index: Tensor
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

    requests, num_drafts: [B] and how many drafts each has
    width: K, the drafts that are made for each
    texts: [lines, L]
    lines, lens: [B] where each request's text is, and how much of it is cached
    longest: [B] the largest that `lens` may be, on the CPU
    index: [B] the requests' rows in the engine's table
    layout: of the rows of these drafts
    layouts: of recent steps
    """

    requests: Sequence[Any]
    num_drafts: Ints
    width: int
    texts: Tensor
    lines: Tensor
    lens: Tensor
    longest: Ints
    index: Tensor
    layout: Layout
    layouts: Layouts


@dataclass(eq=False)
class Line:
    """Where the text of a request is.

    req: the engine's request
    number: of the line
    written: how many tokens of the text the device is known to have
    """

    req: Any
    number: int
    written: int


class DeviceTexts:
    """The texts of requests on the device, and the rows of steps that draft from them.

    A text is written when its prompt is prefilled. Every step that is launched early appends to it
    what it emits, so that the next step can draft without the CPU.

    table: the engine's table of slots, as wide as a text can be long. Texts that come within
        max_drafts + 2 of this width have drafts of the CPU
    lookup: options of `look_up`
    drafts: whether anything may draft. If not, there are only `last_tokens`
    last_tokens: by row of the table, the last token of each request: written and read by the
        device in the order of its steps
    """

    def __init__(
        self, table: Tensor, lookup: Mapping[str, int] = LOOKUP, drafts: bool = True
    ) -> None:
        self._table, self._lookup = table, lookup
        self.width, rows = int(table.shape[1]), len(table)
        self.max_requests = min(rows, MAX_TEXT_BYTES // (4 * self.width)) if drafts else 0
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=table.device)
        self._tokens: Tensor | None = None  # not before the first prompt
        self._lines: dict[str, Line] = {}  # by request
        self._free = list(range(self.max_requests))
        # by row of the table: the request's line. The last line is of those that have none
        self._line_of = torch.full((rows,), self.max_requests, device=table.device)
        self._layouts = Layouts(table.device)

    def close(self) -> None:
        """Keep no texts from now on: after a fault."""
        self.max_requests, self._tokens = 0, None
        self._lines.clear()

    def holds(self, requests: Sequence[Any]) -> bool:
        """Say whether the device has the texts of these requests."""
        return all(request.req.rid in self._lines for request in requests)

    # -- writing

    def enter(self, reqs: Sequence[Any], index: Tensor, texts: Sequence[Ints | None]) -> None:
        """Write the texts of requests whose prompts are being prefilled.

        index: [B] their rows in the engine's table
        texts: of each all that it has so far; None if it will be prefilled further
        """
        if self._tokens is None:
            shape = self.max_requests + 1, self.width
            self._tokens = torch.zeros(shape, dtype=torch.int32, device=self._table.device)
        lines = [
            # the device appends the first token of the answer by itself
            self.max_requests if text is None else self._line_for(req, len(text) + 1)
            for req, text in zip(reqs, texts, strict=True)
        ]
        self._line_of[index] = to_device(np.array(lines, np.int64), index.device)
        found = [
            (text, line, 0)
            for text, line in zip(texts, lines, strict=True)
            if text is not None and line < self.max_requests
        ]
        self._write(found)

    def catch_up(self, requests: Sequence[Any]) -> None:
        """Give the device what it lacks of these texts. Nothing is in flight."""
        found = []
        for request in requests:
            line = self._lines.get(request.req.rid)
            if line is not None and line.written < request.length:
                found.append((_tokens_from(request, line.written), line.number, line.written))
                line.written = request.length
        self._write(found)

    def _write(self, texts: Sequence[tuple[Ints, int, int]]) -> None:
        """Write tokens, each to a line from a position on."""
        counts = np.array([len(tokens) for tokens, _, _ in texts], np.int64)
        if self._tokens is None or not counts.sum():
            return
        tokens, lines, starts = zip(*texts, strict=True)
        owners, places = owners_and_places(counts)
        # a text that is too long is not drafted for, and its end is left out
        places = np.minimum(np.array(starts)[owners] + places, self.width - 1)
        packed = np.stack([np.concatenate(tokens), np.array(lines)[owners], places])
        token, line, place = to_device(packed, self._table.device)
        self._tokens[line, place] = token.int()

    def append(self, index: Tensor, lens: Tensor, tokens: Tensor) -> None:
        """Append a token to each text, [B]. lens: [B] of the texts before it"""
        self.last_tokens[index] = tokens
        if self._tokens is not None:
            places = lens.long().clamp(max=self.width - 1)
            self._tokens[self._line_of[index], places] = tokens.int()

    def note_written(self, requests: Sequence[Any], counts: Ints) -> None:
        """Note that the device has written the last tokens of these requests by itself.

        counts: [B] how many
        """
        for request, count in zip(requests, counts.tolist(), strict=True):
            line = self._lines.get(request.req.rid)
            if line is not None and line.written >= request.length - count:
                line.written = request.length

    def _line_for(self, req: Any, written: int) -> int:
        """Return a line for a request, or the last one if all are in use."""
        if (own := self._lines.get(req.rid)) is not None:  # it was retracted
            own.req, own.written = req, written
            return own.number
        if not self._free:
            ended = [rid for rid, line in self._lines.items() if line.req.finished()]
            self._free = [self._lines.pop(rid).number for rid in ended]
        if not self._free:
            return self.max_requests
        self._lines[req.rid] = Line(req, self._free.pop(), written)
        return self._lines[req.rid].number

    # -- drafting

    def ends(
        self,
        requests: Sequence[Any],
        decision: DeviceDrafts,
        index: Tensor,
        lens: Tensor,
        longest: Ints,
    ) -> TextEnds:
        """Return where these requests' texts end. The device has the texts."""
        assert self._tokens is not None
        texts, num_drafts = self._tokens[:, : int(longest.max()) + 1], decision.num_drafts
        where = texts, self._line_of[index], lens, longest, index
        layout = self._layouts.of(num_drafts)
        return TextEnds(requests, num_drafts, decision.width, *where, layout, self._layouts)

    def look_up(self, ends: TextEnds) -> Tensor:
        """Return drafts that are looked up in the texts, [B, K]."""
        return look_up(ends.texts, ends.lines, ends.lens, ends.width, **self._lookup)

    def rows(self, ends: TextEnds, drafts: Tensor) -> DeviceRows:
        """Return the rows of a step with these drafts, [B, K]."""
        layout, lines, lens, index = ends.layout, ends.lines, ends.lens, ends.index
        owner, place = layout.owner, layout.place
        laid_out = draft_rows(self.last_tokens, lens, index, self._table, owner, place, drafts)
        deepest = ends.longest[layout.shape.row_owners] + layout.shape.row_depths + 1
        return DeviceRows(layout, lens, lines, index, drafts, *laid_out, deepest)

    def advance(self, rows: DeviceRows, emitted: Tensor) -> tuple[Tensor, Tensor]:
        """Write what a step emitted to the texts. emitted: [N] after each of its rows

        Returns how many tokens of each request are cached then, [B], and what the CPU fetches,
        [N + B * K]: what follows each row, and the drafts.
        """
        assert self._tokens is not None
        layout = rows.layout
        where = self._tokens, rows.lines, layout.owner, layout.place
        lens, last, fetched = accept(emitted, rows.drafts, rows.lens, *where)
        self.last_tokens[rows.index] = last
        return lens, fetched


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
    min_n, max_n: the shortest and longest n-gram to look up, in tokens
    """
    limits = torch.full_like(lens, most)
    return ngram_match(texts[lines], lens + 1, limits, most, min_n, max_n)[0].long()


def draft_rows(
    last_tokens: Tensor,
    lens: Tensor,
    index: Tensor,
    table: Tensor,
    owner: Tensor,
    place: Tensor,
    drafts: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay rows out where the texts end.

    last_tokens: by row of the table
    lens: [B] how many tokens of each are cached
    index: [B] the requests' rows in the table
    table: of slots, by row and position
    owner, place: [N] of the rows
    drafts: [B, K]
    -> of the rows [N]: tokens, rows of the table, lengths, slots
    """
    tokens = torch.cat([last_tokens[index][:, None], drafts], 1)
    position, owner_index = lens[owner] + place, index[owner]
    slots = table[owner_index, position].long()
    return tokens[owner, place], owner_index, (position + 1).to(lens.dtype), slots


def accept(
    emitted: Tensor,
    drafts: Tensor,
    lens: Tensor,
    texts: Tensor,
    lines: Tensor,
    owner: Tensor,
    place: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write what a step emitted behind the texts.

    A row of a request that has no further row emits its last token: it accepts nothing.

    emitted: [N] after each row
    -> the new lengths and last tokens, [B], and what the CPU fetches
    """
    size, width = drafts.shape
    found = emitted.new_full((size, width + 1), -1)
    found[owner, place] = emitted
    is_draft = found[:, 1:] >= 0  # whether it has a row, and so something follows it
    accepted = ((found[:, :width] == drafts) & is_draft).long().cumprod(1).sum(1)
    places = lens[:, None] + 1 + torch.arange(width + 1, device=emitted.device)
    # what was not accepted lies behind the end, and the next step writes over it
    texts[lines[:, None], places.clamp(max=texts.shape[1] - 1)] = found.to(texts.dtype)
    last = found.gather(1, accepted[:, None])[:, 0]
    return (lens + accepted + 1).to(lens.dtype), last, torch.cat([emitted, drafts.flatten()])


def unpack(
    fetched: Tensor, num_drafts: Ints, members: Ints | None
) -> tuple[Tensor, Proposal, Ints]:
    """Return what a step emitted after each row, its drafts, and all that were made, [R, K].

    fetched: as `advance` returns it, on the CPU
    num_drafts: [B] of each request
    members: which requests are asked about; None for all
    """
    rows = len(num_drafts) + int(num_drafts.sum())
    emitted, made = fetched[:rows], fetched[rows:].view(len(num_drafts), -1).numpy()
    if members is not None:
        chosen = np.zeros(len(num_drafts), np.bool_)
        chosen[members] = True
        emitted = emitted[torch.from_numpy(np.repeat(chosen, num_drafts + 1))]
        made, num_drafts = made[members], num_drafts[members]
    owners, places = owners_and_places(num_drafts)
    tokens, sure = made[owners, places], np.ones(len(places))
    return emitted, Proposal.found(tokens, num_drafts, places - 1, sure, trees=False), made
