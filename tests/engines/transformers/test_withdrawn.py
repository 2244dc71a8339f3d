"""Drafts that cannot be verified are withdrawn: plain decoding would not have seen them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, ids, plain, tiny

import outrider
from outrider.core import Proposal, chain

PROMPTS = [ids(9), ids(20, 2)]


@pytest.fixture(scope="module")
def model():
    return tiny("Llama")


@pytest.fixture(scope="module")
def expected(model):
    return plain(model, PROMPTS, 12)


@pytest.fixture(scope="module")
def strange(expected):
    """Return a token that is in none of the answers."""
    return next(t for t in range(3, VOCAB) if not any(t in text for text in expected + PROMPTS))


class Always:
    """Drafts the same token, now and then."""

    name = "always"

    def __init__(self, token):
        self.token, self.turn = token, 0

    def start(self, requests):
        pass

    def propose(self, requests, budget):
        self.turn += 1
        each = [self.token] if self.turn % 2 else []
        return Proposal.of([chain((each * 3)[: int(k)]) for k in budget.max_drafts])

    observe = stop = start


def raises_on(token):
    def read(output):
        if token in list(output):
            raise KeyError(token)

    return read


@pytest.mark.parametrize("rule", ["match", "residual", "block"])
@pytest.mark.parametrize("name", ["grammar", "process"])
def test_functions_that_cannot_read_a_draft(model, expected, strange, name, rule):
    read = raises_on(strange)

    def grammar(output):
        read(output)
        return torch.ones(VOCAB, dtype=torch.bool)

    def process(output, logits):
        read(output)
        return logits

    function = {"grammar": grammar, "process": process}[name]
    found = outrider.generate(
        model,
        PROMPTS,
        drafter=Always(strange),
        sampling={"max_tokens": 12, name: function},
        rule=rule,
    )
    assert found.outputs == expected
    assert found.stats.fallbacks["withdrawn"] > 2


def test_processors_of_transformers_that_cannot_read_a_draft(model, expected, strange):
    read = raises_on(strange)
    found = model.generate(
        torch.tensor(PROMPTS[:1]),
        max_new_tokens=12,
        do_sample=False,
        prefix_allowed_tokens_fn=lambda row, text: (read(text.tolist()), list(range(VOCAB)))[1],
        custom_generate=outrider.custom_generate,
        drafter=Always(strange),
    )
    assert found[0, len(PROMPTS[0]) :].tolist() == expected[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("exactness", ["lossless", "bitwise"])
def test_drafts_for_which_the_model_computes_nan(exactness, bad, expected, strange):
    model = tiny("Llama")
    model.model.embed_tokens.weight.data[strange] = bad
    found = outrider.generate(
        model,
        PROMPTS,
        drafter=Always(strange),
        sampling={"max_tokens": 12},
        exactness=exactness,
    )
    assert found.outputs == expected
    assert found.stats.fallbacks["withdrawn"] > 2


def test_what_fails_without_drafts_too_is_raised(model, expected):
    token = expected[0][5]
    with pytest.raises(KeyError, match=str(token)):
        outrider.generate(
            model,
            PROMPTS[:1],
            drafter=model,
            sampling={
                "max_tokens": 12,
                "process": lambda output, logits: (raises_on(token)(output), logits)[1],
            },
        )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_logits_may_be_changed_in_place(model, mode):
    sampling = {"max_tokens": 3, "logprobs": 1}
    first = outrider.generate(model, PROMPTS, sampling=sampling).logprobs[0][0]
    with mode():
        found = outrider.generate(
            model,
            PROMPTS,
            sampling=sampling | {"process": lambda output, logits: logits.neg_()},
        )
    assert found.logprobs[0][0].top == first.top
    assert found.logprobs[0][0].token < first.token


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"process": lambda output, logits: None}, TypeError),
        ({"process": lambda output, logits: logits[:-1]}, ValueError),
        ({"process": lambda output, logits: logits[None]}, ValueError),
        ({"grammar": lambda output: [True] * VOCAB}, TypeError),
        ({"grammar": lambda output: torch.ones(VOCAB)}, TypeError),
        ({"grammar": lambda output: torch.ones(VOCAB + 1, dtype=torch.bool)}, ValueError),
    ],
)
def test_functions_that_return_something_else(model, options, error):
    with pytest.raises(error, match=rf"^(process|grammar) returned .*\({VOCAB},\)"):
        outrider.generate(model, PROMPTS, sampling=options)


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_end_tokens_of_the_model(expected, kind):
    model = tiny("Llama")
    model.generation_config.eos_token_id = kind([expected[0][4], expected[1][6]])
    assert outrider.generate(model, PROMPTS).outputs == plain(model, PROMPTS, 128)
    model.generation_config.eos_token_id = np.int64(expected[0][4])
    assert outrider.generate(model, PROMPTS[:1]).outputs[0][-1] == expected[0][4]


@pytest.mark.parametrize(("name", "value"), [("drafter", np.ones(3)), ("tokenizer", "gpt2")])
def test_arguments_of_another_kind(model, name, value):
    with pytest.raises(TypeError, match=f"^{name} is "):
        outrider.generate(model, PROMPTS, **{name: value})
