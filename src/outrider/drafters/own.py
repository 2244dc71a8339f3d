"""Requests of the drafter's own: whatever it writes into them changes no answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.core import Budget, Drafter, Outcome, Outcomes, Proposal, Request


class OwnRequests:
    """A drafter that is given copies of the requests, which are extended as the requests are."""

    def __init__(self, drafter: Drafter) -> None:
        self.name = drafter.name
        self.hidden_layers: tuple[int, ...] = tuple(getattr(drafter, "hidden_layers", ()))
        if (work := getattr(drafter, "meanwhile", None)) is not None:
            self.meanwhile: Callable[[], None] = work
        self._drafter = drafter
        self._copies: dict[int, Request] = {}

    def start(self, requests: Sequence[Request]) -> None:
        """Copy the requests as they are now, and tell the drafter."""
        self._copies |= {request.id: copied(request) for request in requests}
        self._drafter.start(self._own(requests))

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Return the drafter's proposal."""
        return self._drafter.propose(self._own(requests), budget)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Tell the drafter, and extend its copies."""
        done = Outcomes.of(outcomes)
        own = self._own(done.requests)
        arrays = {name: getattr(done, name).copy() for name in ("tokens", "rows", "num_tokens")}
        self._drafter.observe(replace(done, requests=own, **arrays))
        replace(done, requests=own).apply()

    def stop(self, requests: Sequence[Request]) -> None:
        """Drop the copies, and tell the drafter."""
        own = self._own(requests)
        for request in requests:
            del self._copies[request.id]
        self._drafter.stop(own)

    def _own(self, requests: Sequence[Request]) -> list[Request]:
        missing = (request for request in requests if request.id not in self._copies)
        self._copies |= {request.id: copied(request) for request in missing}
        return [self._copies[request.id] for request in requests]


def copied(request: Request) -> Request:
    """Return a request whose output and bias are its own."""
    bias = dict(request.sampling.logit_bias)
    sampling = replace(request.sampling, logit_bias=bias)
    return replace(request, sampling=sampling, output=[*request.output])
