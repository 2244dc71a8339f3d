"""A lookup of the CPU that indexes a text when it is first asked about it.

While the device looks drafts up, nothing asks the CPU's lookup, and its index would be work in
every step.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core import Budget, Drafter, Outcome, Outcomes, Proposal, Request


class LazyLookup:
    """A drafter that knows the requests that it was asked about lately. drafter: that looks up"""

    def __init__(self, drafter: Drafter) -> None:
        self.name, self._drafter = drafter.name, drafter
        self._known: set[int] = set()

    def start(self, requests: Sequence[Request]) -> None:
        """Do nothing."""

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Index texts that are not, and return what the drafter proposes."""
        new = [request for request in requests if request.id not in self._known]
        if new:
            self._drafter.start(new)
            self._known.update(request.id for request in new)
        return self._drafter.propose(requests, budget)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Extend the texts. If some of the requests are not known, none is asked about."""
        if not self._known:
            return
        requests = Outcomes.of(outcomes).requests
        if all(request.id in self._known for request in requests):
            self._drafter.observe(outcomes)
        else:
            self.stop(requests)

    def stop(self, requests: Sequence[Request]) -> None:
        """Forget the requests."""
        known = [request for request in requests if request.id in self._known]
        if known:
            self._drafter.stop(known)
            self._known.difference_update(request.id for request in known)
