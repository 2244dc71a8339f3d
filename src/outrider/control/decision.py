"""What control gets to know of a step, decides, and learns from. The values never change.

*Decided early* means: before it is known what the last step emitted. Nothing waits for such a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from outrider.core import Ints, Outcomes, Proposal


@dataclass(frozen=True)
class Limits:
    """What an engine can do, as long as it runs.

    launches_early: whether it launches steps before the last one is known
    reads_each_row: whether a request's cache is read once for each of its rows
    graph_sizes: the numbers of rows for which it has captured graphs, if it has
    """

    launches_early: bool = False
    reads_each_row: bool = False
    graph_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Feasible:
    """What the engine can do in the next step.

    on_device: the drafters that can draft on the device, by name
    padded_width: rows of each request in a padded pass; 0 if there is no such pass
    max_rows: the most rows of a pass
    """

    on_device: frozenset[str] = frozenset()
    padded_width: int = 0
    max_rows: int = 1 << 30


@dataclass(frozen=True)
class Plain:
    """A step without drafts."""


@dataclass(frozen=True, eq=False)
class CpuDrafts:
    """Drafts that the CPU knows before the launch.

    proposal: the drafts; of some requests none
    names: [B] the drafter of each request; "" without drafts
    padded: whether a padded pass should verify them: see `StepCost`
    """

    proposal: Proposal
    names: Sequence[str]
    padded: bool = False


@dataclass(frozen=True, eq=False)
class DeviceDrafts:
    """Drafts that the device makes, which the CPU knows when the step is over.

    drafter: the one that makes them
    num_drafts: [B] how many of each request are verified; 0 of all is a plain step
    width: how many are made for each request, at least 1. Those that are not verified are compared
        with what is emitted.
    """

    drafter: str
    num_drafts: Ints
    width: int


Decision: TypeAlias = Plain | CpuDrafts | DeviceDrafts


@dataclass(frozen=True, eq=False)
class Report:
    """What became of a step: all that control and metrics learn from.

    outcomes: of the requests that were decided for and are still there
    decision: as it was launched
    early: whether the step was launched before the one before it was known
    ended: when its outcome was known, in seconds of control's clock
    made: [B, K] the drafts that the device made, verified or not; None if it made none
    """

    outcomes: Outcomes
    decision: Decision
    early: bool
    ended: float
    made: Ints | None = None
