"""Trees of drafts: what is read, what is offered, and what is learned of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from outrider.core import ROOT, Budget, DraftFault, KeyedCoins, Outcome, Request, SamplingParams
from outrider.drafters import ModelDrafter
from outrider.drafters.calibration import Calibration
from outrider.drafters.trees import GrowingTree

V, EOS = 64, 63


@dataclass
class Text:
    tokens: list = field(default_factory=list)

    @property
    def length(self):
        return len(self.tokens)


class Opinions:
    """Says what `after` a token comes, with chances. Knows what it was given, branch by branch."""

    vocab_size, max_length, max_branches = V, 1000, 100
    max_unread, max_catch_up = 8, 512

    def __init__(self, after):
        self.after, self.passes, self.open_branches = after, [], 0

    def open(self, request):
        return Text()

    def fork(self, text):
        self.open_branches += 1
        return Text([*text.tokens])

    def close(self, text):
        self.open_branches -= 1

    def truncate(self, text, length):
        del text.tokens[length:]

    def extend(self, segments):
        logits = torch.full((len(segments), V), -math.inf)
        for row, (text, tokens) in zip(logits, segments, strict=True):
            text.tokens += tokens
            for token, chance in self.after.get(text.tokens[-1], {0: 0.9}).items():
                row[token] = math.log(chance)
        self.passes.append([tuple(text.tokens) for text, _ in segments])
        return logits

    def catch_up(self, segments):
        raise AssertionError


UNSURE = {1: {2: 0.55, 3: 0.45}, 2: {4: 0.8, 6: 0.2}, 3: {5: 0.9}, 4: {7: 0.5, 8: 0.5}}


def made(after, prompt=(1,), width=2, sampling=None, **options):
    model = Opinions(after)
    drafter = ModelDrafter(model, V, width=width, **{"min_survival": 0.0, **options})
    params = sampling or SamplingParams()
    request = Request(id=7, prompt=prompt, sampling=params, seed=1, eos_token_ids=(EOS,))
    drafter.start([request])
    return drafter, model, request


def budget(*most, **more):
    return Budget(most, "match", KeyedCoins(), **more)


def test_the_likeliest_are_read_side_by_side_and_offered():
    drafter, model, request = made(UNSURE)
    [draft] = drafter.propose([request], budget(5)).drafts()
    assert draft.tokens[:4] == (2, 4, 3, 5)  # by the chance that the text reaches them
    assert draft.parents[:4] == (ROOT, 0, ROOT, 2)
    assert model.passes[:3] == [[(1,)], [(1, 2), (1, 3)], [(1, 2, 4), (1, 3, 5)]]
    assert model.open_branches == 0
    assert 0.4 < draft.sure[0] < 0.6


def test_what_cannot_be_among_the_offered_is_not_read():
    """With room for two drafts both follow the text, and no pass reads them."""
    drafter, model, request = made({1: {2: 0.55, 3: 0.45}, 2: {4: 0.6, 5: 0.4}})
    [draft] = drafter.propose([request], budget(2)).drafts()
    assert draft.tokens == (2, 3)
    assert len(model.passes) <= 2


def test_a_pass_must_promise_enough():
    drafter, model, request = made(UNSURE)
    drafter.propose([request], budget(8, min_gain=0.7))
    assert len(model.passes) == 1
    drafter, model, request = made(UNSURE, min_survival=0.6)
    drafter.propose([request], budget(8))
    assert len(model.passes) == 1
    drafter, model, request = made(UNSURE)
    assert not drafter.propose([request], budget(0)).drafts()[0].tokens
    assert not model.passes


def test_nothing_follows_an_end_or_what_the_model_cannot_read():
    drafter, model, request = made({1: {EOS: 0.6, 2: 0.4}, 2: {V - 2: 0.9}})
    model.vocab_size = V - 2
    [draft] = drafter.propose([request], budget(8)).drafts()
    assert set(draft.tokens) >= {EOS, 2, V - 2}
    assert [text for texts in model.passes for text in texts] == [(1,), (1, 2)]
    drafter, model, request = made(UNSURE)
    model.max_length = 2
    drafter.propose([request], budget(8))
    assert max(len(text) for texts in model.passes for text in texts) == 2


def test_a_chain_where_the_host_takes_no_trees():
    drafter, model, request = made(UNSURE)
    [draft] = drafter.propose([request], budget(3, trees=False)).drafts()
    assert (draft.tokens, draft.parents) == ((2, 4, 7), (ROOT, 0, 1))
    assert model.open_branches == 0


def test_branches_are_limited_and_given_back_after_a_fault():
    drafter, model, request = made(UNSURE)
    model.max_branches = 3
    drafter.propose([request], budget(8))
    assert sum(len(texts) for texts in model.passes) <= 1 + 3
    drafter, model, request = made(UNSURE)
    right = model.extend
    model.extend = lambda segments: right(segments) * (math.nan if model.passes[1:] else 1.0)
    with pytest.raises(DraftFault, match="not numbers"):
        drafter.propose([request], budget(8))
    assert model.open_branches == 0


def test_what_was_right_is_learned():
    """A model that is sure and wrong: what it thinks second comes, and is read first, later."""
    wrong = {n: {n + 1: 0.7, n + 2: 0.2} for n in range(1, 60)}
    drafter, model, request = made(wrong, prompt=(1,), width=2)
    [before] = drafter.propose([request], budget(4)).drafts()
    assert before.tokens[0] == 2
    for token in range(3, 55, 2):
        outcome = Outcome(request, (token,), (0,), 4, 0, None)
        drafter.observe([outcome])
        request.extend((token,), None)
        [after] = drafter.propose([request], budget(4)).drafts()
    assert after.tokens[0] == request.last_token + 2
    assert after.sure[0] > 0.7
    drafter.stop([request])


def test_chances_of_what_is_drawn_fall_with_the_rank():
    found = Calibration(3)
    claimed, greedy = np.full((1, 3), 0.3), np.array([False])
    first, second, third = found.of(claimed, greedy)[0]
    assert first > second > third > 0
    for _ in range(100):
        found.observe(1, 0.3, False, True)
    assert found.of(claimed, greedy)[0][1] > 0.9


def test_a_draw_at_temperature_has_other_drafts_beside_it():
    sampling = SamplingParams(temperature=1.0)
    drafter, _, request = made({1: {2: 0.5, 3: 0.5}}, sampling=sampling)
    [draft] = drafter.propose([request], budget(2)).drafts()
    assert set(draft.tokens) <= {0, 2, 3}
    assert draft.parents[0] == ROOT


def test_a_tree_says_nothing_when_all_of_it_is_read():
    request = Request(id=0, prompt=(1,), sampling=SamplingParams(), seed=0)
    tree = GrowingTree(request, Text(), 4, V, 100)
    [root] = tree.take(3)
    assert tree.promise == 0.0
    tree.add(root, Text([1]), [5, 6], [0.7, 0.3], [0.7, 0.3])
    assert [place.path for place in tree.take(3)] == [(5,), (6,)]
    assert not tree.take(3)


def test_a_model_that_cannot_branch_is_refused():
    class Straight:
        vocab_size = V

    with pytest.raises(ValueError, match="cannot branch"):
        ModelDrafter(Straight(), V, width=2)
    for wrong in ({"width": -1}, {"width": 1.5}, {"siblings": "2"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a whole number from 0"):
            ModelDrafter(Opinions({}), V, **wrong)
