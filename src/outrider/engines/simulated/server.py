"""A simulated server, and clients that keep it busy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.control import Control
from outrider.core import Budget, Drafter, Outcome, Proposal, Request
from outrider.engines.in_process import InProcessRequest
from outrider.engines.schedule import Scheduler
from outrider.engines.simulated.device import SimulatedDevice
from outrider.serving.calibration import ROW_COUNTS
from outrider.serving.make_pool import PoolHead
from outrider.serving.pool import Pool
from outrider.serving.profile import ADAPTIVE, Profile


class SimulatedServer(Scheduler):
    """A server with a simulated device. It brings its own clock: control must have it too.

    drafter: of requests; one that chooses is given the clock
    options: of the drafter
    heads: draft models, by name: see `make_pool`
    device: with the clock
    """

    def __init__(
        self,
        device: SimulatedDevice,
        drafter: str,
        options: Mapping[str, Any] | None = None,
        *,
        max_drafts: int,
        max_requests: int,
        max_length: int,
        heads: Mapping[str, PoolHead] | None = None,
    ) -> None:
        own = dict(options or {})
        if drafter == ADAPTIVE:
            own["clock"] = device.clock.now
        profile = Profile(drafter=drafter, drafters={drafter: own}, max_drafts=max_drafts)
        self.device = device
        super().__init__(
            device,
            profile,
            max_requests=max_requests,
            max_length=max_length,
            heads=heads,
            calibrate=self._calibrate,
            now=device.clock.now,
        )
        if (control := self.pool.control) is not None:
            self._charge_look_ups(control)

    def turn(self) -> list[InProcessRequest]:
        """Do what `Scheduler.turn` does. The CPU's own work takes time."""
        ended = super().turn()
        self.device.clock.spend(self.device.cpu.schedule)
        return ended

    def _calibrate(self, pool: Pool) -> None:
        """Tell control how long passes take, as a server that measures them before it begins."""
        assert pool.control is not None
        costs, cpu = self.device.profile, self.device.cpu
        drafts = [costs.draft] * len(pool.control.models)
        for rows in ROW_COUNTS:
            seconds = [cost.decode(rows, 0) + cpu.pass_fixed for cost in drafts]
            pool.control.calibrate(rows, costs.target.decode(rows, 0), seconds)

    def _charge_look_ups(self, control: Control) -> None:
        """Let lookups beside the device take time. Those of an informed step are in its wait."""
        for name, drafter in control.free.items():
            control.free[name] = _Charged(drafter, self)

    def charge_look_up(self, num_requests: int) -> None:
        """Let the CPU look drafts up, if a step is in flight."""
        if self.in_flight:
            self.device.clock.spend(self.device.cpu.look_up * num_requests)


class _Charged:
    """A drafter whose lookups take time on the virtual clock."""

    def __init__(self, drafter: Drafter, server: SimulatedServer) -> None:
        self.name, self._drafter, self._server = drafter.name, drafter, server

    def start(self, requests: Sequence[Request]) -> None:
        """Introduce requests."""
        self._drafter.start(requests)

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Return what the drafter proposes."""
        self._server.charge_look_up(len(requests))
        return self._drafter.propose(requests, budget)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Report outcomes."""
        self._drafter.observe(outcomes)

    def stop(self, requests: Sequence[Request]) -> None:
        """Forget requests."""
        self._drafter.stop(requests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def run_clients(
    server: Scheduler, clients: int, requests: Iterable[InProcessRequest]
) -> list[InProcessRequest]:
    """Serve requests to so many clients. Each sends its next one when the last has ended.

    Returns the requests in the order in which they ended.
    """
    coming, done = iter(requests), list[InProcessRequest]()

    def send(count: int) -> None:
        server.submit([req for _, req in zip(range(count), coming, strict=False)])

    send(clients)
    while not server.is_idle:
        ended = server.turn()
        done += ended
        send(len(ended))
    return done
