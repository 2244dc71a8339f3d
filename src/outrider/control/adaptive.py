"""The best proposal for each request and step, as a drafter: free ones, a model, or none.

Every step, for the requests at hand:

1. *Free drafters* (suffix, n-gram) propose; that costs microseconds. Calibrated acceptance says
   what each of their drafts is worth.
2. *A draft model* is considered for the requests that the free ones serve worse, to every depth:
   what it is expected to add, over what its passes take on this machine.
3. The plan with the highest goodput is taken: tokens a second, by measured times. Plain decoding is
   one of the plans, and the others must beat it by a margin.
4. If the model drafted, its own confidence is known now: the chains are cut once more.

Times need no help from the host: from a proposal to its outcome is the target's pass, and the
model's passes happen inside.

What is not tried is not forgotten. Free drafters are scored on what was emitted, used or not; the
model is tried again every EXPLORE steps; a batch size never seen starts with a plain step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, repeat
from operator import mul
from typing import Any

from outrider.control.acceptance import Acceptance
from outrider.control.cost import StepCost
from outrider.control.policy import Choice, choose
from outrider.core import Budget, Drafter, Law, Outcome, Proposal, Request
from outrider.drafters import NgramDrafter, SuffixDrafter

MARGIN = 0.05
"""By which share drafting must promise more than plain decoding, and a model more than without."""

EXPLORE = 64
"""Steps after which a draft model that was not worth its time is tried again."""

_AHEAD = "{} ahead"
"""Under this name a model's chances are kept before it has said how sure it is."""


@dataclass
class _Tried:
    """What was offered to a request in a step, and what was taken.

    offers: by free drafter, its tokens and confidences
    used: the drafter whose drafts are verified, and their confidences
    """

    offers: dict[str, tuple[list[int], Sequence[float]]] = field(default_factory=dict)
    used: str = ""
    confidences: Sequence[float] = ()


class AdaptiveDrafter:
    """Chooses, for each request and step, who drafts and how much is verified.

    free: drafters that cost next to nothing, by name
    model: one that costs passes, or None
    margin: by which share a plan must promise more than a simpler one
    clock: seconds, from anywhere
    """

    name = "adaptive"

    def __init__(
        self,
        free: Mapping[str, Drafter],
        model: Drafter | None = None,
        margin: float = MARGIN,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.acceptance, self.cost = Acceptance(), StepCost()
        self._free, self._model, self._margin, self._clock = dict(free), model, margin, clock
        self._proposed: tuple[float, int] | None = None  # when, and how many rows
        self._tried: dict[int, _Tried] = {}
        self._idle = 0  # steps since the model was last asked

    @property
    def _drafters(self) -> list[Drafter]:
        return [*self._free.values(), *([self._model] if self._model else [])]

    def start(self, requests: Sequence[Request]) -> None:
        """Introduce requests to every drafter."""
        for drafter in self._drafters:
            drafter.start(requests)

    def stop(self, requests: Sequence[Request]) -> None:
        """Let every drafter forget, and forget their factors."""
        for drafter in self._drafters:
            drafter.stop(requests)
        for request in requests:
            self.acceptance.forget(request.id)
            self._tried.pop(request.id, None)

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal[Law]:
        """Return what is expected to emit the most tokens a second."""
        proposal = self._plan(requests, budget)
        self._proposed = (self._clock(), proposal.num_rows)
        return proposal

    def _plan(self, requests: Sequence[Request], budget: Budget) -> Proposal[Law]:
        tried = self._tried = {request.id: _Tried() for request in requests}
        offers, names, survival = self._free_offers(requests, budget)
        batch = len(requests)
        if not self.cost.verify.has_seen(batch):
            return Proposal.empty(batch)

        best = choose(survival, self.cost.seconds, self._margin)
        depth, users = self._consult(requests, budget, survival, best)
        if depth:
            drafted = self._ask(requests, budget, depth, users)
            offers = Proposal.pick([(drafted if r in users else offers, r) for r in range(batch)])
            for r in users:
                names[r] = self._model_name
                survival[r] = self._survival(names[r], requests[r], _sure(drafted, r))
            # the model's passes are paid for: only the rows are weighed now
            best = choose(survival, self.cost.seconds)
        proposal = offers.cut(best.counts)
        for r, request in enumerate(requests):
            tried[request.id].used = names[r]
            tried[request.id].confidences = _sure(proposal, r)
        return proposal

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from what became of the drafts, and from what others would have drafted."""
        if self._proposed is not None:
            (when, rows), self._proposed = self._proposed, None
            self.cost.verify.observe(rows, self._clock() - when)
        for outcome in outcomes:
            tried = self._tried.get(outcome.request.id)
            # a request that ended may have ended inside its accepted drafts
            if tried is not None and outcome.finish_reason is None:
                self._learn(outcome, tried)
        for drafter in self._drafters:
            drafter.observe(outcomes)

    @property
    def _model_name(self) -> str:
        assert self._model is not None
        return self._model.name

    def _learn(self, outcome: Outcome, tried: _Tried) -> None:
        request, accepted = outcome.request.id, outcome.num_accepted_drafts
        if tried.confidences:
            if self._model is not None and tried.used == self._model.name:
                certain = list(repeat(1.0, len(tried.confidences)))
                self.acceptance.observe(_AHEAD.format(tried.used), request, certain, accepted)
            if tried.used not in tried.offers:
                self.acceptance.observe(tried.used, request, tried.confidences, accepted)
        for name, (tokens, confidences) in tried.offers.items():
            right = 0
            while right < min(len(tokens), len(outcome.tokens)) and (
                tokens[right] == outcome.tokens[right]
            ):
                right += 1
            # where the emitted tokens end, the offer may have been right for longer
            known = confidences if right < len(outcome.tokens) else confidences[:right]
            self.acceptance.observe(name, request, known, right)

    def _free_offers(
        self, requests: Sequence[Request], budget: Budget
    ) -> tuple[Proposal[Law], list[str], list[list[float]]]:
        """Return each request's best free offer, who made it, and the survival of its drafts."""
        chosen: list[tuple[float, str, list[float]]] = [(0.0, "", []) for _ in requests]
        proposals: dict[str, Proposal[Law]] = {"": Proposal.empty(len(requests))}
        for name, drafter in self._free.items():
            proposals[name] = proposal = drafter.propose(requests, budget)
            tokens = proposal.tokens.tolist()
            for r, request in enumerate(requests):
                sure = _sure(proposal, r)
                mine = tokens[proposal.starts[r] : proposal.starts[r + 1]]
                self._tried[request.id].offers[name] = (mine, sure)
                survival = self._survival(name, request, sure)
                if sum(survival) > chosen[r][0]:
                    chosen[r] = (sum(survival), name, survival)
        names = [name for _, name, _ in chosen]
        offers = Proposal.pick([(proposals[name], r) for r, name in enumerate(names)])
        return offers, names, [s for _, _, s in chosen]

    def _survival(self, name: str, request: Request, sure: Sequence[float]) -> list[float]:
        return self.acceptance.survival(name, request.id, sure)

    def _consult(
        self,
        requests: Sequence[Request],
        budget: Budget,
        survival: Sequence[Sequence[float]],
        without: Choice,
    ) -> tuple[int, set[int]]:
        """Return how deep the model should draft, and for whom; (0, nobody) if not at all."""
        if self._model is None:
            return 0, set()
        able = {r for r, most in enumerate(budget.max_drafts) if most}
        self._idle += 1
        if able and (not self.cost.draft.is_known or self._idle > EXPLORE):
            return 1, able
        ahead = _AHEAD.format(self._model.name)
        chances = [self.acceptance.chances(ahead, request.id, [1.0])[0] for request in requests]
        worth = [sum(chain) for chain in survival]
        best, depth, users = without.goodput * (1 + self._margin), 0, set[int]()
        for d in range(1, max(budget.max_drafts, default=0) + 1):
            chains: list[Sequence[float]] = []
            drafting = set()
            for r, chance in enumerate(chances):
                own = list(accumulate(repeat(chance, min(d, budget.max_drafts[r])), mul))
                if sum(own) > worth[r]:
                    drafting.add(r)
                chains.append(own if r in drafting else survival[r])
            if not drafting:
                break
            found = choose(
                chains, partial(self.cost.seconds, draft_passes=d, drafting=len(drafting))
            )
            if found.goodput > best:
                best, depth, users = found.goodput, d, drafting
        return depth, users

    def _ask(
        self, requests: Sequence[Request], budget: Budget, depth: int, users: set[int]
    ) -> Proposal[Law]:
        assert self._model is not None
        self._idle = 0
        most = tuple(min(depth, k) if r in users else 0 for r, k in enumerate(budget.max_drafts))
        started = self._clock()
        drafted = self._model.propose(requests, replace(budget, max_drafts=most))
        # it may have stopped before `depth`; a pass also reads what was emitted since the last
        passes = max(1, *drafted.num_drafts)
        self.cost.draft.observe(len(users), (self._clock() - started) / passes)
        return drafted


def adaptive_drafter(model: Drafter | None = None, **options: Any) -> AdaptiveDrafter:
    """Return one that chooses among all free drafters, a draft model and none.

    Nobody is to hold back: how far to go is for the control to learn.
    """
    return AdaptiveDrafter(
        {"suffix": SuffixDrafter(min_vote=0.0), "ngram": NgramDrafter()}, model, **options
    )


def _sure(proposal: Proposal[Law], r: int) -> Sequence[float]:
    return proposal.confidences[proposal.starts[r] : proposal.starts[r + 1]]
