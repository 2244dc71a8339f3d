"""Requests of the drafter's own: whatever it writes into them changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.core import Budget, Drafter, Outcome, Outcomes, Proposal, Request


class OwnRequests:
    """A drafter that is given copies of the requests, which are extended as the requests are."""

    def __init__(self, drafter: Drafter) -> None:
        self.name = drafter.name
        self._drafter = drafter
        self._copies: dict[int, Request] = {}

    def start(self, requests: Sequence[Request]) -> None:
        """Copy new requests, and tell the drafter."""
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
        """Tell the drafter, and drop the copies."""
        self._drafter.stop(self._own(requests))
        for request in requests:
            self._copies.pop(request.id, None)

    def _own(self, requests: Sequence[Request]) -> list[Request]:
        return [self._copies.get(r.id) or self._copy(r) for r in requests]

    def _copy(self, request: Request) -> Request:
        bias = dict(request.sampling.logit_bias)
        sampling = replace(request.sampling, logit_bias=bias)
        self._copies[request.id] = replace(request, sampling=sampling, output=[*request.output])
        return self._copies[request.id]
