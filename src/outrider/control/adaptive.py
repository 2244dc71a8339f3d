"""The best proposal for each request and step, as a drafter: free ones, a model, or none.

Every step, for the requests at hand:

1. *Free drafters* (suffix, n-gram) propose; that costs microseconds. Calibrated acceptance says
   what each of their drafts is worth.
2. *A draft model* is considered for the requests that the free ones serve worse, to every depth:
   what it is expected to add, over what its passes take on this machine. It stops by itself where
   one more pass promises less than its time is worth.
3. What they say is joined into one tree for each request (where the host verifies no trees: the
   best chain of them).
4. Of all drafts those are verified that make the highest goodput: tokens a second, by measured
   times. Plain decoding is one of the plans, and the others must beat it by a margin.

Times need no help from the host: from a proposal to its outcome is the target's pass, and the
model's passes happen inside. On several ranks they must be one rank's times (`clock`): all decide
alike then.

What is not tried is not forgotten. Free drafters are scored on what was emitted, used or not; the
model is also tried where it would be worth it if the hopes for a request came true, and hopes
grow again while it rests; a batch size never seen starts with a plain step, and where drafts win
little there is one now and then. And whatever was planned, a brake compares what was measured with
plain decoding.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat
from operator import mul
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.control.acceptance import Acceptance
from outrider.control.brake import Brake
from outrider.control.cost import KNOTS, StepCost
from outrider.control.policy import Choice, choose
from outrider.core import (
    ROOT,
    Budget,
    Draft,
    Drafter,
    Law,
    Outcome,
    Proposal,
    Request,
    chain,
    likeliest,
    survival,
    unite,
)
from outrider.drafters import NgramDrafter, SuffixDrafter

MARGIN = 0.05
"""By which share drafting must promise more than plain decoding, and a model more than without."""

CHECK, CLOSE = 16, 1.2
"""Where a plan promises less than CLOSE times plain decoding, every CHECK-th step is plain: what is
compared with must have been measured lately."""

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""How deep a draft model is considered."""

_AHEAD = "{} ahead"
"""Under this name a model's chances are kept before it has said how sure it is."""


class PassingDrafter(Drafter, Protocol):
    """A drafter that costs passes of a model, the first of which reads what is new to it."""

    def unread(self, request: Request) -> int:
        """Return how many tokens of a request the next pass will read."""
        ...

    def ready(self, request: Request) -> bool:
        """Say whether the next pass can draft for a request, or it must be caught up first."""
        ...

    def catch_up(self, requests: Sequence[Request]) -> int:
        """Read a part of what is unread of requests that are not ready. Return how many tokens."""
        ...


@dataclass
class _Plan:
    """What was offered to a request in a step, and what was made of it.

    offers: drafters and what they said, the draft model first
    tree: all of it, or the best of it
    survival: of each draft of the tree
    sources: for each of them, who said it first
    used: who said the first of those that are verified; "" if none is
    """

    offers: list[tuple[str, Draft[Law]]] = field(default_factory=list)
    tree: Draft[Law] = field(default_factory=lambda: chain(()))
    survival: list[float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    used: str = ""


@dataclass
class Step:
    """What one step was and took, as it is traced.

    t: when it began, by the drafter's clock
    seconds: that it took, drafting included
    requests, rows, draft_passes: of the step
    unread: tokens that the first of these passes read
    caught_up: tokens that the model read of requests it did not draft for yet
    drafters: how many requests each drafter served
    tokens: that it emitted
    """

    t: float
    requests: int
    context: int
    rows: int = 0
    draft_passes: int = 0
    unread: int = 0
    caught_up: int = 0
    drafted: float = 0.0
    proposed: float = 0.0
    seconds: float = 0.0
    drafters: Counter[str] = field(default_factory=Counter)
    tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return it as a line of a trace."""
        return {
            "t": round(self.t, 6),
            "seconds": round(self.seconds, 6),
            "draft_seconds": round(self.drafted, 6),
            **{name: getattr(self, name) for name in ("requests", "context", "rows")},
            **{name: getattr(self, name) for name in ("draft_passes", "unread")},
            **{name: getattr(self, name) for name in ("drafters", "tokens")},
        }


class AdaptiveDrafter:
    """Chooses, for each request and step, who drafts and how much is verified.

    free: drafters that cost next to nothing, by name
    model: one that costs passes, or None
    margin: by which share a plan must promise more than a simpler one
    clock: seconds, from anywhere
    knots: numbers of rows for which the host has captured graphs, if it has
    on_step: is told of each step
    """

    name = "adaptive"

    def __init__(
        self,
        free: Mapping[str, Drafter],
        model: PassingDrafter | None = None,
        margin: float = MARGIN,
        clock: Callable[[], float] = time.perf_counter,
        knots: Sequence[int] = KNOTS,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.acceptance, self.cost, self.brake = Acceptance(), StepCost(knots), Brake()
        self._free, self._model, self._margin, self._clock = dict(free), model, margin, clock
        self._on_step = on_step
        self._step: Step | None = None
        self._plans: dict[int, _Plan] = {}
        # steps since the model last drafted for a request, and for anyone
        self._idle: dict[int, int] = {}
        self._rest = 0
        self._since_plain: Counter[int] = Counter()  # steps, by knots of the batch
        self._drafters: list[Drafter] = [*self._free.values(), *([model] if model else [])]
        names = [*self._free, *([model.name] if model is not None else [])]
        self._siblings = {name: f"{name} sibling" for name in names}

    def start(self, requests: Sequence[Request]) -> None:
        """Introduce the requests to every drafter."""
        for drafter in self._drafters:
            drafter.start(requests)

    def stop(self, requests: Sequence[Request]) -> None:
        """Let every drafter forget, and forget what was learnt of the requests."""
        for drafter in self._drafters:
            drafter.stop(requests)
        for request in requests:
            self.acceptance.forget(request.id)
            self._plans.pop(request.id, None)
            self._idle.pop(request.id, None)

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal[Law]:
        """Return what is expected to emit the most tokens a second."""
        context = sum(request.length for request in requests)
        self._step = step = Step(self._clock(), len(requests), context)
        plans = [_Plan() for _ in requests]
        self._plans = {request.id: plan for request, plan in zip(requests, plans, strict=True)}
        if not self.brake.is_on:
            self._offer_free(requests, budget, plans)
        best = self._choose(requests, budget, plans, step)
        drafts = []
        for plan, nodes in zip(plans, best.nodes, strict=True):
            if nodes:
                plan.used = plan.sources[nodes[0]]
                step.drafters[plan.used] += 1
            drafts.append(plan.tree.keep(nodes))
        proposal = Proposal.of(drafts)
        step.rows, step.proposed = proposal.num_rows, self._clock()
        return proposal

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from what became of the drafts, and from what others would have drafted."""
        if self._step is not None:
            self._end_step(self._step, outcomes)
        for outcome in outcomes:
            plan = self._plans.get(outcome.request.id)
            # a request that ended may have ended inside its accepted drafts
            if plan is not None and outcome.finish_reason is None:
                self._learn(outcome, plan)
        for drafter in self._drafters:
            drafter.observe(outcomes)

    def used(self, request: Request) -> str:
        """Return who drafted for a request in the last step; "" if nobody."""
        plan = self._plans.get(request.id)
        return plan.used if plan is not None else ""

    def _end_step(self, step: Step, outcomes: Sequence[Outcome]) -> None:
        self._step, now = None, self._clock()
        step.seconds, step.tokens = now - step.t, sum(len(o.tokens) for o in outcomes)
        # a device makes the target wait for what is queued before: such a step says nothing
        if not step.caught_up:
            self._learn_times(step, now - step.proposed)
        if self._on_step is not None:
            self._on_step(step)

    def _learn_times(self, step: Step, seconds: float) -> None:
        """Learn from a step, of which so many seconds were the target's pass."""
        self.cost.observe(step.rows, step.context, seconds)
        if step.rows == step.requests:
            self._since_plain[self.cost.verify.knot(step.rows)] = 0
        plain = self.cost.table(step.requests, step.context)[-1] / step.requests
        self.brake.observe(step.rows > step.requests, step.seconds, step.tokens * float(plain))

    # -- what there is

    def _offer_free(
        self, requests: Sequence[Request], budget: Budget, plans: Sequence[_Plan]
    ) -> None:
        for name, drafter in self._free.items():
            drafts = drafter.propose(requests, budget).drafts()
            for plan, draft in zip(plans, drafts, strict=True):
                if draft.tokens:
                    plan.offers.append((name, draft))
        for request, plan, most in zip(requests, plans, budget.max_drafts, strict=True):
            self._grow(request, plan, budget.trees, most)

    def _grow(self, request: Request, plan: _Plan, trees: bool, most: int) -> None:
        """Make a tree of the offers, and say what each of its drafts is worth."""
        if not plan.offers:
            return
        chances = [self._chances(name, request, draft) for name, draft in plan.offers]
        if trees and len(plan.offers) > 1:
            found = _join(plan, chances)
        else:
            worth = [sum(accumulate(offered, mul)) for offered in chances]
            best = worth.index(max(worth))
            (name, plan.tree), found = plan.offers[best], chances[best]
            plan.sources = [name] * len(found)
        plan.survival = survival(plan.tree.parents, found)
        if len(found) > most:
            nodes = likeliest(plan.survival, most)
            plan.tree = plan.tree.keep(nodes)
            plan.survival = [plan.survival[node] for node in nodes]
            plan.sources = [plan.sources[node] for node in nodes]

    def _chances(self, name: str, request: Request, draft: Draft[Law]) -> list[float]:
        first = self.acceptance.chances(name, request.id)
        others = self.acceptance.chances(self._siblings[name], request.id)
        seen: set[int] = set()
        found = []
        for parent, sure in zip(draft.parents, draft.sure, strict=True):
            found.append((others if parent in seen else first).of(sure))
            seen.add(parent)
        return found

    # -- what is worth it

    def _choose(
        self, requests: Sequence[Request], budget: Budget, plans: Sequence[_Plan], step: Step
    ) -> Choice:
        batch = len(requests)
        nothing = Choice(((),) * batch, float(batch), 0.0)
        if self.brake.is_on or not self.cost.verify.has_seen(batch):
            return nothing
        rows = batch + sum(budget.max_drafts)
        seconds = self.cost.table(rows, step.context)
        best = choose([plan.survival for plan in plans], seconds, self._margin)
        goodput, users = self._consult(requests, budget, plans, best, seconds, step)
        size = self.cost.verify.knot(batch)
        self._since_plain[size] += 1
        if self._since_plain[size] >= CHECK and goodput * seconds[batch] < CLOSE * batch:
            return nothing
        if users:
            self._ask(requests, budget, plans, users, goodput, step)
            # the model's passes are paid for, but their time is part of the step
            best = choose([plan.survival for plan in plans], seconds + step.drafted)
        return best

    def _consult(
        self,
        requests: Sequence[Request],
        budget: Budget,
        plans: Sequence[_Plan],
        without: Choice,
        seconds: NDArray[np.float64],
        step: Step,
    ) -> tuple[float, set[int]]:
        """Return the goodput to expect, and for whom the model should draft; for nobody, maybe.

        Besides those for whom it is worth it, those for whom it may be: hope decides who is tried,
        not what is expected.
        """
        if self._model is None:
            return without.goodput, set()
        ahead = _AHEAD.format(self._model.name)
        chances, hopes = [], []
        self._rest += 1
        for request in requests:
            mine = self.acceptance.chances(ahead, request.id)
            idle = self._idle[request.id] = self._idle.get(request.id, self._rest - 1) + 1
            chances.append(mine.of(1.0))
            hopes.append(mine.hope(1.0, idle))
        unread = [self._model.unread(request) for request in requests]
        ready = [self._model.ready(request) for request in requests]
        if not all(ready):
            # reading costs once and serves all later steps: it is not held against this one
            ones = [1] * len(requests)
            wanted = self._best_users(hopes, without.goodput, budget, plans, ones, seconds)[1]
            behind = [requests[r] for r in sorted(wanted) if not ready[r]]
            step.caught_up = self._model.catch_up(behind)
            most = tuple(k if ok else 0 for k, ok in zip(budget.max_drafts, ready, strict=True))
            budget = replace(budget, max_drafts=most)
        given = budget, plans, unread, seconds
        expected, users = self._best_users(chances, without.goodput, *given)
        if len(users) < len(requests):
            users |= self._best_users(hopes, expected, *given)[1]
        return expected, users

    def _best_users(
        self,
        chances: Sequence[float],
        goodput: float,
        budget: Budget,
        plans: Sequence[_Plan],
        unread: Sequence[int],
        seconds: NDArray[np.float64],
    ) -> tuple[float, set[int]]:
        """Return the best goodput with the model, and who would use it; nobody if not worth it.

        chances: for each request, of each draft that the model would make
        goodput: what there is without, to be beaten by the margin
        unread: for each request, the tokens that the model has to read first
        seconds: of a step with so many rows, without drafting
        """
        worth = [sum(plan.survival) for plan in plans]
        best, found = goodput * (1 + self._margin), set[int]()
        deepest = max(budget.max_drafts, default=0)
        for depth in (d for d in DEPTHS if d <= deepest):
            chains: list[Sequence[float]] = []
            users = set()
            for r, chance in enumerate(chances):
                own = list(accumulate(repeat(chance, min(depth, budget.max_drafts[r])), mul))
                if sum(own) > worth[r]:
                    users.add(r)
                chains.append(own if r in users else plans[r].survival)
            if not users:
                continue
            passes = self.cost.drafting(depth, len(users), sum(unread[r] for r in users))
            plan = choose(chains, seconds + passes)
            if plan.goodput > best:
                best, found = plan.goodput, users
        return (best if found else goodput), found

    def _ask(
        self,
        requests: Sequence[Request],
        budget: Budget,
        plans: Sequence[_Plan],
        users: set[int],
        goodput: float,
        step: Step,
    ) -> None:
        """Let the model draft for some requests, as long as a pass is worth its time."""
        assert self._model is not None
        self._rest = 0
        for r in users:
            self._idle[requests[r].id] = 0
        most = tuple(k if r in users else 0 for r, k in enumerate(budget.max_drafts))
        # one more pass of the model brings one more row of the target's for each user
        rows = self.cost.verify.table(len(requests) + sum(most))
        row = (rows[-1] - rows[len(requests)]) / sum(most)
        gain = goodput * float(self.cost.draft.seconds(len(users)) + len(users) * row)
        gain = min(gain, 0.99 * len(users))  # who is asked drafts at least once
        step.unread = sum(self._model.unread(requests[r]) for r in users)
        started = self._clock()
        asked = replace(budget, max_drafts=most, min_gain=gain, chance=self._model_chance)
        proposal = self._model.propose(requests, asked)
        step.drafted = self._clock() - started
        step.draft_passes = max(1, proposal.max_depth)  # a chain as long as the deepest draft
        if not step.caught_up:
            self.cost.observe_drafting(step.draft_passes, len(users), step.unread, step.drafted)
        for r, draft in enumerate(proposal.drafts()):
            if draft.tokens:
                plans[r].offers.insert(0, (self._model.name, draft))
                self._grow(requests[r], plans[r], budget.trees, budget.max_drafts[r])

    def _model_chance(self, request: Request, confidence: float) -> float:
        """Return a chance to go on by: what was learnt on other texts may be too good for this."""
        assert self._model is not None
        return min(confidence, self.acceptance.chances(self._model.name, request.id).of(confidence))

    # -- what became of it

    def _learn(self, outcome: Outcome, plan: _Plan) -> None:
        """Score all that was offered by what was emitted."""
        request, emitted = outcome.request, outcome.tokens
        for name, draft in plan.offers:
            first = self.acceptance.chances(name, request.id)
            others = self.acceptance.chances(self._siblings[name], request.id)
            is_model = self._model is not None and name == self._model.name
            ahead = self.acceptance.chances(_AHEAD.format(name), request.id) if is_model else None
            depths = {ROOT: 0}  # of the drafts that are part of the text
            seen: set[int] = set()
            for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
                depth = depths.get(parent)
                # where the emitted tokens end, the offer may have been right for longer
                if depth is None or depth >= len(emitted):
                    continue
                hit = token == emitted[depth]
                (others if parent in seen else first).observe(draft.sure[node], hit)
                if ahead is not None and parent not in seen:
                    ahead.observe(1.0, hit)
                seen.add(parent)
                if hit:
                    depths[node] = depth + 1


def _join(plan: _Plan, chances: Sequence[Sequence[float]]) -> list[float]:
    """Join the offers into one tree. Return the chance of each of its drafts, given its parent."""
    plan.tree, places = unite([draft for _, draft in plan.offers])
    found = [0.0] * len(plan.tree.tokens)
    plan.sources = [""] * len(found)
    taken: defaultdict[int, float] = defaultdict(float)  # chance of a node's children so far
    for (name, _), mine, offered in zip(plan.offers, places, chances, strict=True):
        before = taken.copy()
        for node, chance in zip(mine, offered, strict=True):
            if not plan.sources[node]:
                # another drafter has spoken for the same place: both cannot be right
                parent = plan.tree.parents[node]
                found[node] = chance * (1.0 - min(1.0, before[parent]))
                plan.sources[node] = name
                taken[parent] += found[node]
            else:
                found[node] = max(found[node], chance)
    return found


def adaptive_drafter(
    model: PassingDrafter | None = None, trace: str | Path | None = None, **options: Any
) -> AdaptiveDrafter:
    """Return one that chooses among all free drafters, a draft model and none.

    Nobody is to hold back: how far to go is for the control to learn.

    trace: a file to which each step is appended, as a line of JSON
    """
    free = {"suffix": SuffixDrafter(min_vote=0.0), "ngram": NgramDrafter()}
    if trace is not None:
        file = Path(trace)

        def write(step: Step) -> None:
            with file.open("a") as lines:
                lines.write(json.dumps(step.as_dict()) + "\n")

        options["on_step"] = write
    return AdaptiveDrafter(free, model, **options)
