"""A serving engine whose device is a queue of passes with stated costs, on a virtual clock.

The served step, control, lookups and settling are the real ones. Time passes only where this says
so, so a run takes as long as its arithmetic, and two runs are alike.
"""

from outrider.engines.simulated.costs import CpuCosts
from outrider.engines.simulated.device import SimulatedDevice, SimulatedRequest, VirtualClock
from outrider.engines.simulated.server import SimulatedServer, run_clients

__all__ = [
    "CpuCosts",
    "SimulatedDevice",
    "SimulatedRequest",
    "SimulatedServer",
    "VirtualClock",
    "run_clients",
]
