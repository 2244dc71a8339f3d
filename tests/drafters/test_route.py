"""Each request with the drafter it chose; drafters by name."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.core import (
    Budget,
    DraftFault,
    KeyedCoins,
    Outcome,
    Proposal,
    Request,
    SamplingParams,
    Unsupported,
    chain,
)
from outrider.drafters import (
    GuardedDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    RoutedDrafter,
    make_drafter,
)


class Constant:
    """Drafts one token over and over, and remembers who came."""

    def __init__(self, token):
        self.name = str(token)
        self.token, self.seen = token, []

    def start(self, requests):
        self.seen.append(("start", [r.id for r in requests]))

    def propose(self, requests, budget):
        return Proposal.of([chain([self.token] * k) for k in budget.max_drafts])

    def observe(self, outcomes):
        self.seen.append(("observe", [o.request.id for o in outcomes]))

    def stop(self, requests):
        self.seen.append(("stop", [r.id for r in requests]))


def request(number):
    return Request(id=number, prompt=(1, 2), sampling=SamplingParams(), seed=0)


def test_requests_go_to_their_drafters():
    drafters = {"a": Constant(7), "b": Constant(8)}
    router = RoutedDrafter(drafters, lambda r: "ab"[r.id % 2])
    requests = [request(i) for i in range(3)]
    budget = Budget((1, 2, 3), "match", KeyedCoins())
    router.start(requests)
    proposal = router.propose(requests, budget)
    assert proposal.paths() == ((), (7,), (), (8,), (8, 8), (), (7,), (7, 7), (7, 7, 7))
    router.observe([Outcome(r, (5,), (0,), 0, 0, None) for r in requests])
    router.stop(requests)
    assert drafters["a"].seen == [("start", [0, 2]), ("observe", [0, 2]), ("stop", [0, 2])]
    assert drafters["b"].seen == [("start", [1]), ("observe", [1]), ("stop", [1])]
    alone = Budget((1,), "match", KeyedCoins())
    assert router.propose(requests[:1], alone).num_drafts.tolist() == [1]


def test_a_tree_is_refused_where_chains_were_asked_for():
    class Branching(Constant):
        def propose(self, requests, budget):
            return Proposal(
                torch.tensor([1, 2]), (2,), (-1, -1), Proposal.empty(len(requests)).distributions
            )

    guarded = GuardedDrafter(Branching(1), vocab_size=10)
    chains = Budget((2,), "match", KeyedCoins(), trees=False)
    assert guarded.propose([request(0)], chains).num_drafts == (0,)
    assert guarded.fallbacks == {"garbage": 1}


def test_drafters_by_name():
    assert isinstance(make_drafter("ngram", {"min_n": 1, "max_n": 2}), NgramDrafter)
    assert isinstance(make_drafter("none", {}), NoDrafter)
    with pytest.raises(Unsupported, match="choose one of"):
        make_drafter("crystal-ball", {})
    with pytest.raises(Unsupported, match="min_n"):
        make_drafter("ngram", {"min_n": 3, "max_n": 2})
    with pytest.raises(Unsupported, match="unexpected keyword"):
        make_drafter("ngram", {"size": 3})


def test_logits_that_are_not_numbers_are_a_fault():
    class Broken:
        vocab_size, max_length = 10, 100
        max_unread = max_catch_up = 100

        def open(self, request):
            return type("Sequence", (), {"length": 0})()

        def truncate(self, sequence, length):
            pass

        def extend(self, segments):
            return torch.full((len(segments), 10), math.nan)

    drafter = ModelDrafter(Broken(), vocab_size=10)
    drafter.start([request(0)])
    with pytest.raises(DraftFault, match="not numbers"):
        drafter.propose([request(0)], Budget((2,), "match", KeyedCoins()))
