"""Parameters and fields of a request at SGLang's intake, before SGLang looks at them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import mutated, refusal, texts, values, written

from outrider.engines.sglang.intake.fields import INT32, INT64, MAX_NESTED, MAX_REAL, shallow
from outrider.engines.sglang.intake.parameters import (
    EACH,
    INTERNAL,
    MAX_ANSWERS,
    MAX_REQUESTS,
    REQUEST,
    SAMPLING,
    check_form,
    check_request,
)
from outrider.engines.sglang.intake.patterns import are_quick, check_patterns

V = 100
PARAMS = {
    "temperature": 0.7, "top_k": 5, "top_p": 0.9, "max_new_tokens": 8, "sampling_seed": 7, "n": 1,
    "stop": ["a"], "stop_token_ids": [3], "logit_bias": {"5": 1.0}, "custom_params": {},
}  # fmt: skip
BARE = dict.fromkeys([*EACH, *REQUEST])
CALL = {"text": "a", "sampling_params": PARAMS, "logprob_start_len": -1, "extra_key": "b"}


def whole(value, low, high) -> bool:
    return value is None or (isinstance(value, int) and low <= value <= high)


def is_text(value) -> bool:
    return isinstance(value, str) and value.encode("utf-8", "ignore").decode() == value


def hold(params) -> None:
    """Check what the scheduler makes tensors and texts of."""
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"):
        value = params.get(name)
        assert value is None or (math.isfinite(value) and abs(value) <= MAX_REAL)
    assert whole(params.get("top_k"), -1, INT32)
    assert whole(params.get("max_new_tokens"), 0, INT32)
    assert whole(params.get("sampling_seed"), -INT64 - 1, INT64)
    assert whole(params.get("n"), 1, MAX_ANSWERS)
    assert all(whole(token, -INT64 - 1, INT64) for token in params.get("stop_token_ids") or ())
    stops = params.get("stop") or []
    assert all(map(is_text, [stops] if isinstance(stops, str) else stops))
    for token, value in (params.get("logit_bias") or {}).items():
        assert 0 <= int(token) < V
        assert value == -math.inf or math.isfinite(value)


def parsed(text):
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the server's parser refuses it
        assume(False)


HOSTILE = st.dictionaries(st.sampled_from(sorted(SAMPLING)) | texts(), values(), max_size=4)


@given(written(PARAMS).map(parsed) | HOSTILE | mutated(PARAMS))
def test_what_is_let_through_can_be_held(params):
    with refusal(ValueError):
        check_request(SimpleNamespace(**BARE | {"sampling_params": params, "text": "a"}), V)
        hold(params)


FIELDS = st.dictionaries(st.sampled_from(sorted(BARE)), values(), max_size=4)


@given(FIELDS | mutated(CALL).filter(lambda call: isinstance(call, dict)), st.booleans())
def test_calls_have_the_form_that_sglang_expands(fields, several):
    usual = {"text": ["a", "b"] if several else "a"}
    call = SimpleNamespace(**{**BARE, **usual, **fields})
    with refusal(ValueError):
        check_form(call)
        prompts = call.text if isinstance(call.text, list) else [call.text]
        assert not any(getattr(call, name) for name in INTERNAL)
        for name in EACH:
            value = getattr(call, name)
            if isinstance(value, list) and call.text is not None:
                assert isinstance(call.text, list)
                assert len(value) == len(prompts)
        params = call.sampling_params
        for one in params if isinstance(params, list) else [params]:
            assert len(prompts) * ((one or {}).get("n") or 1) <= MAX_REQUESTS


@pytest.mark.parametrize("kind", ["list", "mapping"])
def test_a_value_has_a_depth_that_can_be_sent(kind):
    def nested(depth):
        value = None
        for _ in range(depth):
            value = [value] if kind == "list" else {"a": value}
        return value

    for name in ("custom_labels", "image_data", "sampling_params"):
        for depth in (1, MAX_NESTED, MAX_NESTED + 1, 10_000):
            said = shallow({name: nested(depth - 1)})
            assert (said is None) == (depth <= MAX_NESTED)
        with pytest.raises(ValueError, match=f"{name} must be"):
            check_form(SimpleNamespace(**{**BARE, **CALL, name: nested(10_000)}))


ATOMS = st.sampled_from(("a", ".", "[ab]", "\\s", "^", "(?:)", "(?=a)", "(a)", "\\1", "\\d"))


def grown(inner):
    repeat = st.sampled_from(("*", "+", "?", "{2}", "{1,8}", "{1,99999}", "*?", "+?"))
    return (
        st.tuples(inner, repeat).map(lambda pair: f"(?:{pair[0]}){pair[1]}")
        | st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})")
    )


@given(st.recursive(ATOMS, grown, max_leaves=12) | texts())
def test_a_pattern_that_is_let_through_is_found_in_time(pattern):
    """The watch counts the seconds."""
    import re

    with refusal(ValueError):
        if are_quick([pattern]):
            for text in ("a" * 3000 + "!", "ab" * 1500 + "\n"):
                re.search(pattern, text)


def test_a_pattern_is_looked_for_in_the_whole_answer():
    """`[^x]*x` is tried from each of its places."""
    for patterns, most in ((["[^x]*x"], 2048), ([r"\s{0,8}!"] * 4, 1 << 17), ([], 1 << 17)):
        check_patterns(patterns, most)
    for patterns, most in ((["[^x]*x"], 4096), (["[^x]*x"] * 4, 2048)):
        with pytest.raises(ValueError, match="set a smaller max_new_tokens"):
            check_patterns(patterns, most)
