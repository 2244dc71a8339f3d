"""The served step: decide, launch, settle, meanwhile.

These are the four verbs of the loop (`core.loop`), shifted by one: while the engine runs step t,
step t + 1 is launched, and then step t is settled. A step is *launched early* if its drafts do not
depend on what step t emits: then nothing waits. Otherwise the steps in flight are settled first,
and the device waits while the CPU decides. What can wait is done by `meanwhile`, after the launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from outrider.control.decision import CpuDrafts, Decision, DeviceDrafts, Plain, Report
from outrider.core import Ints, match, settle
from outrider.serving.clock import StepClock
from outrider.serving.decider import Decider
from outrider.serving.device_drafters import DeviceDrafters
from outrider.serving.in_flight import InFlight
from outrider.serving.pool import Pool
from outrider.serving.table import RequestTable
from outrider.serving.telemetry import Telemetry
from outrider.serving.values import Batch, Engine, Launched, Members, PrefillLaunch, Settled


class ServedStep:
    """Runs the steps of a serving engine. now: returns seconds, by the clock of control."""

    def __init__(
        self,
        engine: Engine,
        table: RequestTable,
        pool: Pool,
        device: DeviceDrafters,
        decider: Decider,
        telemetry: Telemetry,
        in_flight: InFlight,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._table, self._pool, self._device = engine, table, pool, device
        self._decider, self._telemetry, self._in_flight = decider, telemetry, in_flight
        self._settled, self._now = dict[Launched, Settled](), now

    def launch(self, batch: Batch) -> Launched:
        """Launch a decode step."""
        launched = self._launch_early(batch) or self._launch_informed(batch)
        self._in_flight.append(launched)
        launched.prepare()
        self.meanwhile()
        return launched

    def _launch_early(self, batch: Batch) -> Launched | None:
        """Launch a step that does not depend on what is in flight; None if it does."""
        if not self._decider.may_be_early(batch):
            return None
        requests = self._table.sync(batch.reqs, self._in_flight)
        cached = partial(self._in_flight.max_cached, batch.reqs, self._table)
        decision = self._decider.decide_early(batch, requests, cached)
        if decision is None:
            return None
        members = Members.whole(requests, batch.longest, self._table.columns)
        return self._send(batch, members, decision, StepClock(None, self._now), early=True)

    def _launch_informed(self, batch: Batch) -> Launched:
        """Launch a step with nothing in flight."""
        while self._in_flight:
            self.settle_next()
        clock = StepClock(self._in_flight.ended, self._now)
        requests = self._table.sync(batch.reqs)
        self._table.complete(requests)
        self._device.catch_up(requests)
        batch = self._engine.prepare(batch, requests)
        self._decider.calibrate(batch, clock)
        clock.lap("host")
        members = Members.running(requests, self._table.columns)
        decision = self._decider.decide(batch, members)
        clock.lap("draft", draft_passes=self._pool.take_draft_seconds())
        launched = self._send(batch, members, decision, clock)
        while launched is None:  # a fault of what drafts on the device
            launched = self._send(batch, members, Plain(), clock)
        return launched

    def _send(
        self,
        batch: Batch,
        members: Members,
        decision: Decision,
        clock: StepClock,
        early: bool = False,
    ) -> Launched | None:
        """Launch a step with these drafts; None if the device cannot make them."""
        drafts = None
        if isinstance(decision, DeviceDrafts):
            drafts = self._decider.rows_on_device(batch, members, decision, early)
            if drafts is None:
                return None
        if isinstance(decision, CpuDrafts):
            decision = self._engine.choose_pass(batch, members, decision)
        rows = self._engine.lay_out(batch, members, decision, drafts)
        clock.lap("host")
        foreseen = self._decider.foreseen(decision, early)
        ticket = self._engine.run(rows)
        return Launched(members, decision, early, ticket, clock, foreseen)

    def settle_next(self) -> Settled | None:
        """Settle the oldest step in flight. None if it was a prefill."""
        launched = self._in_flight.popleft()
        if isinstance(launched, PrefillLaunch):
            tokens = self._engine.first_tokens(launched.ticket)
            self._table.note_first_tokens(launched, tokens)
            return None
        running = launched.running()
        found = self._settle(launched, running) if len(running) else Settled.discarded(launched)
        self._settled[launched] = found
        return found

    def _settle(self, launched: Launched, running: Ints) -> Settled:
        clock = launched.clock
        clock.begin(self._in_flight.ended)
        clock.lap("scheduler")
        fetched = self._engine.emitted(launched.ticket)  # the only wait
        clock.lap("forward")
        tokens, proposal, made = launched.read(fetched, running)
        decision, requests = launched.decision, launched.members.take(running).requests
        self._table.complete(requests)
        keep = partial(self._engine.keep, launched, running)
        outcomes = settle(requests, proposal, match(tokens, proposal), keep)
        clock.lap("verify")
        settled = Settled(launched, running, proposal, outcomes)
        self._engine.place(settled)
        self._device.note_read(launched.device_drafter, requests)
        if launched.columns.may_draft:
            self._pool.observe(Report(outcomes, decision, launched.early, clock.last, made))
        outcomes.apply()
        if launched.is_written:
            self._device.note_written(requests, outcomes.num_tokens)
        clock.lap("host")
        self._in_flight.note_settled(clock.last)
        self._telemetry.record_later(settled)
        return settled

    def outcome_of(self, launched: Launched) -> Settled:
        """Return what a step emitted. Settles all steps up to it."""
        while launched not in self._settled:
            self.settle_next()
            self.meanwhile()
        return self._settled.pop(launched)

    def meanwhile(self) -> None:
        """Do what could wait, while the device works: learn, count, trace."""
        self._telemetry.record()
        self._pool.meanwhile()

    def after_outcome(self) -> None:
        """Do what follows when the engine has taken an outcome over, while the next step runs."""
        if not self._in_flight:
            self._table.drop_ended()
        elif (launched := self._in_flight.only_decode()) is not None and launched.early:
            self._decider.score_unused(launched)
