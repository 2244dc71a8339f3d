"""The draft model's chain and its siblings, with a model whose opinions are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from outrider.core import ROOT, Budget, KeyedCoins, Outcome, Request, SamplingParams
from outrider.drafters import ModelDrafter

V = 16


@dataclass
class Sequence:
    length: int = 0


class Counting:
    """Says that n + 1 follows n, n + 2 is the next best, and how sure it is of each."""

    vocab_size, max_length = V, 1000

    def __init__(self, first=0.7, second=0.2):
        self.passes, self.law = 0, (first, second)

    def open(self, request):
        return Sequence()

    def extend(self, segments):
        self.passes += 1
        logits = torch.full((len(segments), V), -20.0)
        for row, (sequence, tokens) in zip(logits, segments, strict=True):
            sequence.length += len(tokens)
            for ahead, chance in enumerate(self.law, 1):
                row[(tokens[-1] + ahead) % V] = math.log(chance)
        return logits

    def truncate(self, sequence, length):
        sequence.length = min(sequence.length, length)

    def close(self, sequence):
        pass


def drafter(*prompts, **options):
    """A drafter that knows requests with these prompts, its model, and the requests."""
    model = Counting()
    found = ModelDrafter(model, V, min_survival=0.0, **options)
    requests = [
        Request(id=i, prompt=prompt, sampling=SamplingParams(), seed=i)
        for i, prompt in enumerate(prompts)
    ]
    found.start(requests)
    return found, model, requests


def budget(*most, **more):
    return Budget(most, "match", KeyedCoins(), **more)


def test_siblings_are_leaves_beside_the_chain():
    found, model, requests = drafter((3,), siblings=1)
    [draft] = found.propose(requests, budget(5, min_gain=0.4)).drafts()
    # the fourth pass promises 0.47, the fifth 0.37: a chain of four, and the likeliest leaf
    assert draft.tokens[:4] == (4, 5, 6, 7)
    assert draft.parents[:4] == (ROOT, 0, 1, 2)
    assert (draft.tokens[4:], draft.parents[4:]) == ((5,), (ROOT,))
    assert draft.sure == pytest.approx((0.78, 0.78, 0.78, 0.78, 0.22), abs=0.01)
    assert model.passes == 4


def test_siblings_need_trees_and_room():
    found, _, requests = drafter((3,), siblings=2)
    chain = found.propose(requests, budget(3, trees=False)).drafts()[0]
    assert (chain.tokens, chain.parents) == ((4, 5, 6), (ROOT, 0, 1))
    found, _, requests = drafter((3,), siblings=2)
    full = found.propose(requests, budget(3)).drafts()[0]
    assert full.tokens == (4, 5, 6)


def test_a_pass_must_be_worth_its_time_for_all_requests_together():
    found, model, requests = drafter((3,), (9,))
    drafts = found.propose(requests, budget(8, 8, trees=False, min_gain=1.0)).drafts()
    assert [len(d.tokens) for d in drafts] == [3, 3]  # 2 * 0.78^2 = 1.2, 2 * 0.78^3 = 0.95
    assert model.passes == 3


def test_who_knows_better_is_believed():
    """Calibration says that this model is always right, or never."""
    for chance, passes in ((1.0, 8), (0.0, 1)):
        found, model, requests = drafter((3,))
        found.propose(requests, budget(8, min_gain=0.5, chance=lambda r, c, known=chance: known))
        assert model.passes == passes


def test_a_sibling_that_was_kept_is_read_next():
    """Its cache entry was never written: the chain went another way."""
    found, _, requests = drafter((3,), siblings=1)
    found.propose(requests, budget(4, min_gain=0.5))
    outcome = Outcome(requests[0], (4, 6, 7), (0, 1, 4), 4, 2, None)
    found.observe([outcome])
    outcome.apply()
    state = found._states[0]
    assert state.sequence.length == 2  # the prompt and 4
    assert found._unread(requests[0], type(state)(state.sequence)) == [6, 7]
