"""The tiers: what SGLang's rule does to one number of drafts, in a made-up world."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest

from outrider.control.tiers import INTERVAL, WARM_UP, TieredDrafter
from outrider.core import Budget, FinishReason, KeyedCoins, Outcome, Proposal, chain


class Guesser:
    """Drafts all it may. Keeps what it is told."""

    name = "guesser"

    def __init__(self):
        self.told = []

    def start(self, requests):
        self.told.append(("start", list(requests)))

    def stop(self, requests):
        self.told.append(("stop", list(requests)))

    def observe(self, outcomes):
        self.told.append(("observe", list(outcomes)))

    def propose(self, requests, budget):
        return Proposal.of([chain([7] * most) for most in budget.max_drafts])


def propose(drafter, most=(12,)):
    budget = Budget(tuple(most), "match", KeyedCoins(), trees=False)
    return drafter.propose(
        [SimpleNamespace(id=r) for r in range(len(most))], budget
    ).num_drafts.tolist()


def told(accepted, drafts, finish=None):
    request = SimpleNamespace(id=0)
    tokens = (7,) * (accepted + 1)
    return Outcome(request, tokens, tuple(range(len(tokens))), drafts, accepted, finish)


def run(drafter, chance, steps, batch=1, seed=0):
    """Let drafts be right with this chance. Return the drafts of each step."""
    rng, seen = random.Random(seed), []
    for _ in range(steps):
        counts = propose(drafter, [12] * batch)
        outcomes = []
        for count in counts:
            right = 0
            while right < count and rng.random() < chance:
                right += 1
            outcomes.append(told(right, count))
        drafter.observe(outcomes)
        seen.append(counts)
    return seen


@pytest.mark.parametrize("batch", [1, 8])
def test_up_on_an_easy_text_and_down_on_a_hard_one(batch):
    drafter = TieredDrafter(Guesser())
    assert drafter.drafts == 3
    run(drafter, 0.98, 40, batch)
    assert drafter.drafts == 7
    run(drafter, 0.1, 40, batch)
    assert drafter.drafts == 1
    run(drafter, 0.98, 60, batch)
    assert drafter.drafts == 7


def test_one_number_for_all_within_each_budget():
    drafter = TieredDrafter(Guesser())
    assert propose(drafter, (12, 2, 0, 3)) == [3, 2, 0, 3]


def test_decisions_come_after_the_warm_up_and_at_intervals():
    drafter = TieredDrafter(Guesser())
    seen = run(drafter, 1.0, 40)
    moves = [i for i, (before, after) in enumerate(pairwise(seen), 1) if before != after]
    assert moves == [WARM_UP + INTERVAL]


def test_several_tiers_at_once():
    drafter = TieredDrafter(Guesser(), tiers=(1, 2, 3, 4, 7))
    drafter._at = 4
    run(drafter, 0.0, WARM_UP + INTERVAL)
    assert drafter.drafts == 1


def test_between_the_thresholds_nothing_moves():
    """The average stands at 2.4: too few of 3 to go up (2.5), too many to go down to 1 (0.25)."""
    drafter = TieredDrafter(Guesser())
    for _ in range(100):
        drafter.observe([told(n, 3) for n in (3, 3, 2, 2, 2)])
    assert drafter.drafts == 3
    for _ in range(100):
        drafter.observe([told(n, 3) for n in (1, 0, 0, 1)])  # 0.5
    assert drafter.drafts == 3


def test_one_number_of_the_whole_batch_cannot_please_two_texts():
    """What the comparison is for: half easy, half hard, and the tier is one of the two's."""
    drafter = TieredDrafter(Guesser())
    for _ in range(60):
        k = drafter.drafts
        drafter.observe([told(n, k) for n in (k, 0)])
    assert drafter.drafts == 3


def test_what_says_nothing_is_not_counted():
    drafter = TieredDrafter(Guesser())
    for _ in range(50):
        drafter.observe([told(0, 0)])
        drafter.observe([told(0, 3, FinishReason.LENGTH)])
        drafter.observe([])
    assert drafter.drafts == 3


def test_the_drafter_is_told_everything():
    inner = Guesser()
    drafter = TieredDrafter(inner)
    requests, outcomes = [SimpleNamespace(id=0)], [told(1, 3)]
    drafter.start(requests)
    drafter.observe(outcomes)
    drafter.stop(requests)
    assert inner.told == [("start", requests), ("observe", outcomes), ("stop", requests)]


@pytest.mark.parametrize("tiers", [(), (0, 3)])
def test_tiers_are_checked(tiers):
    with pytest.raises(ValueError, match="tiers"):
        TieredDrafter(Guesser(), tiers)
