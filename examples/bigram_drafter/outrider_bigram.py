"""A drafter of your own: the token that most often followed the last one, again and again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from outrider.core import Budget, Draft, Outcome, PointMass, Proposal, Request, chain


class BigramDrafter:
    """Drafts by a table of which token followed which, learnt from the request's own text.

    min_share: drafts end where the likeliest token has followed less often, as a share
    """

    name = "bigram"

    def __init__(self, min_share: float = 0.5) -> None:
        if not 0 <= min_share <= 1:
            raise ValueError("need 0 <= min_share <= 1")
        self._min_share = min_share
        self._tables: dict[int, defaultdict[int, Counter[int]]] = {}

    def start(self, requests: Sequence[Request]) -> None:
        """Learn the text so far. It may have an output already."""
        for request in requests:
            self._tables[request.id] = defaultdict(Counter)
            self._learn(request, request.tokens_from(0))

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Propose for each request at most its budget of drafts."""
        pairs = zip(requests, budget.max_drafts, strict=True)
        return Proposal.of([self._draft(request, most) for request, most in pairs])

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what was emitted. The requests do not have it yet."""
        for outcome in outcomes:
            self._learn(outcome.request, [outcome.request.last_token, *outcome.tokens])

    def stop(self, requests: Sequence[Request]) -> None:
        """Forget the requests."""
        for request in requests:
            self._tables.pop(request.id, None)

    def _learn(self, request: Request, tokens: Sequence[int]) -> None:
        for token, following in pairwise(tokens):
            self._tables[request.id][token][following] += 1

    def _draft(self, request: Request, most: int) -> Draft[PointMass]:
        """Walk through the table, as long as one token follows often enough."""
        table, last = self._tables[request.id], request.last_token
        tokens: list[int] = []
        shares: list[float] = []
        while len(tokens) < most and (seen := table.get(last)):
            [(last, count)] = seen.most_common(1)
            share = count / seen.total()
            if share < self._min_share:
                break
            tokens.append(last)
            shares.append(share)
        return chain(tokens, confidences=shares)
