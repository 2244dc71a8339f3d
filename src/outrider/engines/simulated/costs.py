"""What the CPU's work costs, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuCosts:
    """Seconds of the CPU's work in a step of B requests.

    The device waits for `waiting` between the end of a step and the launch of an informed one. How
    long that is was read from runs on the paced device with SGLang (docs/paced.md): 1 ms, and 0.1
    ms for each of the first 16 requests, and 0.03 ms for each further one. Drafts of the CPU are
    looked up within it. A third of it reads the outcome and settles; the rest decides, lays rows
    out and launches.

    launch: of a step that is launched early. An assumption: half of what an informed step of one
        request takes
    schedule: to take a step in and schedule the next, beside the device: the engine's own 1.2 ms
        that SpecDecode-Bench measured
    look_up: for each request whose unused drafts are looked up, beside the device
    pass_fixed, pass_request: of a draft model's pass: until its drafts are read and the next pass
        is launched
    """

    launch: float = 0.5e-3
    schedule: float = 1.2e-3
    look_up: float = 10e-6
    pass_fixed: float = 0.7e-3
    pass_request: float = 80e-6

    def waiting(self, batch: int) -> float:
        """Return how long the device waits for an informed step, without draft passes."""
        return 1.0e-3 + 0.1e-3 * min(batch, 16) + 0.03e-3 * max(0, batch - 16)

    def settle(self, batch: int) -> float:
        """Return the share of it that reads the outcome of the step before."""
        return self.waiting(batch) / 3

    def decide(self, batch: int) -> float:
        """Return the share of it that decides, lays out and launches."""
        return self.waiting(batch) * 2 / 3
