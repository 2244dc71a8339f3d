"""What can draft on the device: a lookup in the texts, and heads."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

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

    texts: of the requests; None if nothing can draft on the device
    heads: those that can, by name
    """

    def __init__(
        self, texts: DeviceTexts | None = None, heads: Mapping[str, HeadSteps] | None = None
    ) -> None:
        self._texts, self._heads = texts, dict(heads or {})

    def names(
        self, columns: Columns, longest: int, requests: Sequence[ServedRequest] = ()
    ) -> frozenset[str]:
        """Return what can draft for a batch.

        longest: how many tokens of a request are cached, at most
        requests: heads that have too much of these to read first are left out
        """
        texts = self._texts
        if texts is None or columns.needs_text or columns.wants_output:
            return frozenset()
        # near the end of the context the CPU knows better how many drafts there may be
        fits = longest + int(columns.max_drafts.max()) + 2 <= texts.width
        if not fits or len(columns.kinds) > texts.max_requests:
            return frozenset()
        ready = (name for name, head in self._heads.items() if head.is_ready(requests))
        return frozenset((DEVICE, *ready))

    def begin(
        self, drafter: str, requests: Sequence[ServedRequest], index: Tensor, lens: Ints
    ) -> Tensor:
        """Give the device what it lacks of the texts. Returns the lengths there, [B].

        Nothing is in flight.

        index: [B] the requests' rows in the engine's table
        lens: [B] how many of their tokens are cached
        """
        assert self._texts is not None
        self._texts.write(requests)
        if (head := self._heads.get(drafter)) is not None:
            head.enter(requests, index)
        return to_device(lens, index.device)

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
        ends = self._texts.ends(requests, decision.num_drafts, index, lens, longest)
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

    def note_written(self, drafter: str, requests: Sequence[ServedRequest]) -> None:
        """Note that the device has all of these texts, after a step in which it drafted."""
        if drafter and self._texts is not None:
            self._texts.note_written(requests)

    def disable(self, drafter: str, error: Exception) -> None:
        """Let a drafter draft on the device no more, after a fault."""
        logger.warning("no more drafts of %s on the device: %r", drafter, error)
        if drafter in self._heads:
            del self._heads[drafter]
        else:
            self._texts = None
