"""Counts of what speculation did. Host integers only: reading them never waits for a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.proposal import Law, Proposal
from outrider.core.settle import Outcome


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

    def record(self, outcomes: Sequence[Outcome], proposal: Proposal[Law]) -> None:
        """Add one step."""
        depths = [0] * len(outcomes)
        for owner, depth in zip(proposal.owners, proposal.depths, strict=True):
            depths[owner] = max(depths[owner], depth)
        self.steps += 1
        self.request_steps += len(outcomes)
        for outcome, depth in zip(outcomes, depths, strict=True):
            self.emitted += outcome.num_accepted_tokens
            self.drafted += outcome.num_drafts
            self.accepted += outcome.num_accepted_drafts
            self.accepted_at.update(range(1, outcome.num_accepted_drafts + 1))
            self.proposed_at.update(range(1, depth + 1))

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over proposed ones (0 if none were)."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens emitted by a request in one step, on average: 1 is plain decoding."""
        return self.emitted / self.request_steps if self.request_steps else 0.0
