"""What can draft on the device: a lookup in the texts, and heads."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from outrider.control.decision import DeviceDrafts
from outrider.core import Ints
from outrider.serving.device import DeviceRows, DeviceTexts, to_device
from outrider.serving.head_steps import HeadSteps
from outrider.serving.profile import DEVICE
from outrider.serving.values import Columns, ServedRequest

logger = logging.getLogger(__name__)


class DeviceDrafters:
    """Drafts on the device, by a lookup or with a head.

    texts: of the requests; None for an engine that keeps the last tokens by itself
    heads: those that can draft there, by name
    """

    def __init__(
        self, texts: DeviceTexts | None = None, heads: Mapping[str, HeadSteps] | None = None
    ) -> None:
        self._texts, self._heads = texts, dict(heads or {})
        self._held: tuple[Columns, bool] | None = None  # of the last batch that was asked about

    @property
    def last_tokens(self) -> Tensor:
        """By row of the engine's table, the last token of each request."""
        assert self._texts is not None
        return self._texts.last_tokens

    def names(
        self, columns: Columns, longest: int, requests: Sequence[ServedRequest]
    ) -> frozenset[str]:
        """Return what can draft for a batch.

        Heads that have too much to read first are left out.

        longest: how many tokens of a request are cached, at most
        """
        texts = self._texts
        if texts is None or columns.needs_text or columns.wants_output:
            return frozenset()
        # near the end of the context the CPU knows better how many drafts there may be
        if longest + int(columns.max_drafts.max(initial=0)) + 2 > texts.width:
            return frozenset()
        if self._held is None or self._held[0] is not columns:
            self._held = columns, texts.holds(requests)
        if not self._held[1]:
            return frozenset()
        ready = (name for name, head in self._heads.items() if head.is_ready(requests))
        return frozenset((DEVICE, *ready))

    def enter(
        self, reqs: Sequence[Any], index: Tensor, lens: Tensor, tokens: Tensor, partial: Ints
    ) -> None:
        """Take in the texts of a prefill that was launched, with the tokens that it emits.

        reqs: the engine's requests
        index: [B] their rows in the engine's table
        lens, tokens: [B] how long each text is on the device, and the token that follows
        partial: which of them will be prefilled further
        """
        assert self._texts is not None
        if self._texts.max_requests:  # else nothing drafts from texts
            chunks = {*partial.tolist()}
            texts = [None if r in chunks else _text_of(req) for r, req in enumerate(reqs)]
            self._texts.enter(reqs, index, texts)
        self._texts.append(index, lens, tokens)

    def append(self, index: Tensor, lens: Tensor, tokens: Tensor) -> None:
        """Take in the tokens of a plain step, [B]. lens: [B] of the texts before them"""
        if self._texts is not None:
            self._texts.append(index, lens, tokens)

    def catch_up(self, requests: Sequence[ServedRequest]) -> None:
        """Give the device what it lacks of these texts. Nothing is in flight."""
        if self._texts is not None:
            self._texts.catch_up(requests)

    def begin(
        self, drafter: str, requests: Sequence[ServedRequest], index: Tensor, lens: Ints
    ) -> Tensor:
        """Get ready to draft for requests when nothing is in flight. Returns their lengths, [B].

        index: [B] the requests' rows in the engine's table
        lens: [B] how many of their tokens are cached
        """
        assert self._texts is not None
        last = np.array([request.last_token for request in requests], np.int64)
        packed = to_device(np.stack([lens, last]), index.device)
        self._texts.last_tokens[index] = packed[1]
        if (head := self._heads.get(drafter)) is not None:
            head.enter(requests, index)
        return packed[0]

    def follows(self, drafter: str, before: str, requests: Sequence[ServedRequest]) -> bool:
        """Say whether a step with this drafter may follow one that is not settled.

        A lookup needs the texts only. A head must have drafted for the same requests before.

        before: the drafter of the step before
        """
        head = self._heads.get(drafter)
        return head is None or (drafter == before and head.has_entered(requests))

    def rows(
        self,
        decision: DeviceDrafts,
        requests: Sequence[ServedRequest],
        index: Tensor,
        lens: Tensor,
        longest: Ints,
    ) -> DeviceRows:
        """Return the rows of a step with drafts. index, lens, longest: see `TextEnds`"""
        assert self._texts is not None
        ends = self._texts.ends(requests, decision, index, lens, longest)
        head = self._heads.get(decision.drafter)
        drafts = self._texts.look_up(ends) if head is None else head.draft(ends)
        return self._texts.rows(ends, drafts)

    def advance(self, rows: DeviceRows, emitted: Tensor) -> tuple[Tensor, Tensor]:
        """Write what a step emitted to the texts: see `DeviceTexts.advance`."""
        assert self._texts is not None
        return self._texts.advance(rows, emitted)

    def note_read(self, drafter: str, requests: Sequence[ServedRequest]) -> None:
        """Note that a head has read these requests, before they are extended."""
        if (head := self._heads.get(drafter)) is not None:
            head.note_read(requests)

    def note_written(self, requests: Sequence[ServedRequest], counts: Ints) -> None:
        """Note that a step appended so many tokens to each text, [B], on the device too."""
        if self._texts is not None:
            self._texts.note_written(requests, counts)

    def disable(self, drafter: str, error: Exception) -> None:
        """Let a drafter draft on the device no more, after a fault."""
        logger.warning("no more drafts of %s on the device: %r", drafter, error)
        if drafter in self._heads:
            del self._heads[drafter]
        elif self._texts is not None:
            self._texts.close()
            self._held = None


def _text_of(req: Any) -> Ints:
    """Return all tokens that an engine's request has."""
    return np.array([*req.origin_input_ids, *req.output_ids], np.int64)
