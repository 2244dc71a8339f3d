"""One step of control: what is known before it, what it did, and its line in a trace."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.control.decision import CpuDrafts, DeviceDrafts, Feasible, Report
from outrider.control.plan import Offer, Plan
from outrider.core import Budget, Floats, Ints, Request


@dataclass(frozen=True)
class Passes:
    """What a draft model did for a step.

    model: its name; "" if it had no part in the step
    without: tokens per second that were expected without the model
    caught_up: tokens that it consumed for requests that it did not draft for yet
    count: passes that made drafts
    users: requests that it drafted for
    unread: tokens that the first of these passes consumed
    seconds: time of these passes
    """

    model: str = ""
    without: float = 0.0
    caught_up: int = 0
    count: int = 0
    users: int = 0
    unread: int = 0
    seconds: float = 0.0


NO_PASSES = Passes()
"""No draft model had a part in the step."""


@dataclass(frozen=True)
class Step:
    """What one step did and how long it took.

    t: time at which it began, by control's clock: that of the outcome before it, if known
    requests: number of requests
    context: tokens of all requests together
    rows: rows of the target's pass
    passes: what a draft model did for it
    follows: whether it followed another step at once
    early: whether it was launched before the outcome of the step before it was known
    on_device: the drafter that drafted on the device; "" if none did
    proposed: time at which the step was decided
    seconds: time of the whole step, drafting included
    names: the drafter of each request; "" for a request without drafts
    tokens: emitted tokens
    padded_width: rows of each request, if the target's pass was a padded one; 0 if it was not
    """

    t: float
    requests: int
    context: int
    rows: int = 0
    passes: Passes = NO_PASSES
    follows: bool = False
    early: bool = False
    on_device: str = ""
    proposed: float = 0.0
    seconds: float = 0.0
    names: Sequence[str] = ()
    tokens: int = 0
    padded_width: int = 0

    @property
    def speculated(self) -> bool:
        """Whether the target verified any draft."""
        return self.rows > self.requests

    @property
    def cpu_seconds(self) -> float:
        """Seconds from the outcome before it to its decision, without draft passes."""
        return self.proposed - self.t - self.passes.seconds

    @property
    def target_seconds(self) -> float:
        """Seconds from the decision to the outcome: the target's pass and all around it."""
        return self.t + self.seconds - self.proposed

    def as_dict(self) -> dict[str, Any]:
        """Return the step as a line of a trace."""
        return {
            "t": round(self.t, 6),
            "seconds": round(self.seconds, 6),
            "draft_seconds": round(self.passes.seconds, 6),
            "requests": self.requests,
            "context": self.context,
            "rows": self.rows,
            "early": self.early,
            "on_device": self.on_device,
            "draft_passes": self.passes.count,
            "unread": self.passes.unread,
            "drafters": dict(Counter(name for name in self.names if name)),
            "tokens": self.tokens,
        }


@dataclass(frozen=True, eq=False)
class Situation:
    """What is known about a step before a draft model is considered.

    t: when it began, see `Step`
    follows: whether it follows another step at once
    requests: [B]
    rows: [B] of the requests: see `Acceptance.rows`
    context: tokens of all requests together
    budget: of the step
    feasible: what the engine can do in the step
    offers: what each drafter proposed: at first the free ones
    plan: the offers, joined
    seconds: time of a step with so many rows, without drafting
    """

    t: float
    follows: bool
    requests: Sequence[Request]
    rows: Ints
    context: int
    budget: Budget
    feasible: Feasible
    offers: Sequence[Offer]
    plan: Plan
    seconds: Floats

    @property
    def plain_goodput(self) -> float:
        """Goodput of a plain step."""
        batch = len(self.rows)
        return batch / float(self.seconds[batch])


@dataclass(frozen=True, eq=False)
class Pending:
    """A step that control has decided or scored, until its outcome is reported.

    now: what was known
    proposed, passes: see `Step`
    """

    now: Situation
    proposed: float
    passes: Passes = NO_PASSES

    def step(self, report: Report) -> Step:
        """Return the step with its outcome."""
        now, outcomes, launched = self.now, report.outcomes, report.decision
        names: Sequence[str] = ()
        padded_width = 0
        if isinstance(launched, CpuDrafts) and outcomes.num_drafts.any():
            names = launched.names
            padded_width = now.feasible.padded_width if launched.padded else 0
        return Step(
            t=now.t,
            requests=len(now.rows),
            context=now.context,
            rows=len(now.rows) + int(outcomes.num_drafts.sum()),
            passes=self.passes,
            follows=now.follows,
            early=report.early and now.follows,
            on_device=drafted_on_device(report) if outcomes.num_drafts.any() else "",
            proposed=self.proposed,
            seconds=report.ended - now.t,
            names=names,
            tokens=len(outcomes.tokens),
            padded_width=padded_width,
        )


def early_step(report: Report, began: float | None, context: int) -> Step | None:
    """Return a step that was launched early; None if it did not follow another step at once.

    began: when the outcome before it was known; None if something came between
    """
    if began is None:
        return None
    outcomes = report.outcomes
    return Step(
        t=began,
        requests=len(outcomes.requests),
        context=context,
        rows=len(outcomes.requests) + int(outcomes.num_drafts.sum()),
        follows=True,
        early=True,
        on_device=drafted_on_device(report) if outcomes.num_drafts.any() else "",
        proposed=began,
        seconds=report.ended - began,
        tokens=len(outcomes.tokens),
    )


def drafted_on_device(report: Report) -> str:
    """Return the drafter that made drafts on the device; "" if none did."""
    launched = report.decision
    return launched.drafter if isinstance(launched, DeviceDrafts) else ""


class TraceFile:
    """Appends each step to a file, as one line of JSON."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def __call__(self, step: Step) -> None:
        """Append a step."""
        with self._path.open("a") as lines:
            lines.write(json.dumps(step.as_dict()) + "\n")
