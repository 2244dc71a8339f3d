"""The distribution of whole answers, eight tokens deep, against enumeration by Transformers' own.

Each case has a biased twin: a plausible mistake that the same test must reject.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from adversaries import Adversary
from scipy import stats
from tiny_models import tiny
from transformers import GenerationConfig

import outrider
from outrider.core import ROOT, Draft, PointMass, Rows, loop, target

VOCAB, LENGTH, LAST, RUNS, BATCH = 3, 8, 4, 1200, 400
PROMPT = [1, 2, 0, 1]


@pytest.fixture(scope="module")
def model():
    return tiny("Llama", vocab_size=VOCAB, num_hidden_layers=1, std=0.6)


class Tree(Adversary):
    """All tokens after the root, then all after the first of them, and so on."""

    def draft(self, request, k):
        tokens, parents, parent = [], [], ROOT
        while len(tokens) + VOCAB <= k:
            first = len(tokens)
            tokens += self.random.sample(range(VOCAB), VOCAB)
            parents += [parent] * VOCAB
            parent = first + self.random.randrange(VOCAB)
        return Draft(tuple(tokens), tuple(parents), PointMass())


@torch.inference_mode()
def exact(model, frequency_penalty=0.0, presence_penalty=0.0, **sampling):
    """Return the probability of the LAST tokens of an answer, [VOCAB ** LAST]."""
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **sampling})
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=len(PROMPT),
        encoder_input_ids=torch.tensor([PROMPT]),
        device="cpu",
        model_kwargs={},
    )
    answers, mass = torch.zeros(1, 0, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    for _ in range(LENGTH):
        given = torch.cat([torch.tensor([PROMPT]).expand(len(answers), -1), answers], 1)
        scores = processors(given, model(given).logits[:, -1].float())
        counts = torch.nn.functional.one_hot(answers, VOCAB).sum(1)
        scores = scores - frequency_penalty * counts - presence_penalty * (counts > 0)
        p = scores.softmax(-1).double()
        mass = (mass[:, None] * p).flatten()
        following = torch.arange(VOCAB).repeat(len(answers))[:, None]
        answers = torch.cat([answers.repeat_interleave(VOCAB, 0), following], 1)
    return torch.zeros(VOCAB**LAST, dtype=torch.float64).index_add(0, index(answers), mass)


def index(answers):
    return answers[:, -LAST:] @ torch.tensor([VOCAB**i for i in reversed(range(LAST))])


def drawn(model, drafter, rule, **sampling):
    options = {"temperature": 1.0, **sampling, "max_tokens": LENGTH}
    outputs = []
    for number in range(RUNS // BATCH):
        torch.manual_seed(number)
        found = outrider.generate(
            model, [PROMPT] * BATCH, drafter=drafter, rule=rule, sampling=options, max_drafts=6
        )
        outputs += found.outputs
        assert not found.stats.fallbacks
        assert found.stats.accept_length > 1.3
    return torch.tensor(outputs)


def p_value(model, drafter, rule, **sampling):
    expected = exact(model, **sampling) * RUNS
    counts = torch.bincount(index(drawn(model, drafter, rule, **sampling)), minlength=VOCAB**LAST)
    assert not counts[expected == 0].any()
    rare = (expected < 8) & (expected > 0)
    common = (expected >= 8).nonzero()[:, 0]
    seen, hoped = counts[common].tolist(), expected[common].tolist()
    if float(expected[rare].sum()) > 1:
        seen.append(int(counts[rare].sum()))
        hoped.append(float(expected[rare].sum()))
    return stats.chisquare(seen, hoped, sum_check=False).pvalue


PENALTY = {"repetition_penalty": 1.5, "frequency_penalty": 1.8, "presence_penalty": 0.4}
CUT = {"temperature": 1.6, "min_p": 0.3, "top_p": 0.95}
CASES = [
    ("tree", "match", PENALTY),
    ("itself", "residual", CUT),
    ("tree", "match", CUT),
    ("itself", "block", PENALTY),
    ("tree", "residual", PENALTY),
    ("itself", "match", {}),
]


def drafter_for(name, model):
    return Tree(VOCAB) if name == "tree" else model


@pytest.mark.parametrize(
    ("name", "rule", "sampling"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if i > 1 else [])
        for i, case in enumerate(CASES)
    ],
)
def test_distribution(model, name, rule, sampling):
    assert p_value(model, drafter_for(name, model), rule, **sampling) > 1e-3


def test_twin_penalties_that_do_not_see_drafts(model, monkeypatch):
    whole = Rows.of

    def blind(requests, proposal):
        rows = whole(requests, proposal)
        return replace(rows, paths=lambda: [()] * len(rows.owners))

    monkeypatch.setattr(loop.Rows, "of", staticmethod(blind))
    assert p_value(model, Tree(VOCAB), "match", **PENALTY) < 1e-6


def test_twin_min_p_before_the_temperature(model, monkeypatch):
    order = [target.min_p, *(t for t in target.TRANSFORMS if t is not target.min_p)]
    monkeypatch.setattr(target, "TRANSFORMS", tuple(order))
    with pytest.raises(AssertionError):
        assert p_value(model, model, "residual", **CUT) > 1e-6


def test_twin_one_coin_for_all_rows_of_a_tree(model, monkeypatch):
    whole = Rows.of

    def same(requests, proposal):
        rows = whole(requests, proposal)
        return replace(rows, depths=[0] * len(rows.owners))

    monkeypatch.setattr(loop.Rows, "of", staticmethod(same))
    assert p_value(model, Tree(VOCAB), "match") < 1e-6
