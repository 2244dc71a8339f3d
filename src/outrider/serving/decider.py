"""Which drafts the next step has: decided early, or when the last outcome is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from outrider.control.decision import Decision, DeviceDrafts, Feasible, Plain
from outrider.core import Ints
from outrider.serving.clock import StepClock
from outrider.serving.device import DeviceRows
from outrider.serving.device_drafters import DeviceDrafters
from outrider.serving.pool import Pool
from outrider.serving.profile import DEVICE
from outrider.serving.rows import RowBudget, drafts_in
from outrider.serving.table import RequestTable
from outrider.serving.values import Batch, Knows, Launched, Members, ServedRequest

REQUESTS_PER_STEP_UNSCORED, HEAD_STEPS_UNSCORED = 16, 4
"""Drafts that a step goes without are looked up and scored in one step of 1 + B / 16: that takes
longer the larger the batch is, and the CPU has to be done before the device is. While a head drafts
on the device, in one of 4 + B / 16: there is more to launch, and its worth changes slowly."""


class Decider:
    """Decides which drafts a step has, within what the engine can do.

    calibrate: measures how long passes take, before the first decision; None if nothing asks
    padded_width: returns the rows of each request in a padded pass; 0 if there is no such pass
    """

    def __init__(
        self,
        table: RequestTable,
        pool: Pool,
        device: DeviceDrafters,
        rows: RowBudget,
        padded_width: Callable[[], int] = lambda: 0,
        calibrate: Callable[[Batch], None] | None = None,
    ) -> None:
        self._table, self._pool, self._device, self._rows = table, pool, device, rows
        self._padded_width, self._calibrate = padded_width, calibrate
        # without penalties: a step with them is never launched early
        self._max_rows = rows.max_rows()
        self._steps_unscored = 0

    def may_be_early(self, batch: Batch) -> bool:
        """Say whether the device knows what it takes to launch a step, and times are known."""
        return batch.knows is not Knows.CPU and self._calibrate is None

    def decide_early(
        self, batch: Batch, requests: Sequence[ServedRequest], cached: Callable[[], Ints]
    ) -> Plain | DeviceDrafts | None:
        """Return what a step does that does not depend on the last outcome; None if it does.

        cached: returns how many tokens of each request may be cached then, [B]
        """
        columns = self._table.columns
        names = self._device.names(columns, int(batch.longest.max()), requests)
        feasible = Feasible(names, self._padded_width(), self._max_rows)
        decision = self._pool.decide_early(requests, columns, feasible)
        if isinstance(decision, Plain):
            if batch.knows is Knows.BOTH:
                return None if columns.needs_text or columns.explain else decision
            # the device knows where the texts end
            return DeviceDrafts(DEVICE, np.zeros(len(requests), np.int64), 1) if names else None
        if decision is None or decision.drafter not in names:
            return None
        if not self._device.follows(decision.drafter, batch.device_drafter, requests):
            return None
        return _within(decision, batch.room, cached)

    def calibrate(self, batch: Batch, clock: StepClock) -> None:
        """Measure how long passes take, once."""
        if self._calibrate is not None:
            calibrate, self._calibrate = self._calibrate, None
            calibrate(batch)
            clock.skip()

    def decide(self, batch: Batch, members: Members) -> Decision:
        """Decide with nothing in flight."""
        columns = self._table.columns
        # finished requests have rows only if all have finished
        if not columns.may_draft or members.requests[0].finish_reason is not None:
            return Plain()
        max_rows, on_device = self._rows.max_rows(batch.num_penalties), frozenset[str]()
        if members.is_whole:
            longest = int(members.lens.max())
            on_device = self._device.names(columns, longest, members.requests)
        fixed = None if columns.adaptive else self._pool.fixed_on_device(columns, max_rows)
        if fixed is not None and fixed.drafter in on_device:
            return _within(fixed, batch.room, lambda: members.lens)
        budget, cuts = self._rows.share(members, max_rows, batch.room)
        self._pool.count(cuts)
        on_device = on_device if columns.adaptive else frozenset()
        feasible = Feasible(on_device, self._padded_width(), max_rows)
        decision = self._pool.decide(batch.own, members.requests, budget, feasible)
        if isinstance(decision, DeviceDrafts):
            return _within(decision, batch.room, lambda: members.lens)
        return decision

    def rows_on_device(
        self, batch: Batch, members: Members, decision: DeviceDrafts, early: bool
    ) -> DeviceRows | None:
        """Return the rows of a step whose drafts the device makes; None after a fault.

        early: whether the device has the requests' texts. Otherwise nothing is in flight.
        """
        requests, lens = members.requests, batch.lens
        try:
            if not early:
                known = self._device.begin(decision.drafter, requests, batch.index, members.lens)
                lens = known.to(lens.dtype)
            return self._device.rows(decision, requests, batch.index, lens, members.lens)
        except Exception as error:
            self._device.disable(decision.drafter, error)
            self._pool.count({"device": len(requests)})
            return None

    def foreseen(self, decision: Decision, early: bool) -> Mapping[int, str]:
        """Return what a draft server had for the requests of a step, if one of them asks."""
        asked = self._table.columns.explain and not early
        return self._pool.foreseen() if asked and not isinstance(decision, DeviceDrafts) else {}

    def score_unused(self, launched: Launched) -> None:
        """Let control score drafts of the CPU that a step was launched without, while it runs."""
        columns, drafter = launched.columns, launched.device_drafter
        if not columns.adaptive:
            return
        if not self._pool.scores_unused(drafter):
            return
        running = launched.running()
        if not len(running):
            return
        self._steps_unscored += 1
        least = 1 if drafter in ("", DEVICE) else HEAD_STEPS_UNSCORED
        if (self._steps_unscored - least + 1) * REQUESTS_PER_STEP_UNSCORED <= len(running):
            return
        self._steps_unscored = 0
        members = launched.members.take(running)
        budget, _ = self._rows.share(members, self._max_rows)
        # the step in flight adds to these, and the next one
        longest = max(request.length for request in members.requests)
        longest += int(budget.max_drafts.max())
        names = self._device.names(columns, longest, launched.requests)
        feasible = Feasible(names, self._padded_width(), self._max_rows)
        self._pool.score_unused(members.requests, budget, feasible)


def _within(decision: DeviceDrafts, room: Ints | None, cached: Callable[[], Ints]) -> DeviceDrafts:
    """Return a decision with no more drafts than there are slots for."""
    if room is None:
        return decision
    num_drafts = np.minimum(decision.num_drafts, drafts_in(room, cached()))
    return replace(decision, num_drafts=num_drafts)
