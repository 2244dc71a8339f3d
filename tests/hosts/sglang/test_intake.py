"""A request that the scheduler could not hold is refused before it gets there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.hosts.sglang.intake import check_request

V = 100
HALF = "\ud800"
"""Half of a surrogate pair: no UTF-8 has it."""

HOSTILE = {
    "temperature": [float("inf"), float("nan"), -1.0, 1e300, 10**400, "1", [1.0]],
    "top_p": [float("nan"), 2.0, "1"],
    "min_p": [float("inf"), -0.1],
    "top_k": [2**31, -2, 1.5, "5", 10**400],
    "frequency_penalty": [float("nan"), 1e39, "0"],
    "repetition_penalty": [float("inf"), -1, {}],
    "max_new_tokens": [-1, 2**31, 1.5, 20.0, "9", float("nan"), float("inf")],
    "min_new_tokens": [2**31, -1],
    "n": [0, 10**9, 2.5],
    "sampling_seed": [2**63, -(2**63) - 1, 10**400, "7", 1.5],
    "stream_interval": [0, -1],
    "stop": [7, [7], HALF, ["a", HALF]],
    "regex": [7, HALF],
    "custom_params": [[1], "x"],
    "stop_token_ids": [[2**63], 7, ["a"], [1.5]],
    "logit_bias": [{"5": float("nan")}, {"5": 1e39}, {"5": "x"}, {"-1": 1.0}, {"100": 1.0}, [1]],
}
FIELDS = {
    "logprob_start_len": [-2, 2**31, "0"],
    "top_logprobs_num": [-1, V + 1, 10**9, "2"],
    "token_ids_logprob": [[-1], [V], [2**70], 5, [HALF]],
    "extra_key": [HALF, 7],
    "rid": [HALF],
    "input_ids": [[-1], [3, -(2**70)]],
}
FINE = {
    "temperature": [0, 0.7, 1, 1e6, None],
    "top_k": [-1, 5, None],
    "max_new_tokens": [0, 10, None],
    "sampling_seed": [0, -5, 2**63 - 1, None],
    "stop": ["a", ["a", "é"], None, []],
    "stop_token_ids": [[5], [10**6], [None], None],
    "logit_bias": [{"5": -100.0}, {"5": float("-inf")}, {5: 1}, None],
}


def asked(params, **fields):
    usual = {"token_ids_logprob": None, "top_logprobs_num": 0, "input_ids": None}
    return SimpleNamespace(sampling_params=params, **{**usual, **fields})


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_parameters_are_refused_by_name(name):
    for value in HOSTILE[name]:
        with pytest.raises(ValueError, match=name) as refused:
            check_request(asked({name: value}), V)
        assert len(str(refused.value)) < 300
        assert str(refused.value).isascii()


@pytest.mark.parametrize("name", FIELDS)
def test_hostile_fields_are_refused_by_name(name):
    for value in FIELDS[name]:
        with pytest.raises(ValueError, match=name):
            check_request(asked({}, **{name: value}), V)


@pytest.mark.parametrize("name", FINE)
def test_what_sglang_serves_is_not_refused(name):
    for value in FINE[name]:
        check_request(asked({name: value}), V)


def test_a_stop_token_is_looked_up_beside_min_new_tokens_only():
    check_request(asked({"stop_token_ids": [V]}), V)
    with pytest.raises(ValueError, match="stop_token_ids"):
        check_request(asked({"stop_token_ids": [V], "min_new_tokens": 1}), V)


def test_parameters_that_are_no_mapping():
    with pytest.raises(ValueError, match="sampling_params"):
        check_request(asked([1]), V)
