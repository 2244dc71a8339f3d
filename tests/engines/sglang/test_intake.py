"""A request that the scheduler could not hold is refused before it gets there."""

from __future__ import annotations

import inspect
import json
from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from outrider.engines.sglang.intake.parameters import (
    EACH,
    FLAGS,
    INTERNAL,
    MAX_REQUESTS,
    REQUEST,
    SAMPLING,
    check_form,
    check_labels,
    check_prompt,
    check_request,
    refusing,
)
from outrider.engines.sglang.requests import tenant_of

V = 100
HALF = "\ud800"
"""Half of a surrogate pair: no UTF-8 has it."""


def chained(count):
    """Return a schema of as many definitions, each of which refers to the next."""
    arrays = ({"type": "array", "items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(count))
    definitions = {str(n): one for n, one in enumerate(arrays)} | {str(count): {"type": "null"}}
    return json.dumps({"$ref": "#/$defs/0", "$defs": definitions})


HOSTILE = {
    "temperature": [float("inf"), float("nan"), -1.0, 1e300, 10**400, "1", [1.0]],
    "top_p": [float("nan"), 2.0, "1"],
    "min_p": [float("inf"), -0.1],
    "top_k": [2**31, -2, 1.5, "5", 10**400],
    "frequency_penalty": [float("nan"), 1e39, "0"],
    "repetition_penalty": [float("inf"), -1, {}, 0, 1e-45],
    "max_new_tokens": [-1, 2**31, 1.5, 20.0, "9", float("nan"), float("inf")],
    "min_new_tokens": [2**31, -1],
    "n": [0, 10**9, 2.5],
    "sampling_seed": [2**63, -(2**63) - 1, 10**400, "7", 1.5],
    "stream_interval": [0, -1],
    "stop": [7, [7], HALF, ["a", HALF]],
    "stop_regex": [
        *(7, "(a+)+$", "(.*)*x", "a?" * 60 + "a" * 60, "(a)\\1", "(", ["a", "\\s*\\s*x"]),
        # what matches nothing is matched as often as it must be, and each time takes memory
        *("(?:\\b){4000000000}", "(?:(?=a)){100000}", "(?:(?:\\b){900}){900}", ["[^x]*x"] * 100),
    ],
    "regex": [7, HALF, "(" * 201 + ")" * 201, "\0", "a\0"],
    "ebnf": ["\0", "(" * 201, "".join(f"r{n} ::= r{n + 1}\n" for n in range(5000))],
    "json_schema": [
        *({}, "[" * 10**6, "", "{"),
        # brackets in a text close none
        json.dumps({"title": "]" * 300})[:-1] + ', "const": ' + "[" * 300 + "]" * 300 + "}",
        # the compiler reads both
        '{"const": ' + "[" * 300 + "]" * 300 + ', "const": 1}',
        json.dumps({"type": "string", "pattern": "\0"}),
        chained(2000),
    ],
    "structural_tag": [
        *("", "[" * 200_000, '{"a": "' + "]" * 99 + '", "b": ' + "[" * 201 + "]" * 201 + "}"),
    ],
    "skip_special_tokens": [{}, "yes", 1],
    "custom_params": [[1], "x"],
    "stop_token_ids": [[2**63], 7, ["a"], [1.5]],
    "logit_bias": [{"5": float("nan")}, {"5": 3e38}, {"5": "x"}, {"-1": 1.0}, {"100": 1.0}, [1]],
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
    "stop_regex": ["a", ["\\n+", "\\d{1,8}\\.\\d{1,8}", "(Human|User):"], "(?:\\b){2}", None],
    "json_schema": [
        *('{"type": "object", "properties": {"a": {"type": "string"}}}', "$$ANY$$", "true", None),
        *(json.dumps({"enum": ["]}", "a\nb", "(:"] * 300}), '{"title": "a\tb"}', chained(200)),
    ],
    "regex": ["(a|b)*c", "[)]" * 300, None],
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


def test_a_prompt_without_tokens():
    for tokens in (None, [0], array("q", [5])):
        check_prompt(tokens)
    for tokens in ([], array("q")):
        with pytest.raises(ValueError, match="the prompt has no tokens"):
            check_prompt(tokens)


def test_parameters_that_are_no_mapping():
    with pytest.raises(ValueError, match="sampling_params"):
        check_request(asked([1]), V)


def test_each_name_of_sglang_is_known():
    """A parameter or field of a new version is not let through by chance."""
    within = {"self", "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len"}
    params = {*inspect.signature(SamplingParams).parameters} - within - {"is_normalized"}
    assert params <= SAMPLING.keys()
    assert GenerateReqInput.__dataclass_fields__.keys() <= EACH.keys() | REQUEST.keys()
    assert not EACH.keys() & REQUEST.keys()


def test_an_unknown_parameter_is_refused():
    for name in ("is_normalized", "stop_strs", "nope", HALF):
        with pytest.raises(ValueError, match="no such parameter"):
            check_request(asked({name: True}), V)


CALLS = {
    "rid": [["a"], ["a", "b", "c"], [HALF, "b"]],
    "text": [[], ["a", HALF], 7],
    "sampling_params": [[{}], [{}, 7], {"n": 10**9}, {"n": MAX_REQUESTS // 2}, 5],
    "logprob_start_len": [[0], [0, 2**40]],
    "bootstrap_port": [2**31, [1]],
    "session_params": [{"id": 7}, {"nope": 1}, {"offset": 10**400}],
    "priority": [2**64],
    "received_time": [float("nan")],
    "stream": ["yes"],
    **{name: ["a", [1], True] for name in INTERNAL},
}


def call(**fields):
    """Return what /generate makes of a body."""
    made = GenerateReqInput(text=["a", "b"])
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_another_form_are_refused_by_name(name):
    for value in CALLS[name]:
        if not hasattr(GenerateReqInput(), name):
            pytest.skip("not in this version")
        with pytest.raises(ValueError, match=name):
            check_form(call(**{name: value}))


def test_calls_that_sglang_serves():
    for fields in (
        {},
        {"text": "a", "rid": "b", "image_data": ["x"], "session_params": {"id": "s", "offset": 3}},
        {"rid": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}], "logprob_start_len": [0, 1]},
        {"text": None, "input_ids": [1, 2], "top_logprobs_num": 2, "token_ids_logprob": [1, 2]},
        {"text": None, "input_ids": [[1], [2]], "token_ids_logprob": [[1], [2]]},
        {"text": "a", "need_wait_for_mm_inputs": False},
        dict.fromkeys(FLAGS, True),
    ):
        check_form(call(**fields))


def test_what_is_replaced_in_a_session_has_a_name():
    check_form(call(text="a", session_params={"id": "s", "rid": "r", "replace": True}))
    with pytest.raises(ValueError, match="replace: name the request"):
        check_form(call(text="a", session_params={"id": "s", "replace": True}))


def test_embeddings_are_no_tokens():
    """Beside a request with tokens, or of another type than the weights, they stop SGLang."""
    for embeds in ([[0.5, 0.5]], [[[0.5]], [[0.5]]], [["a"]]):
        with pytest.raises(ValueError, match="input_embeds must be left out"):
            check_form(call(input_embeds=embeds))


def test_one_value_is_no_list():
    for values in ([True], []):
        with pytest.raises(ValueError, match="return_logprob must be no list"):
            check_form(call(text="a", return_logprob=values))


def test_labels_are_those_of_the_server():
    """Prometheus raises at others, in the loop that hands all answers out."""
    check_labels(call(custom_labels={"a": "1"}), ["a"])
    for labels, allowed in (({"b": "1"}, ["a"]), ({"a": "1"}, None), ({"a": HALF}, ["a"])):
        with pytest.raises(ValueError, match="custom_labels"):
            check_labels(call(custom_labels=labels), allowed)


def test_what_sglang_raises_about_a_request_is_a_refusal():
    for raised in (TypeError("a\nb"), IndexError(), RecursionError(), RuntimeError(HALF)):
        with pytest.raises(ValueError, match="the request cannot be read") as refused, refusing():
            raise raised
        assert str(refused.value).isascii()
        assert "\n" not in str(refused.value)
    with pytest.raises(OSError, match="disk"), refusing():
        raise OSError("disk")


def test_tenants_are_apart():
    """By `cache_salt`, which SGLang 0.5.23 keeps apart, as well as by `extra_key`."""

    def tenant(**names):
        return tenant_of(SimpleNamespace(**{"extra_key": None, **names}))

    told = [
        tenant(),
        tenant(extra_key="a"),
        tenant(cache_salt="a"),
        tenant(cache_salt="a", extra_key="bc"),
        tenant(cache_salt="ab", extra_key="c"),
        tenant(cache_salt="abc"),
        tenant(extra_key="abc"),
        tenant(extra_key="1:abc"),
    ]
    assert len(set(told)) == len(told)
    assert told[0] == ""
