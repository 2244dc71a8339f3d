"""One step of the adaptive drafter: what it did, how long it took, and its line in a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outrider.control.plan import Offer
from outrider.core import Ints, Outcomes, Proposal, Request


@dataclass
class Step:
    """What one step did and how long it took.

    t: time at which it began, by the drafter's clock: that of the outcome before it, if known
    requests: number of requests
    context: tokens of all requests together
    rows: rows of the target's pass
    draft_passes: passes of the draft model
    users: requests that the draft model drafted for
    unread: tokens that the first of these passes read
    caught_up: tokens that the draft model read for requests it did not draft for yet
    drafted: seconds of the draft model's passes
    model: the draft model that had a part in it; "" if none had
    without: tokens per second that were expected without that model
    follows: whether it followed another step at once
    ahead: whether it was launched before the step before it was read
    on_device: who drafted on the device; "" if the host made its drafts
    proposed: time at which the proposal was ready
    seconds: time of the whole step, drafting included
    drafters: number of requests that each drafter served; counted for `on_step` only
    tokens: emitted tokens
    padded: whether the target's pass was a padded one: see `StepCost`
    """

    t: float
    requests: int
    context: int
    rows: int = 0
    draft_passes: int = 0
    users: int = 0
    unread: int = 0
    caught_up: int = 0
    drafted: float = 0.0
    model: str = ""
    without: float = 0.0
    follows: bool = False
    ahead: bool = False
    on_device: str = ""
    proposed: float = 0.0
    seconds: float = 0.0
    drafters: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    padded: bool = False

    @property
    def speculated(self) -> bool:
        """Whether the target verified any draft."""
        return self.rows > self.requests

    @property
    def host_seconds(self) -> float:
        """Seconds from the outcome before it to the proposal, without draft passes."""
        return self.proposed - self.t - self.drafted

    @property
    def target_seconds(self) -> float:
        """Seconds from the proposal to the outcome: the target's pass and all around it."""
        return self.t + self.seconds - self.proposed

    def as_dict(self) -> dict[str, Any]:
        """Return the step as a line of a trace."""
        return {
            "t": round(self.t, 6),
            "seconds": round(self.seconds, 6),
            "draft_seconds": round(self.drafted, 6),
            "requests": self.requests,
            "context": self.context,
            "rows": self.rows,
            "ahead": self.ahead,
            "on_device": self.on_device,
            "draft_passes": self.draft_passes,
            "unread": self.unread,
            "drafters": self.drafters,
            "tokens": self.tokens,
        }


@dataclass(frozen=True, eq=False)
class Proposed:
    """The proposal of a step, and where its drafts come from.

    sources: [M] index of the offer that each draft comes from
    """

    requests: Sequence[Request]
    proposal: Proposal
    sources: Ints
    offers: Sequence[Offer]

    def names(self) -> list[str]:
        """Return the drafter of each request: that of its first draft; "" without drafts."""
        names, starts = [""] * len(self.requests), self.proposal.starts
        for r in np.flatnonzero(self.proposal.num_drafts).tolist():
            names[r] = self.offers[self.sources[starts[r]]].name
        return names


@dataclass(frozen=True, eq=False)
class Done:
    """A step that is over, with all that is learned from it.

    offers: what each drafter proposed
    rows: [B] of the requests: see `Acceptance.rows`
    """

    step: Step
    offers: Sequence[Offer]
    rows: Ints
    outcomes: Outcomes


class TraceFile:
    """Appends each step to a file, as one line of JSON."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def __call__(self, step: Step) -> None:
        """Append a step."""
        with self._path.open("a") as lines:
            lines.write(json.dumps(step.as_dict()) + "\n")
