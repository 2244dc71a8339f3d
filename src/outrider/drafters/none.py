"""The drafter that proposes nothing: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core import Budget, Outcome, Proposal, Request


class NoDrafter:
    """Proposes nothing, so that each step is one plain decoding step."""

    name = "none"

    def start(self, requests: Sequence[Request]) -> None:
        """Do nothing."""

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Propose no drafts."""
        return Proposal.empty(len(requests))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Do nothing."""

    def meanwhile(self) -> None:
        """Do nothing."""

    def stop(self, requests: Sequence[Request]) -> None:
        """Do nothing."""
