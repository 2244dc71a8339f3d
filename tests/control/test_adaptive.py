"""The adaptive drafter in a made-up world whose best plan is known.

A world is a text that every request will emit, drafters that are right with known chances, and
times of passes. Time is counted, not measured, with noise.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from outrider.control.adaptive import EXPLORE, AdaptiveDrafter
from outrider.core import Budget, KeyedCoins, Outcome, Proposal, chain

K = 6


class Guesser:
    """Drafts the coming text, each token right with a chance that may change."""

    def __init__(self, name, chance, seed=0, known=True):
        self.name, self.chance, self.known = name, chance, known
        self.rng, self.asked = random.Random(seed), 0

    def start(self, requests):
        pass

    stop = observe = start

    def propose(self, requests, budget):
        self.asked += 1
        drafts = []
        for request, most in zip(requests, budget.max_drafts, strict=True):
            right = [self.rng.random() < self.chance for _ in range(most)]
            tokens = [request.text(i) if yes else -1 for i, yes in enumerate(right)]
            drafts.append(chain(tokens, confidences=[0.8] * most if self.known else ()))
        return Proposal.of(drafts)


class World:
    def __init__(self, batch=1, verify=lambda rows: 0.1, draft=lambda n: 0.02, seed=1):
        self.requests = [
            SimpleNamespace(id=r, output=[], text=lambda i, r=r: self.emitted[r] + i)
            for r in range(batch)
        ]
        self.emitted = [0] * batch
        self.verify, self.draft, self.rng = verify, draft, random.Random(seed)
        self.seconds, self.drafts = 0.0, []

    def noise(self):
        return self.rng.lognormvariate(0, 0.05)

    def step(self, drafter, model=None):
        budget = Budget((K,) * len(self.requests), "match", KeyedCoins(), trees=False)
        asked = model.asked if model else 0
        proposal = drafter.propose(self.requests, budget)
        if model and model.asked > asked:
            passes = max(drafter._tried[r.id].asked for r in self.requests)
            spent = passes * self.draft(len(self.requests)) * self.noise()
            self.seconds += spent
            drafter.timed_draft(len(self.requests), passes, spent)
        took = self.verify(proposal.num_rows) * self.noise()
        self.seconds += took
        if hasattr(drafter, "timed"):
            drafter.timed(len(self.requests), proposal.num_rows, took)
        tokens = proposal.tokens.tolist()
        outcomes = []
        for r, request in enumerate(self.requests):
            mine = tokens[proposal.starts[r] : proposal.starts[r + 1]]
            right = 0
            while right < len(mine) and mine[right] == request.text(right):
                right += 1
            new = tuple(request.text(i) for i in range(right + 1))
            rows = tuple(range(len(new)))
            outcomes.append(Outcome(request, new, rows, len(mine), right, None))
        drafter.observe(outcomes)
        for r, outcome in enumerate(outcomes):
            self.emitted[r] += len(outcome.tokens)
        self.drafts.append(proposal.num_drafts)

    def run(self, drafter, steps, model=None):
        """Return tokens a second over these steps."""
        tokens, seconds = sum(self.emitted), self.seconds
        for _ in range(steps):
            self.step(drafter, model)
        return (sum(self.emitted) - tokens) / (self.seconds - seconds)


class Fixed:
    """Always so many drafts of one drafter."""

    def __init__(self, drafter, count):
        self.drafter, self.count = drafter, count

    def propose(self, requests, budget):
        return self.drafter.propose(requests, budget).cut([self.count] * len(requests))

    def observe(self, outcomes):
        pass


def stairs(rows):
    return 0.1 * (1 + 0.5 * ((rows - 1) // 8))


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("verify", [lambda rows: 0.1, stairs, lambda rows: 0.02 * rows])
def test_as_good_as_the_best_fixed_number_of_drafts(chance, batch, verify):
    """And so never much slower than plain decoding, which is one of them."""
    fixed = [World(batch, verify).run(Fixed(Guesser("free", chance), k), 400) for k in range(K + 1)]
    world, drafter = World(batch, verify), AdaptiveDrafter({"free": Guesser("free", chance)})
    world.run(drafter, 60)
    assert world.run(drafter, 400) >= 0.95 * max(fixed)


def test_requests_are_served_by_who_serves_them_best():
    """Two free drafters, each right about one half of the requests."""
    good, bad = Guesser("a", 0.9), Guesser("b", 0.9, seed=1)

    class Half(Guesser):
        def __init__(self, name, mine):
            super().__init__(name, 0.0)
            self.mine = mine

        def propose(self, requests, budget):
            drafts = []
            for r, most in zip(requests, budget.max_drafts, strict=True):
                hit = 0.9 if r.id % 2 == self.mine else 0.1
                right = [self.rng.random() < hit for _ in range(most)]
                tokens = [r.text(i) if yes else -1 for i, yes in enumerate(right)]
                drafts.append(chain(tokens, confidences=[0.5] * most))
            return Proposal.of(drafts)

    drafter = AdaptiveDrafter({"a": Half("a", 0), "b": Half("b", 1)})
    world = World(4, stairs)
    world.run(drafter, 60)
    assert [drafter._tried[r].used for r in range(4)] == ["a", "b", "a", "b"]
    assert good.asked == bad.asked == 0


def test_a_change_of_text_is_followed():
    """Prose, then a long copy: how many steps until the drafts are long again."""
    free = Guesser("free", 0.05)
    world, drafter = World(1, lambda rows: 0.02 * (4 + rows)), AdaptiveDrafter({"free": free})
    world.run(drafter, 100)
    assert sum(d[0] for d in world.drafts[-20:]) <= 20
    free.chance = 0.97
    world.run(drafter, 30)
    assert world.drafts[-1][0] >= 4


def test_unknown_batch_sizes_start_plain():
    world, drafter = World(3), AdaptiveDrafter({"free": Guesser("free", 0.9)})
    world.run(drafter, 2)
    assert world.drafts[0] == (0, 0, 0)
    assert sum(world.drafts[1]) > 0


def test_a_drafter_without_confidence_is_calibrated_too():
    world = World(1, lambda rows: 0.05 * (4 + rows))
    drafter = AdaptiveDrafter({"free": Guesser("free", 0.1, known=False)})
    world.run(drafter, 100)
    assert sum(d[0] for d in world.drafts[-20:]) <= 20


def test_requests_that_end_are_forgotten():
    world, drafter = World(2), AdaptiveDrafter({"free": Guesser("free", 0.9)})
    drafter.start(world.requests)
    world.run(drafter, 5)
    drafter.stop(world.requests)
    assert not drafter._tried
    assert not drafter.acceptance._factors


@pytest.mark.parametrize(("pass_seconds", "wanted"), [(0.01, True), (0.2, False)])
def test_a_model_drafts_where_it_is_worth_its_passes(pass_seconds, wanted):
    model = Guesser("model", 0.85)
    world = World(1, lambda rows: 0.1, lambda n: pass_seconds)
    drafter = AdaptiveDrafter({"free": Guesser("free", 0.1)}, model)
    world.run(drafter, 100, model)
    asked = model.asked
    world.run(drafter, 4 * EXPLORE, model)
    share = (model.asked - asked) / (4 * EXPLORE)
    assert share > 0.9 if wanted else share < 0.05  # tried again now and then
    plain = 1 / 0.1
    assert world.run(drafter, 4 * EXPLORE, model) > (2 * plain if wanted else 0.97 * plain)
