"""Serving over Transformers: the tokens of `generate`, whoever drafts, comes and goes beside."""

from __future__ import annotations

import pytest

import outrider
from outrider.core import Unsupported
from outrider.engines.transformers.served import Arrival, TransformersServer

GREEDY = {"max_tokens": 32}
DRAFTERS = ["none", "suffix", "ngram", "device", "adaptive"]


def sampled(i):
    return {"max_tokens": 24 + i, "temperature": 0.8, "top_p": 0.95, "seed": 7 + i}


ANSWERS = {}


def alone(model, prompt, sampling):
    """Return what plain decoding answers to a request that has the model to itself."""
    key = str((prompt, sampling))
    if key not in ANSWERS:
        done = outrider.generate(model, [prompt], drafter="none", sampling=sampling)
        ANSWERS[key] = done.outputs[0], done.finish_reasons[0]
    return ANSWERS[key]


@pytest.fixture(scope="module")
def requests(pair):
    """Requests that join a running batch, one of them after it was empty; some say the same."""
    _, _, _, prompts = pair
    texts = [prompts[i % len(prompts)] for i in range(6)]
    turns = (0, 0, 3, 9, 10, 200)
    return [
        Arrival(text, turn, GREEDY if i % 2 else sampled(i))
        for i, (text, turn) in enumerate(zip(texts, turns, strict=True))
    ]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_plain_decoding(pair, requests, drafter):
    target = pair[0]
    server = TransformersServer(target, drafter=drafter, max_requests=3)
    answers = server.serve(requests)
    for arrival, answer in zip(requests, answers, strict=True):
        expected = alone(target, arrival.prompt, arrival.sampling)
        assert (answer.output, answer.finish_reason) == expected
    assert not server.pool.fallback_totals().keys() - {"rows"}
    assert len({answer.ended for answer in answers}) > 2


def test_drafters_side_by_side(pair, requests):
    target = pair[0]
    mixed = [
        Arrival(each.prompt, each.turn, each.sampling, ("ngram", "none", "adaptive")[i % 3])
        for i, each in enumerate(requests)
    ]
    answers = TransformersServer(target, max_requests=4).serve(mixed)
    for arrival, answer in zip(mixed, answers, strict=True):
        assert answer.output == alone(target, arrival.prompt, arrival.sampling)[0]


@pytest.mark.parametrize("drafter", ["suffix", "device", "adaptive"])
def test_a_follow_up_on_a_server_that_has_learned(pair, drafter):
    """The second turn's prompt has the first answer in it."""
    target, _, _, prompts = pair
    server = TransformersServer(target, drafter=drafter)
    first = server.serve([Arrival(prompt, i, GREEDY) for i, prompt in enumerate(prompts)])
    turns = [
        [*prompt, *answer.output, *prompt[:4]]
        for prompt, answer in zip(prompts, first, strict=True)
    ]
    again = server.serve([Arrival(text, 2 * i, sampled(i)) for i, text in enumerate(turns)])
    for i, (text, answer) in enumerate(zip(turns, again, strict=True)):
        assert answer.output == alone(target, text, sampled(i))[0]


def test_ends_by_a_token_in_the_middle_of_drafts(pair):
    target, _, _, prompts = pair
    plain = alone(target, prompts[0], GREEDY)[0]
    sampling = {**GREEDY, "stop_token_ids": (plain[11],)}
    for drafter in DRAFTERS:
        server = TransformersServer(target, drafter=drafter)
        answers = server.serve([Arrival(prompts[0], turn, sampling) for turn in (0, 5)])
        expected = alone(target, prompts[0], sampling)
        assert [(a.output, a.finish_reason) for a in answers] == [expected] * 2


def test_drafts_of_the_device_are_accepted(pair):
    """Fewer turns than tokens, so steps had drafts."""
    target, _, _, prompts = pair
    loop = [*prompts[0], *prompts[0], *prompts[0]]
    (plain,) = TransformersServer(target, drafter="none").serve([Arrival(loop, 0, GREEDY)])
    (drafted,) = TransformersServer(target, drafter="device").serve([Arrival(loop, 0, GREEDY)])
    assert drafted.output == plain.output
    assert drafted.ended < plain.ended


def test_logprobs_are_refused(pair):
    target, _, _, prompts = pair
    with pytest.raises(Unsupported, match="use generate"):
        TransformersServer(target).serve([Arrival(prompts[0], 0, {"logprobs": 1})])
