"""`settle` keeps what plain decoding would have emitted, and nothing more."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import (
    ROOT,
    Draft,
    FinishReason,
    Outcome,
    Outcomes,
    PointMass,
    Proposal,
    Request,
    SamplingParams,
    Stats,
    Verdict,
    chain,
    settle,
)

EOS = 99


def text(tokens) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def request(output=(), **params) -> Request:
    made = Request(0, (1, 2), SamplingParams(**params), 0, frozenset([EOS]), text)
    made.output.extend(output)
    return made


def one(made: Request, drafts: list[int], accepted: int, bonus: int) -> Outcome:
    proposal = Proposal.of([chain(drafts)])
    path = torch.tensor([[i if i < accepted else -1 for i in range(len(drafts))]])
    verdict = Verdict(path.reshape(1, len(drafts)), torch.tensor([bonus]))
    return settle([made], proposal, verdict)[0]


def test_all_kept():
    outcome = one(request(), [3, 4], 2, 5)
    assert outcome.tokens == (3, 4, 5)
    assert outcome.rows == (0, 1, 2)
    assert (outcome.num_drafts, outcome.num_accepted_drafts) == (2, 2)
    assert outcome.num_accepted_tokens == 3
    assert outcome.finish_reason is None


def test_rejected_at_once():
    outcome = one(request(), [3, 4], 0, 5)
    assert (outcome.tokens, outcome.rows, outcome.num_accepted_drafts) == ((5,), (0,), 0)


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({}, (3, EOS), FinishReason.STOP),
        ({"ignore_eos": True}, (3, EOS, 4, 5), None),
        ({"stop_token_ids": (3,)}, (3,), FinishReason.STOP),
        ({"max_tokens": 3, "ignore_eos": True}, (3, EOS, 4), FinishReason.LENGTH),
        ({"max_tokens": 4, "ignore_eos": True}, (3, EOS, 4, 5), FinishReason.LENGTH),
        ({"ends": lambda output: output[-1] == 3}, (3,), FinishReason.STOP),
        (
            {"ends": lambda output: len(output) == 2, "ignore_eos": True},
            (3, EOS),
            FinishReason.STOP,
        ),
        ({"stop": "ve", "ignore_eos": True}, (3, EOS, 4), FinishReason.STOP),  # 99 is a v
        ({"stop": ["xyz", "e"], "ignore_eos": True}, (3, EOS, 4), FinishReason.STOP),
    ],
)
def test_ends_inside_the_block(params, tokens, reason):
    outcome = one(request(**params), [3, EOS, 4], 3, 5)
    assert outcome.tokens == tokens
    assert outcome.finish_reason == reason
    assert outcome.num_accepted_drafts == min(3, len(tokens))
    assert len(outcome.rows) == len(tokens)


def test_stop_string_reaches_back_over_the_step():
    made = request(output=(0, 1), stop="abc")
    outcome = one(made, [2, 3], 2, 4)
    assert (outcome.tokens, outcome.finish_reason) == ((2,), FinishReason.STOP)


def test_tree_rows_are_those_of_the_path():
    draft = Draft((3, 4, 5, 6), (ROOT, ROOT, 1, 0), PointMass())
    verdict = Verdict(torch.tensor([[1, 2]]), torch.tensor([7]))
    (outcome,) = settle([request()], Proposal.of([draft]), verdict)
    assert (outcome.tokens, outcome.rows) == ((4, 5, 7), (0, 2, 3))


@given(
    st.lists(st.integers(0, 30), max_size=6),
    st.integers(0, 6),
    st.integers(0, 30),
    st.integers(1, 9),
    st.lists(st.integers(0, 30), max_size=3),
    st.text("abcde", min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=1),
)
def test_same_as_one_token_at_a_time(drafts, accepted, bonus, limit, stops, string, before):
    accepted = min(accepted, len(drafts))
    params = {"max_tokens": limit + 1, "stop_token_ids": tuple(stops), "stop": string}
    made = request(before, **params)
    outcome = one(made, drafts, accepted, bonus)
    plain = request(before, **params)
    emitted = []
    for token in [*drafts[:accepted], bonus]:
        single = one(plain, [], 0, token)
        single.apply()
        emitted.append(token)
        if single.finish_reason:
            break
    assert list(outcome.tokens) == emitted
    assert outcome.finish_reason == plain.finish_reason
    outcome.apply()
    assert made.output == plain.output


def test_request_views():
    made = request(output=(5, 6), max_tokens=10)
    assert (made.length, made.position, made.last_token, made.remaining) == (4, 3, 6, 8)
    assert request().last_token == 2
    assert [made.tokens_from(i) for i in range(5)] == [[1, 2, 5, 6], [2, 5, 6], [5, 6], [6], []]


def test_request_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="at least one token"):
        Request(0, (), SamplingParams(), 0)
    with pytest.raises(ValueError, match="tokenizer"):
        Request(0, (1,), SamplingParams(stop="x"), 0)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": float("inf")},
        {"presence_penalty": float("nan")},
        {"seed": -1},
        {"max_tokens": 0},
        {"stop": ""},
        {"stop": ("a", "")},
        {"logprobs": -1},
        {"max_tokens": 2.5},
        {"max_tokens": None},
        {"temperature": "0.7"},
        {"top_k": 1.5},
        {"top_p": "all"},
        {"repetition_penalty": None},
        {"seed": 0.5},
        {"seed": 2**63},
        {"logprobs": 1.5},
        {"logprobs": True},
        {"stop": 5},
        {"stop": ("a", 5)},
        {"stop_token_ids": 5},
        {"stop_token_ids": ("</s>",)},
        {"logit_bias": [1.0]},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {3: float("nan")}},
        {"grammar": "json"},
        {"ignore_eos": "no"},
    ],
)
def test_sampling_params_are_checked(params):
    ((name, value),) = params.items()
    with pytest.raises(ValueError, match=f"^{name} must be .*, not {re.escape(repr(value))}$"):
        SamplingParams(**params)


def test_sampling_params_of_numpy_and_biases():
    params = SamplingParams(max_tokens=np.int64(3), top_p=np.float32(0.5), logit_bias={1: -np.inf})
    assert params.max_tokens == 3


def test_stats():
    stats = Stats()
    assert (stats.acceptance_rate, stats.accept_length) == (0.0, 0.0)
    proposal = Proposal.of([chain([3, 4]), chain([])])
    verdict = Verdict(torch.tensor([[0, -1], [-1, -1]]), torch.tensor([5, 6]))
    stats.record(settle([request(), request()], proposal, verdict), proposal)
    assert (stats.steps, stats.request_steps, stats.emitted) == (1, 2, 3)
    assert (stats.drafted, stats.accepted) == (2, 1)
    assert stats.acceptance_rate == 0.5
    assert stats.accept_length == 1.5
    assert dict(stats.accepted_at) == {1: 1}
    assert dict(stats.proposed_at) == {1: 1, 2: 1}


def test_outcomes_are_a_sequence_and_arrays():
    made = [request(), request(), request()]
    proposal = Proposal.of([chain([3, 4]), chain([]), chain([5])])
    verdict = Verdict(torch.tensor([[0, 1], [-1, -1], [-1, -1]]), torch.tensor([7, 8, 9]))
    outcomes = settle(made, proposal, verdict)
    assert outcomes.tokens.tolist() == [3, 4, 7, 8, 9]
    assert outcomes.owners.tolist() == [0, 0, 0, 1, 2]
    assert [o.tokens for o in outcomes[1:]] == [(8,), (9,)]
    assert outcomes[-1].tokens == (9,)
    with pytest.raises(IndexError):
        outcomes[3]
    again = Outcomes.of(list(outcomes))
    assert Outcomes.of(again) is again
    assert list(again) == list(outcomes)
    states = [torch.ones(3), torch.ones(1), torch.ones(1)]
    seen = Outcomes.of([replace(o, hidden=h) for o, h in zip(outcomes, states, strict=True)])
    assert [o.hidden is h for o, h in zip(seen, states, strict=True)] == [True] * 3
    outcomes.apply()
    assert [r.output for r in made] == [[3, 4, 7], [8], [9]]
