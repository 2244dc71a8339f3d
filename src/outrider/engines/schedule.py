"""Continuous batching in this process: requests join, steps overlap, and requests leave.

The order is that of SGLang's scheduler with overlap: launch step t + 1, then take in what step t
emitted, then schedule step t + 2, all while the device works.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from outrider.control.decision import Limits
from outrider.core import Coins, KeyedCoins
from outrider.engines.in_process import (
    Device,
    InProcessEngine,
    InProcessRequest,
    Ticket,
    describe,
)
from outrider.serving.decider import Decider
from outrider.serving.device import DeviceTexts
from outrider.serving.device_drafters import DeviceDrafters
from outrider.serving.in_flight import InFlight
from outrider.serving.make_pool import PoolHead, make_pool
from outrider.serving.pool import Pool
from outrider.serving.profile import ADAPTIVE, DEVICE, Profile
from outrider.serving.rows import RowBudget
from outrider.serving.step import ServedStep
from outrider.serving.table import RequestTable
from outrider.serving.telemetry import Telemetry
from outrider.serving.values import Knows, Launched, PrefillLaunch

MAX_PREFILL_TOKENS = 8192
"""Tokens of a prefill pass, unless a single prompt has more: SGLang's chunk."""


class Scheduler:
    """Runs requests that come and go through the served step.

    device: runs the target's passes
    profile: how it drafts; requests name their drafters themselves
    max_requests: that may run at once
    max_length: of a text that the device can draft for
    heads: draft models and heads, by name
    coins: to draw drafts with
    trees: whether drafts of the CPU may branch
    calibrate: measures passes before the first decision, given control; None if nothing does
    now: returns seconds, by the clock of control
    pool: of the drafters
    in_flight: the steps that were launched and are not settled
    """

    def __init__(
        self,
        device: Device,
        profile: Profile,
        *,
        max_requests: int,
        max_length: int,
        heads: Mapping[str, PoolHead] | None = None,
        coins: Coins | None = None,
        trees: bool = False,
        calibrate: Callable[[Pool], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        coins = coins or KeyedCoins()
        limit = max_requests * (1 + (profile.max_drafts or 0))
        rows = RowBudget(limit, device.vocab_size, 2, coins, trees)
        names = profile.names(None)
        self.pool = make_pool(
            profile,
            names,
            device.vocab_size,
            heads=heads,
            limits=Limits(launches_early=True),
            device_depths={DEVICE: rows.max_rows()},
        )
        slots = torch.zeros(max_requests, max_length, dtype=torch.int32)
        drafts = bool({DEVICE, ADAPTIVE} & {*names})
        drafters = DeviceDrafters(DeviceTexts(slots, self.pool.lookup, drafts))
        self.in_flight = InFlight()
        self._engine = InProcessEngine(device, drafters, max_requests)
        self._table = RequestTable(describe, self.pool)
        measure = None if calibrate is None or self.pool.control is None else calibrate
        decider = Decider(
            self._table,
            self.pool,
            drafters,
            rows,
            calibrate=None if measure is None else lambda _: measure(self.pool),
        )
        telemetry = Telemetry(self.pool)
        parts = self._table, self.pool, drafters, decider, telemetry, self.in_flight
        self._step = ServedStep(self._engine, *parts, now=now)
        self._waiting: deque[InProcessRequest] = deque()
        self._running: list[InProcessRequest] = []
        self._joining: list[InProcessRequest] = []  # prefilled in the last turn
        self._launched: deque[Launched | PrefillLaunch] = deque()
        self._knows, self._device_drafter = Knows.BOTH, ""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._waiting or self._running or self._joining or self._launched)

    def submit(self, reqs: Sequence[InProcessRequest]) -> None:
        """Let requests join, as soon as there is room."""
        self._waiting += reqs

    def turn(self) -> list[InProcessRequest]:
        """Launch a step, and take in the one before it. Return the requests that have ended."""
        before = len(self._launched)
        launched = self._launch()
        if launched is not None:
            self._launched.append(launched)
        return self._take_in(self._launched.popleft()) if before else []

    # -- launching

    def _launch(self) -> Launched | PrefillLaunch | None:
        """Launch a prefill if requests wait and there is room, else a decode step, if any."""
        self._merge()
        if self._waiting and self._engine.num_free:
            return self._prefill(self._chosen())
        if not self._running:
            return None
        longest = self.in_flight.max_cached(self._running, self._table)
        batch = self._engine.batch(self._running, self._knows, longest, self._device_drafter)
        launched = self._step.launch(batch)
        ticket: Ticket = launched.ticket
        self._knows, self._device_drafter = ticket.knows, launched.device_drafter
        return launched

    def _merge(self) -> None:
        """Take in the requests that were prefilled, and drop those that have ended."""
        self._running = [req for req in self._running if not req.finished()]
        joining = [req for req in self._joining if not req.finished()]
        if not self._running:
            self._knows, self._device_drafter = Knows.BOTH, ""
        elif joining:  # whose lengths both know
            self._device_drafter = ""
        # a new list: launched steps have the old one
        self._running, self._joining = self._running + joining, []

    def _chosen(self) -> list[InProcessRequest]:
        """Return the requests of the next prefill pass."""
        chosen, tokens = list[InProcessRequest](), 0
        while self._waiting and len(chosen) < self._engine.num_free:
            tokens += self._waiting[0].length
            if chosen and tokens > MAX_PREFILL_TOKENS:
                break
            chosen.append(self._waiting.popleft())
        return chosen

    def _prefill(self, reqs: list[InProcessRequest]) -> PrefillLaunch:
        self.in_flight.begin_prefill()
        self._table.drop([req.rid for req in reqs])
        lengths = [req.length for req in reqs]
        launched = PrefillLaunch(reqs, lengths, self._engine.prefill(reqs))
        if self.pool.readers:
            drafters = {req.drafter for req in reqs if req.max_drafts}
            self.pool.prefill(reqs, drafters, max(lengths), len(reqs))
        self._step.meanwhile()
        self.in_flight.append(launched)
        self._joining = reqs
        return launched

    # -- taking in

    def _take_in(self, launched: Launched | PrefillLaunch) -> list[InProcessRequest]:
        """Give clients what a step emitted. Return the requests that have ended."""
        reqs: list[InProcessRequest]
        if isinstance(launched, PrefillLaunch):
            reqs = list(launched.reqs)
            for req, token in zip(reqs, self._engine.first_tokens(launched.ticket), strict=True):
                req.extend([token], req.finish_after([token]))
        else:
            settled, reqs = self._step.outcome_of(launched), []
            for request, outcome in zip(settled.members.requests, settled.outcomes, strict=True):
                if not request.req.finished():  # by its first token, with this step in flight
                    request.req.extend(outcome.tokens, outcome.finish_reason)
                    reqs.append(request.req)
            self._step.after_outcome()
        ended = [req for req in reqs if req.finished()]
        self._engine.release(ended)
        return ended
