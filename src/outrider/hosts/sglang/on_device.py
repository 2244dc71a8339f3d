"""Drafts that never leave the device: a step with drafts is launched before the last is known.

The device has the text of each request, and its length. A step looks the last tokens up in the text
(`ngram_match`) or lets a head draft (`HeadSteps`), lays out its rows at the lengths that it finds,
and moves the lengths on by what was accepted. So no launch waits for the host to read anything. The
host reads drafts and tokens together, when it would have read the tokens of a plain step.

The price: how many drafts a request gets is said before anybody knows whether they are good, and
the host knows only how long a text is at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core import Ints, Proposal
from outrider.hosts.sglang.head_steps import HeadSteps
from outrider.hosts.sglang.host import changed
from outrider.hosts.sglang.requests import ActiveRequests, LiveRequest
from outrider.hosts.sglang.rows import StepRows, kind_groups, to_device
from outrider.hosts.sglang.sampling import row_sampling, take
from outrider.kernels.ngram_match import ngram_match

MOST_BYTES = 1 << 27
"""Memory for texts on the device. Larger batches than it holds draft on the host."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Which rows a step has, if each request has so many drafts.

    shape: a proposal of this shape, whatever its tokens are
    owner, place: [N] the request of each row, and its place among that request's rows
    """

    shape: Proposal
    owner: Tensor
    place: Tensor

    @staticmethod
    def of(widths: Ints, device: Any) -> Layout:
        """Return the layout for so many drafts of each request."""
        _, places = _counted(widths)
        shape = Proposal.unclaimed(np.zeros_like(places), widths, places - 1)
        owner, place = to_device(np.stack(_counted(widths + 1)), device)
        return Layout(shape, owner, place)


@dataclass(frozen=True, eq=False)
class DeviceStep:
    """A step with drafts that only the device knows yet.

    rows: its decode batch
    layout: of its rows
    lens: [B] how many tokens of each request are cached
    lines: [B] where their texts are
    drafts: [B, K] the first of them have rows
    """

    rows: StepRows
    layout: Layout
    lens: Tensor
    lines: Tensor
    drafts: Tensor


class DeviceTexts:
    """The texts of requests on the device, and steps that draft from them.

    table: the host's table of slots, as wide as a text can be long
    min_n, max_n: the shortest and longest n-gram to look up, in tokens
    """

    def __init__(self, table: Tensor, min_n: int, max_n: int) -> None:
        self._table, self._n = table, (min_n, max_n)
        self.width = int(table.shape[1])
        self.most_requests = min(len(table), MOST_BYTES // (4 * self.width))
        self._tokens: Tensor | None = None  # not before somebody drafts from it
        self._owners: list[int] = [-1] * self.most_requests  # the request that each line is of
        self._lines: tuple[Sequence[LiveRequest], Tensor] | None = None
        self._layouts: dict[bytes, Layout] = {}  # of this step and of the one before it

    def write(self, requests: Sequence[LiveRequest]) -> None:
        """Give the device what it lacks of the texts of a batch."""
        if self._tokens is None:
            shape = self.most_requests, self.width
            self._tokens = torch.zeros(shape, dtype=torch.int32, device=self._table.device)
        self._place(requests)
        missing = [_tokens_from(request, request.on_device) for request in requests]
        counts = np.array([len(tokens) for tokens in missing])
        owners, places = _counted(counts)
        told = np.empty((3, len(owners)), np.int64)
        told[0] = np.concatenate(missing)
        told[1] = np.array([request.line for request in requests])[owners]
        told[2] = np.array([request.on_device for request in requests])[owners] + places
        tokens, line, place = to_device(told, self._table.device)
        self._tokens[line, place] = tokens.int()
        for request in requests:
            request.on_device = request.length

    def _place(self, requests: Sequence[LiveRequest]) -> None:
        """Give each request of a batch a line. Others lose theirs if there are not enough."""
        new = [request for request in requests if self._owners[request.line] != request.id]
        taken = {r.line for r in requests if self._owners[r.line] == r.id}
        free = (line for line in range(self.most_requests) if line not in taken)
        for request, line in zip(new, free, strict=False):
            request.line, request.on_device = line, 0
            self._owners[line] = request.id
        self._lines = None

    def step(
        self,
        batch: Any,
        plain: Any,
        requests: Sequence[LiveRequest],
        kinds: Any,
        widths: Ints,
        head: HeadSteps | None = None,
    ) -> DeviceStep:
        """Return a step with drafts for requests whose texts the device has.

        batch, plain: the host's decode batch, and the same as its workers take it. Its `seq_lens`
            are right on the device; `seq_lens_cpu` says how long the texts are at most.
        kinds: how each request is sampled
        widths: [B] how many drafts each gets; one of them at least 1
        head: that drafts; otherwise they are looked up
        """
        assert self._tokens is not None
        index, lens, lines = plain.req_pool_indices, plain.seq_lens, self._lines_of(requests)
        layout = self._layout_of(widths)
        owner, place, most = layout.owner, layout.place, int(widths.max())
        longest = plain.seq_lens_cpu.numpy()
        text = self._tokens[:, : int(longest.max()) + 1]
        if head is None:
            drafts = look_up(text, lines, lens, most, *self._n)
        else:
            drafts = head.draft(
                requests, widths, text, lines, lens, index, longest, self._owners_and_places
            )
        tokens, pool_index, seq_lens, slots = draft_rows(
            text, lines, lens, index, self._table, owner, place, drafts
        )
        rows = layout.shape.row_owners
        known = longest[rows] + layout.shape.row_depths + 1
        owners = rows.tolist()
        active = ActiveRequests((), np.arange(len(kinds)), widths, kinds)
        forward = changed(
            plain,
            input_ids=tokens,
            req_pool_indices=pool_index,
            seq_lens=seq_lens,
            seq_lens_cpu=torch.from_numpy(known).to(plain.seq_lens_cpu.dtype),
            seq_lens_sum=int(known.sum()),
            orig_seq_lens=seq_lens.to(plain.orig_seq_lens.dtype),
            out_cache_loc=slots,
            top_logprobs_nums=take(plain.top_logprobs_nums, owners),
            token_ids_logprobs=take(plain.token_ids_logprobs, owners),
            sampling_info=row_sampling(batch, active, layout.shape, owner),
            reqs=take(plain.reqs, owners),
            spec_info=None,
        )
        made = StepRows(forward, kind_groups(kinds, index.device, rows))
        return DeviceStep(made, layout, lens, lines, drafts)

    def advance(self, step: DeviceStep, emitted: Tensor) -> tuple[Tensor, Tensor]:
        """Write what a step emitted to the texts. emitted: [N] after each of its rows

        Returns how many tokens of each request are cached then, [B], and what the host is told,
        [N + B * K]: what follows each row, and the drafts.
        """
        assert self._tokens is not None
        layout = step.layout
        return accept(
            emitted, step.drafts, step.lens, self._tokens, step.lines, layout.owner, layout.place
        )

    def _lines_of(self, requests: Sequence[LiveRequest]) -> Tensor:
        if self._lines is None or self._lines[0] is not requests:
            lines = np.array([request.line for request in requests])
            self._lines = requests, to_device(lines, self._table.device)
        return self._lines[1]

    def _owners_and_places(self, counts: Ints) -> tuple[Tensor, Tensor]:
        """Return whose each row is, and its place, if each request has so many."""
        layout = self._layout_of(counts - 1)
        return layout.owner, layout.place

    def _layout_of(self, widths: Ints) -> Layout:
        key = widths.tobytes()
        if key not in self._layouts:
            if len(self._layouts) > 1:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = Layout.of(widths, self._table.device)
        return self._layouts[key]


def _counted(counts: Ints) -> tuple[Ints, Ints]:
    """Return, of so many things of each request, whose each is, and its place among them."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - (counts.cumsum() - counts)[owners]


def _tokens_from(request: LiveRequest, start: int) -> Ints:
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
    index: [B] the requests' pool indices
    table: of slots, by pool index and position
    owner, place: [N] of the rows
    drafts: [B, most]
    -> of the rows [N]: tokens, pool indices, lengths, slots
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
    """Write what a step emitted behind the texts. Return the new lengths and what the host is told.

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


def told_drafts(told: Tensor, widths: Ints, members: Ints | None) -> tuple[Tensor, Proposal]:
    """Return what a step emitted after each row, and its drafts: once the host can read them.

    told: as `advance` returns it
    widths: [B] drafts of each request
    members: which requests are asked about; None for all
    """
    rows = len(widths) + int(widths.sum())
    emitted, drafts = told[:rows], told[rows:].view(len(widths), -1)
    if members is not None:
        chosen = np.zeros(len(widths), np.bool_)
        chosen[members] = True
        emitted = emitted[torch.from_numpy(np.repeat(chosen, widths + 1))]
        drafts, widths = drafts[torch.from_numpy(members)], widths[members]
    owners, places = _counted(widths)
    tokens, sure = drafts.numpy()[owners, places], np.ones(len(places))
    return emitted, Proposal.found(tokens, widths, places - 1, sure, trees=False)
