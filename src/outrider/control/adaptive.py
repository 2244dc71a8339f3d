"""The best proposal for each request and step, as a drafter: free ones, a model, or none.

Every step, for the requests at hand:

1. *Free drafters* (the suffix lookup) propose; that costs microseconds. Calibrated acceptance says
   what each of their drafts is worth.
2. *A draft model* is considered for the requests that the free ones serve worse, to every depth:
   what it is expected to add, over what its passes take on this machine. It stops by itself where
   one more pass promises less than its time is worth.
3. What they say is joined into one tree for each request (where the host verifies no trees: the
   best chain of them).
4. Of all drafts those are verified that make the highest goodput: tokens a second, by measured
   times. Plain decoding is one of the plans, and the others must beat it by a margin.

Times need no help from the host: from a proposal to its outcome is the target's pass, and the
model's passes happen inside. What a step teaches is worked out later (`meanwhile`).

What is not tried is not forgotten. Free drafters are scored on what was emitted, used or not; the
model is also tried where it would be worth it by an optimistic estimate, which grows while the
model rests; a batch size never seen starts with a plain step, and where drafts win
little there is one now and then. And whatever was planned, a brake compares what was measured with
plain decoding.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from outrider.control.acceptance import Acceptance
from outrider.control.brake import Brake
from outrider.control.cost import KNOTS, StepCost
from outrider.control.policy import best_goodput, choose
from outrider.core import (
    Bools,
    Budget,
    Draft,
    Drafter,
    Floats,
    Ints,
    Law,
    Outcome,
    Outcomes,
    Proposal,
    Request,
    chain,
    likeliest,
    survival,
    unite,
)
from outrider.drafters import SuffixDrafter

MARGIN = 0.05
"""By which share drafting must promise more than plain decoding, and a model more than without."""

CHECK, CLOSE = 16, 1.2
"""Where a plan promises less than CLOSE times plain decoding, every CHECK-th step is plain: what is
compared with must have been measured lately."""

TRY = 64
"""Asleep, a model that may be worth its passes is tried after so many steps without it."""

HOPE = 0.997
"""By how much looking before a launch is thought to cost less, after each step without."""

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
class Step:
    """What one step was and took, as it is traced.

    t: when it began, by the drafter's clock
    seconds: that it took, drafting included
    requests, rows, draft_passes: of the step
    unread: tokens that the first of these passes read
    caught_up: tokens that the model read of requests it did not draft for yet
    drafters: how many requests each drafter served
    tokens: that it emitted
    padded: whether it was a padded pass: see `StepCost`
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
    padded: bool = False

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


@dataclass(frozen=True, eq=False)
class _Offer:
    """What a drafter said in a step.

    chances: [M] of each of its drafts, given that all above it are accepted
    """

    name: str
    drafts: Proposal[Law]
    chances: Floats


@dataclass(frozen=True, eq=False)
class _Plan:
    """What there is to choose from: what all drafters said, joined into a tree for each request.

    sources: [M] who said each draft first, as a number of an offer
    survival: [M]
    """

    tree: Proposal[Law]
    sources: Ints
    survival: Floats


@dataclass(frozen=True, eq=False)
class _Last:
    """The last proposal, and whose drafts it has.

    sources: [M] who said each draft, as a number of an offer
    """

    requests: Sequence[Request]
    proposal: Proposal[Law]
    sources: Ints
    offers: Sequence[_Offer]

    def names(self) -> list[str]:
        """Return who drafted for each request: who said its first draft; "" if nobody."""
        names, starts = [""] * len(self.requests), self.proposal.starts
        for r in np.flatnonzero(self.proposal.num_drafts).tolist():
            names[r] = self.offers[self.sources[starts[r]]].name
        return names


@dataclass(frozen=True, eq=False)
class _Done:
    """A step that is over, and what is still to be learnt from it."""

    step: Step
    offers: Sequence[_Offer]
    rows: Ints
    outcomes: Outcomes


class AdaptiveDrafter:
    """Chooses, for each request and step, who drafts and how much is verified.

    free: drafters that cost next to nothing, by name
    model: one that costs passes, or None
    margin: by which share a plan must promise more than a simpler one
    clock: seconds, from anywhere
    knots: numbers of rows for which the host has captured graphs, if it has
    on_step: is told of each step
    exposed: seconds for which a device waits while drafts are looked for before a launch: a host
        that can do without says so (`waited`)
    padded: whether the last proposal is to be verified by a padded pass
    is_asleep: whether launches need not wait for drafts now: such a host may launch plain steps,
        and call `look` while the device works
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
        self.exposed, self.is_asleep, self.padded = 0.0, False, False
        self._observed = clock()
        self._step: Step | None = None
        self._offers: list[_Offer] = []
        self._rows: Ints = np.empty(0, np.int64)
        self._last = _Last((), Proposal.empty(0), self._rows, ())
        self._done: _Done | None = None
        # steps since the model last drafted for a request, and for anyone
        self._idle: dict[int, int] = {}
        self._rest = self._unasked = 0
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
        self.meanwhile()
        for drafter in self._drafters:
            drafter.stop(requests)
        for request in requests:
            self.acceptance.forget(request.id)
            self._idle.pop(request.id, None)

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal[Law]:
        """Return what is expected to emit the most tokens a second."""
        step = self._begin(requests, self._clock())
        self._ask_free(requests, budget)
        plan = self._join(budget)
        plan, nodes = self._choose(requests, budget, plan, step)
        proposal = plan.tree.take(nodes) if len(nodes) else Proposal.empty(len(requests))
        self._last = _Last(requests, proposal, plan.sources[nodes], self._offers)
        step.rows, step.proposed = proposal.num_rows, self._clock()
        self.padded = self.cost.prefers_padded(step.rows, step.context, step.requests)
        return proposal

    def look(self, requests: Sequence[Request], budget: Budget) -> None:
        """Look for the drafts of a step that was launched without, while the device works.

        What they would have been worth is learnt, and whether to wait for them again.
        """
        self.exposed *= HOPE
        step = self._begin(requests, self._observed)
        self._ask_free(requests, budget)
        plan = self._join(budget)
        nothing = np.empty(0, np.int64)
        self._last = _Last(requests, Proposal.empty(len(requests)), nothing, self._offers)
        step.rows, step.proposed = len(requests), step.t
        if self.brake.is_on or not self.cost.verify.has_seen(len(requests)):
            return
        rows = len(requests) + int(budget.max_drafts.sum())
        seconds = self.cost.table(rows, step.context, len(requests))
        # the step emits what the first drafts say, or something else: the next one has the others
        later = plan.survival[plan.tree.depths > 1]
        # a step with drafts waits, and so does the one after it
        is_worth_it = self._is_worth_waiting(later, len(requests), seconds, waits=2)
        if not is_worth_it and self._model is not None:
            self._unasked += 1
            is_worth_it = self._may_use_model(requests, budget, plan, seconds)
        self.is_asleep = not is_worth_it

    def waited(self, seconds: float) -> None:
        """Learn for how long the device waited while drafts were looked for."""
        clipped = min(seconds, 2 * self.exposed) if self.exposed else seconds
        self.exposed += 0.1 * (clipped - self.exposed) if self.exposed else clipped

    def _begin(self, requests: Sequence[Request], t: float) -> Step:
        context = sum(request.length for request in requests)
        self._step = step = Step(t, len(requests), context)
        self._rows = self.acceptance.rows([request.id for request in requests])
        self._offers = []
        if not self.cost.verify.has_seen(len(requests)):
            self.meanwhile()  # it may just have been seen
        return step

    def _ask_free(self, requests: Sequence[Request], budget: Budget) -> None:
        if not self.brake.is_on:
            for name, drafter in self._free.items():
                self._add_offer(name, drafter.propose(requests, budget))

    def _is_worth_waiting(
        self, survival: Floats, batch: int, seconds: Floats, waits: int = 1
    ) -> bool:
        """Say whether drafts win more than it costs to look for them before a launch."""
        plain = batch / float(seconds[batch])
        waiting = best_goodput(survival, batch, seconds + waits * self.exposed)
        return waiting > (1 + self._margin) * plain

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Tell every drafter what was emitted; the rest is learnt later, by `meanwhile`."""
        self.meanwhile()
        self._observed = self._clock()
        done = Outcomes.of(outcomes)
        if self._step is not None:
            step, self._step = self._step, None
            step.seconds, step.tokens = self._clock() - step.t, len(done.tokens)
            step.padded = self.padded and step.rows > step.requests
            self._done = _Done(step, self._offers, self._rows, done)
            if self._on_step is not None:
                step.drafters.update(name for name in self._last.names() if name)
        for drafter in self._drafters:
            drafter.observe(done)

    def meanwhile(self) -> None:
        """Learn from the last step: how long it took, what became of its drafts, and what others
        would have drafted."""
        if self._done is None:
            return
        done, self._done = self._done, None
        self._end_step(done.step)
        for offer in done.offers:
            self._learn(offer, done)

    def used(self, request: Request) -> str:
        """Return who drafted for a request in the last step; "" if nobody."""
        names = zip(self._last.requests, self._last.names(), strict=True)
        return next((name for other, name in names if other is request), "")

    def used_by(self, requests: Sequence[Request]) -> list[str]:
        """Return who drafted for each of the last step's requests; "" if nobody."""
        if self._last.requests is requests:
            return self._last.names()
        return [self.used(request) for request in requests]

    def _end_step(self, step: Step) -> None:
        # a device makes the target wait for what is queued before: such a step says nothing
        if not step.caught_up:
            self._learn_times(step, step.t + step.seconds - step.proposed)
        if self._on_step is not None:
            self._on_step(step)

    def _learn_times(self, step: Step, seconds: float) -> None:
        """Learn from a step, of which so many seconds were the target's pass."""
        self.cost.observe(step.rows, step.context, seconds, step.requests, step.padded)
        if step.rows == step.requests:
            self._since_plain[self.cost.verify.knot(step.rows)] = 0
        plain = self.cost.table(step.requests, step.context, step.requests)[-1] / step.requests
        self.brake.observe(step.rows > step.requests, step.seconds, step.tokens * float(plain))

    # -- what there is

    def _add_offer(self, name: str, drafts: Proposal[Law]) -> None:
        rows, sure = self._rows[drafts.owners], drafts.confidences
        chances = self.acceptance.chances(name).of(rows, sure)
        if not drafts.is_chain:
            beside = drafts.ranks > 0
            others = self.acceptance.chances(self._siblings[name])
            chances[beside] = others.of(rows[beside], sure[beside])
        self._offers.append(_Offer(name, drafts, chances))

    def _join(self, budget: Budget) -> _Plan:
        """Join what was offered, and say what each draft is worth."""
        offers = self._offers
        if not offers:
            return _Plan(Proposal.empty(len(self._rows)), np.empty(0, np.int64), np.empty(0))
        if len(offers) == 1:
            (one,) = offers
            sources = np.zeros(len(one.chances), np.int64)
            return _Plan(one.drafts, sources, _survival(one.drafts, one.chances))
        return _joined(offers, budget)

    # -- what is worth it

    def _choose(
        self, requests: Sequence[Request], budget: Budget, plan: _Plan, step: Step
    ) -> tuple[_Plan, Ints]:
        """Return which drafts to verify, of which plan: the model may have added to it."""
        batch, nothing = len(requests), np.empty(0, np.int64)
        if self.brake.is_on or not self.cost.verify.has_seen(batch):
            self.is_asleep = self.exposed > 0
            return plan, nothing
        rows = batch + int(budget.max_drafts.sum())
        seconds = self.cost.table(rows, step.context, batch)
        best = choose(plan.tree, plan.survival, seconds, self._margin)
        goodput, users = self._consult(requests, budget, plan, best.goodput, seconds, step)
        if self.exposed:
            self.is_asleep = not len(users) and not self._is_worth_waiting(
                plan.survival, batch, seconds
            )
        size = self.cost.verify.knot(batch)
        self._since_plain[size] += 1
        if self._since_plain[size] >= CHECK and goodput * seconds[batch] < CLOSE * batch:
            return plan, nothing
        if len(users):
            self._ask(requests, budget, users, goodput, step)
            plan = self._join(budget)
            # the model's passes are paid for, but their time is part of the step
            best = choose(plan.tree, plan.survival, seconds + step.drafted)
        return plan, best.nodes

    def _consult(
        self,
        requests: Sequence[Request],
        budget: Budget,
        plan: _Plan,
        without: float,
        seconds: Floats,
        step: Step,
    ) -> tuple[float, Ints]:
        """Return the goodput to expect, and for whom the model should draft; for nobody, maybe.

        Besides those for whom it is worth it, those for whom it may be: the optimistic estimate
        decides who is tried, not what is expected.

        without: the goodput without the model
        """
        if self._model is None:
            return without, np.empty(0, np.int64)
        known = self.acceptance.chances(_AHEAD.format(self._model.name))
        sure = np.ones(len(requests))
        unread = np.array([self._model.unread(request) for request in requests])
        chances = self._hopes(requests)
        ready = np.array([self._model.ready(request) for request in requests])
        if not ready.all():
            # reading costs once and serves all later steps: it is not held against this one
            ones = np.ones(len(requests), np.int64)
            wanted = self._best_users(chances, without, budget, plan, ones, seconds)[1]
            behind = [requests[r] for r in np.flatnonzero(wanted & ~ready).tolist()]
            step.caught_up = self._model.catch_up(behind)
            budget = replace(budget, max_drafts=np.where(ready, budget.max_drafts, 0))
        given = budget, plan, unread, seconds
        expected, users = self._best_users(known.of(self._rows, sure), without, *given)
        if not users.all():
            users = users | self._best_users(chances, expected, *given)[1]
        return expected, np.flatnonzero(users)

    def _hopes(self, requests: Sequence[Request]) -> Floats:
        """Return the optimistic estimate of each request's drafts by the model."""
        assert self._model is not None
        self._rest += 1
        idle = [self._idle.get(request.id, self._rest - 1) + 1 for request in requests]
        self._idle.update(zip((request.id for request in requests), idle, strict=True))
        known = self.acceptance.chances(_AHEAD.format(self._model.name))
        return known.optimistic(self._rows, np.ones(len(requests)), np.array(idle))

    def _may_use_model(
        self, requests: Sequence[Request], budget: Budget, plan: _Plan, seconds: Floats
    ) -> bool:
        """Say whether the model is worth waiting for; in every TRY-th step, whether it may be."""
        assert self._model is not None
        batch = len(requests)
        chances, plain = self._hopes(requests), batch / float(seconds[batch])
        if self._unasked < TRY:
            known = self.acceptance.chances(_AHEAD.format(self._model.name))
            chances = known.of(self._rows, np.ones(batch))
        # a step with drafts waits, and so does the one after it
        given = plain, budget, plan, np.ones(batch, np.int64), seconds + 2 * self.exposed
        return bool(self._best_users(chances, *given)[1].any())

    def _best_users(
        self,
        chances: Floats,
        goodput: float,
        budget: Budget,
        plan: _Plan,
        unread: Ints,
        seconds: Floats,
    ) -> tuple[float, Bools]:
        """Return the best goodput with the model, and who would use it; nobody if not worth it.

        chances: for each request, of each draft that the model would make
        goodput: what there is without, to be beaten by the margin
        unread: for each request, the tokens that the model has to read first
        seconds: of a step with so many rows, without drafting
        """
        batch, owners = len(chances), plan.tree.owners
        worth = np.bincount(owners, plan.survival, batch)
        best, found = goodput * (1 + self._margin), np.zeros(batch, np.bool_)
        deepest = int(budget.max_drafts.max(initial=0))
        own = chances[:, None] ** np.arange(1, deepest + 1)
        own[np.arange(deepest) >= budget.max_drafts[:, None]] = 0.0
        for depth in (d for d in DEPTHS if d <= deepest):
            users = own[:, :depth].sum(1) > worth
            if not users.any():
                continue
            chains = np.concatenate([own[users, :depth].ravel(), plan.survival[~users[owners]]])
            passes = self.cost.drafting(depth, int(users.sum()), int(unread[users].sum()))
            promised = best_goodput(chains, batch, seconds + passes)
            if promised > best:
                best, found = promised, users
        return (best if found.any() else goodput), found

    def _ask(
        self, requests: Sequence[Request], budget: Budget, users: Ints, goodput: float, step: Step
    ) -> None:
        """Let the model draft for some requests, as long as a pass is worth its time."""
        assert self._model is not None
        self._rest = self._unasked = 0
        for r in users.tolist():
            self._idle[requests[r].id] = 0
        most = np.zeros(len(requests), np.int64)
        most[users] = budget.max_drafts[users]
        # one more pass of the model brings one more row of the target's for each user
        most_rows = len(requests) + int(most.sum())
        rows = self.cost.table(most_rows, step.context, len(requests))
        row = (rows[-1] - rows[len(requests)]) / most.sum()
        gain = goodput * float(self.cost.draft.seconds(len(users)) + len(users) * row)
        gain = min(gain, 0.99 * len(users))  # who is asked drafts at least once
        step.unread = sum(self._model.unread(requests[r]) for r in users.tolist())
        started = self._clock()
        asked = replace(budget, max_drafts=most, min_gain=gain, chance=self._model_chance)
        proposal = self._model.propose(requests, asked)
        step.drafted = self._clock() - started
        step.draft_passes = max(1, proposal.max_depth)  # a chain as long as the deepest draft
        if not step.caught_up:
            self.cost.observe_drafting(step.draft_passes, len(users), step.unread, step.drafted)
        self._add_offer(self._model.name, proposal)
        self._offers.insert(0, self._offers.pop())  # of two that say the same, it said it first

    def _model_chance(self, request: Request, confidence: float) -> float:
        """Return a chance to go on by: what was learnt on other texts may be too good for this."""
        assert self._model is not None
        rows, known = self.acceptance.rows([request.id]), self.acceptance.chances(self._model.name)
        return min(confidence, float(known.of(rows, np.array([confidence]))[0]))

    # -- what became of it

    def _learn(self, offer: _Offer, done: _Done) -> None:
        """Score what was offered by what was emitted, depth by depth."""
        drafts, outcomes = offer.drafts, done.outcomes
        tokens = drafts.tokens.numpy()
        first, others = (
            self.acceptance.chances(n) for n in (offer.name, self._siblings[offer.name])
        )
        is_model = self._model is not None and offer.name == self._model.name
        ahead = self.acceptance.chances(_AHEAD.format(offer.name)) if is_model else None
        # a request that ended may have ended inside its accepted drafts
        goes_on = np.array([reason is None for reason in outcomes.finish_reasons])
        # where the emitted tokens end, the offer may have been right for longer
        lengths = np.where(goes_on, outcomes.num_tokens, 0)
        right = np.zeros(len(tokens) + 1, np.bool_)
        right[-1] = True  # the root's entry
        for depth in range(drafts.max_depth):
            told = (
                (drafts.depths == depth + 1)
                & right[drafts.above]
                & (depth < lengths[drafts.owners])
            )
            nodes = np.flatnonzero(told)
            if not len(nodes):
                break
            owners = drafts.owners[nodes]
            hits = tokens[nodes] == outcomes.tokens[outcomes.starts[owners] + depth]
            right[nodes] = hits
            for rank in range(int(drafts.ranks[nodes].max()) + 1):
                mine = drafts.ranks[nodes] == rank
                given = done.rows[owners[mine]], drafts.confidences[nodes[mine]], hits[mine]
                (others if rank else first).observe(*given)
                if ahead is not None and rank == 0:
                    ahead.observe(given[0], np.ones(len(given[0])), given[2])


def _survival(drafts: Proposal[Law], chances: Floats) -> Floats:
    """Return the chance of each draft that it and all above it are accepted."""
    if drafts.is_chain:
        table = np.ones((drafts.batch_size, drafts.max_depth))
        table[drafts.owners, drafts.places] = chances
        found: Floats = table.cumprod(1)[drafts.owners, drafts.places]
        return found
    found = np.append(chances, 1.0)
    for depth in range(2, drafts.max_depth + 1):
        level = np.flatnonzero(drafts.depths == depth)
        found[level] *= found[drafts.above[level]]
    return found[:-1]


def _joined(offers: Sequence[_Offer], budget: Budget) -> _Plan:
    """Join the offers into one tree for each request; without trees, take the best chain."""
    drafts = [offer.drafts.drafts() for offer in offers]
    spans = [np.split(offer.chances, offer.drafts.starts[1:-1]) for offer in offers]
    trees: list[Draft[Law]] = []
    sources: list[int] = []
    worth: list[float] = []
    for r, most in enumerate(budget.max_drafts.tolist()):
        mine = [i for i in range(len(offers)) if drafts[i][r].tokens]
        said = [(i, drafts[i][r], spans[i][r].tolist()) for i in mine]
        tree, who, chances = _tree(said, budget.trees)
        alive = survival(tree.parents, chances)
        if len(alive) > most:
            nodes = likeliest(alive, most)
            tree = tree.keep(nodes)
            alive, who = [alive[node] for node in nodes], [who[node] for node in nodes]
        trees.append(tree)
        sources += who
        worth += alive
    return _Plan(Proposal.of(trees), np.array(sources, np.int64), np.array(worth))


Said = tuple[int, Draft[Law], list[float]]
"""The number of an offer, its drafts for one request, and the chance of each."""


def _tree(said: Sequence[Said], trees: bool) -> tuple[Draft[Law], list[int], list[float]]:
    """Return one tree for what several say, who said each draft, and the chance of each."""
    if not said:
        return chain(()), [], []
    if not trees or len(said) == 1:
        worth = [sum(accumulate(chances, mul)) for _, _, chances in said]
        i, draft, chances = said[worth.index(max(worth))]
        return draft, [i] * len(chances), chances
    tree, places = unite([draft for _, draft, _ in said])
    found, who = [0.0] * len(tree.tokens), [-1] * len(tree.tokens)
    taken: defaultdict[int, float] = defaultdict(float)  # chance of a node's children so far
    for (i, _, chances), mine in zip(said, places, strict=True):
        before = taken.copy()
        for node, chance in zip(mine, chances, strict=True):
            if who[node] < 0:
                # another drafter has spoken for the same place: both cannot be right
                parent = tree.parents[node]
                found[node] = chance * (1.0 - min(1.0, before[parent]))
                who[node] = i
                taken[parent] += found[node]
            else:
                found[node] = max(found[node], chance)
    return tree, who, found


def adaptive_drafter(
    model: PassingDrafter | None = None, trace: str | Path | None = None, **options: Any
) -> AdaptiveDrafter:
    """Return one that chooses among all free drafters, a draft model and none.

    Nobody is to hold back: how far to go is for the control to learn.

    trace: a file to which each step is appended, as a line of JSON
    """
    free = {"suffix": SuffixDrafter(min_vote=0.0, min_match=2)}
    if trace is not None:
        file = Path(trace)

        def write(step: Step) -> None:
            with file.open("a") as lines:
                lines.write(json.dumps(step.as_dict()) + "\n")

        options["on_step"] = write
    return AdaptiveDrafter(free, model, **options)
