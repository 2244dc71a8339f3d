"""Counts of what speculation did. Host integers only: reading them never waits for a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.core.proposal import Ints, Proposal
from outrider.core.settle import Outcome, Outcomes


@dataclass
class Stats:
    """Totals over the steps of a run.

    steps: passes of the target after the prompts' own
    emitted: tokens emitted in those steps
    drafted: draft tokens proposed
    accepted: draft tokens emitted
    accepted_at: how often the draft at each depth (from 1) was accepted
    proposed_at: how often there was a draft at that depth
    request_steps: steps times the requests in each
    fallbacks: requests that went through a step with K = 0 for a fault, by reason
    """

    steps: int = 0
    request_steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    proposed_at: Counter[int] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def record(self, outcomes: Sequence[Outcome], proposal: Proposal) -> None:
        """Add one step."""
        done, deepest = Outcomes.of(outcomes), np.zeros(len(outcomes), np.int64)
        np.maximum.at(deepest, proposal.owners, proposal.depths)
        self.steps += 1
        self.request_steps += len(done)
        self.emitted += len(done.tokens)
        self.drafted += int(done.num_drafts.sum())
        self.accepted += int(done.num_accepted_drafts.sum())
        self.accepted_at.update(at_least(done.num_accepted_drafts))
        self.proposed_at.update(at_least(deepest))

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over proposed ones (0 if none were)."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens emitted by a request in one step, on average: 1 is plain decoding."""
        return self.emitted / self.request_steps if self.request_steps else 0.0


def at_least(values: Ints) -> Counter[int]:
    """Return, for each of 1, 2, ... up to the largest, how many are as large or larger."""
    counts = np.bincount(values, minlength=1)[::-1].cumsum()[::-1].tolist()
    return Counter(dict(enumerate(counts[1:], 1)))
