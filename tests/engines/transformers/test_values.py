"""Values that leave no token, or that arithmetic cannot hold; drafters that write into requests."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from adversaries import Adversary
from tiny_models import VOCAB, ids, plain, tiny

import outrider
from outrider.core import chain
from outrider.errors import NoToken


@pytest.fixture(scope="module")
def model():
    return tiny("Llama")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("exactness", ["lossless", "bitwise"])
def test_nan_raises(temperature, exactness):
    """As plain decoding does when it samples; greedy, it would emit the NaN's token for ever."""
    model, prompt = tiny("Llama"), ids(6)
    sampling = {"temperature": temperature, "max_tokens": 4}
    outrider.generate(model, [prompt], sampling=sampling, exactness=exactness)
    model.lm_head.weight.data[5] = math.nan
    with pytest.raises(NoToken, match="NaN"):
        outrider.generate(model, [prompt], sampling=sampling, exactness=exactness)
    with pytest.raises(RuntimeError, match="nan"):
        plain(model, [prompt], 4, do_sample=True)


def forbid_all(output):
    return torch.zeros(VOCAB, dtype=torch.bool)


def forbid_after_three(output):
    return torch.full((VOCAB,), len(output) < 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "sampling",
    [
        {"grammar": forbid_all},
        {"grammar": forbid_after_three},
        {"logit_bias": dict.fromkeys(range(VOCAB), -math.inf)},
    ],
)
def test_a_request_without_a_token_raises(model, sampling, temperature):
    options = {"max_tokens": 8, "temperature": temperature, "min_p": 0.1, **sampling}
    for drafter in ("none", model):
        with pytest.raises(NoToken, match="all are ruled out"):
            outrider.generate(model, [ids(6)], sampling=options, drafter=drafter)


def test_drafts_that_leave_no_token_do_no_harm(model):
    """A grammar may allow nothing after a draft that is never emitted."""
    expected = plain(model, [ids(6)], 8)[0]

    def grammar(output):
        good = list(output) == expected[: len(output)]
        return torch.full((VOCAB,), good)

    class Wrong(Adversary):
        def draft(self, request, k):
            return chain([(request.last_token + 1) % VOCAB] * k)

    sampling = {"max_tokens": 8, "grammar": grammar}
    found = outrider.generate(model, [ids(6)], drafter=Wrong(VOCAB), sampling=sampling)
    assert found.outputs == [expected]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-45},
        {"temperature": 1e300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"frequency_penalty": 1e300},
        {"presence_penalty": -1e300},
        {"logit_bias": {3: 1e300}},
        {"logit_bias": {3: -1e300}},
    ],
)
def test_values_beyond_arithmetic_are_refused(model, sampling):
    with pytest.raises(ValueError, match="beyond what 32 bits can hold"):
        outrider.generate(model, [ids(6)], sampling=sampling)


@pytest.mark.parametrize("sampling", [{"temperature": 1e-30}, {"temperature": 1e30}])
def test_values_at_the_edge_are_served(model, sampling):
    sampling |= {"repetition_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {3: -math.inf}}
    assert outrider.generate(model, [ids(6)], sampling=sampling | {"max_tokens": 4}).outputs


class Writer(Adversary):
    """Writes into all that it is given."""

    def start(self, requests):
        for request in requests:
            request.output.append(1)
            request.sampling.logit_bias[3] = 100.0

    def observe(self, outcomes):
        outcomes.tokens[:] = 7
        for request in outcomes.requests:
            request.output[:] = [9] * 50
            request.finish_reason = "stop"

    def draft(self, request, k):
        request.output.clear()
        return chain([self.token() for _ in range(k)])


def test_a_drafter_that_writes_changes_nothing(model):
    prompts, bias = [ids(6), ids(9, 2)], {3: 0.0}
    sampling = {"max_tokens": 12, "logit_bias": bias}
    found = outrider.generate(model, prompts, drafter=Writer(VOCAB), sampling=sampling)
    assert found.outputs == plain(model, prompts, 12)
    assert bias == {3: 0.0}
    assert not found.stats.fallbacks


def test_an_encoder_with_a_mask_is_refused():
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32
    )
    config.decoder_start_token_id = 0
    t5 = transformers.T5ForConditionalGeneration(config).eval()
    given = torch.tensor([[1, 2, 3]])
    with pytest.raises(outrider.Unsupported, match="decoder-only"):
        t5.generate(
            given,
            attention_mask=torch.ones_like(given),
            custom_generate=outrider.custom_generate,
        )
