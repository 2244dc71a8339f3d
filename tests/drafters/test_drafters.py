"""Drafters by name, and what is refused of them."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.core import (
    Budget,
    DraftFault,
    KeyedCoins,
    Proposal,
    Request,
    SamplingParams,
    Unsupported,
)
from outrider.drafters import (
    GuardedDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    make_drafter,
)


class Branching:
    """Drafts two siblings, whatever is asked for."""

    name = "branching"

    def start(self, requests):
        pass

    def propose(self, requests, budget):
        nothing = Proposal.empty(len(requests)).distributions
        return Proposal(torch.tensor([1, 2]), (2,), (-1, -1), nothing)


def request(number):
    return Request(id=number, prompt=(1, 2), sampling=SamplingParams(), seed=0)


def test_a_tree_is_refused_where_chains_were_asked_for():
    guarded = GuardedDrafter(Branching(), vocab_size=10)
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
