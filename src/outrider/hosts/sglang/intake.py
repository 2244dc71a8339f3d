"""What a request may ask of the server: numbers that arithmetic holds, tokens that there are.

SGLang compares some parameters with their ranges, in the tokenizer's process. What it lets through
becomes tensors in the scheduler, and a value that they cannot hold raises there: the server stops,
and all requests with it. So each request is checked before SGLang looks at it, and refused with
status 400. What is checked here is harmless where it is not refused; what SGLang itself refuses is
left to SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MAX_REAL = 3.4028234e38
"""The largest number of 32 bits."""

INT32, INT64 = 2**31 - 1, 2**63 - 1

MAX_ANSWERS = 4096
"""Answers to one request (`n`). Each takes a place in the queue before the first is served."""

Check = Callable[[Any], "str | None"]
"""Returns what a value has to be, if it is something else."""


def whole(low: int, high: int) -> Check:
    """Return a check that a value is a whole number from `low` to `high`."""

    def check(value: Any) -> str | None:
        is_whole = isinstance(value, int)  # 20.0 is none
        return None if is_whole and low <= value <= high else f"a whole number in [{low}, {high}]"

    return check


def real(low: float = -MAX_REAL, high: float = MAX_REAL) -> Check:
    """Return a check that a value is a number from `low` to `high`, which is finite."""

    def check(value: Any) -> str | None:
        is_real = isinstance(value, (int, float))  # NaN is in no range
        return None if is_real and low <= value <= high else f"a number in [{low:g}, {high:g}]"

    return check


def text(value: Any) -> str | None:
    """Check that a value is a text that can be encoded: no half of a surrogate pair alone."""
    return None if isinstance(value, str) and _is_unicode(value) else "a text in Unicode"


def texts(value: Any) -> str | None:
    """Check that a value is a text, or a list of texts."""
    found = value if isinstance(value, list) else [value]
    return None if all(text(one) is None for one in found) else "a text, or a list of texts"


def mapping(value: Any) -> str | None:
    """Check that a value is a mapping."""
    return None if isinstance(value, Mapping) else "a mapping"


SAMPLING: Mapping[str, Check] = {
    "temperature": real(0.0),
    "top_p": real(0.0, 1.0),
    "min_p": real(0.0, 1.0),
    "top_k": whole(-1, INT32),
    "frequency_penalty": real(),
    "presence_penalty": real(),
    "repetition_penalty": real(0.0),
    "max_new_tokens": whole(0, INT32),
    "min_new_tokens": whole(0, INT32),
    "n": whole(1, MAX_ANSWERS),
    "sampling_seed": whole(-INT64 - 1, INT64),
    "stream_interval": whole(1, INT32),
    "stop": texts,
    "stop_regex": texts,
    "regex": text,
    "ebnf": text,
    "custom_params": mapping,
}
"""Sampling parameters. None stands for the default of each; others are SGLang's to check."""

FIELDS: Mapping[str, Check] = {
    "logprob_start_len": whole(-1, INT32),
    "extra_key": text,
    "rid": text,
}
"""Fields of a request beside its sampling parameters."""


def check_request(asked: Any, vocab_size: int) -> None:
    """Raise ValueError, with the name, if one request asks for what the scheduler cannot hold.

    asked: SGLang's `GenerateReqInput`, of one prompt
    vocab_size: of the target
    """
    params = asked.sampling_params
    if not isinstance(params, Mapping):
        raise ValueError(f"sampling_params must be a mapping, not {_shown(params)}")
    _check(SAMPLING, params, "sampling_params.")
    _check(FIELDS, {name: getattr(asked, name, None) for name in FIELDS}, "")
    token = whole(0, vocab_size - 1)
    # SGLang takes these as they are; only beside min_new_tokens are they looked up
    end = token if params.get("min_new_tokens") else whole(-INT64 - 1, INT64)
    _check_each(end, params.get("stop_token_ids"), "sampling_params.stop_token_ids")
    _check_bias(params.get("logit_bias"), vocab_size)
    most = {"top_logprobs_num": whole(0, vocab_size)}
    _check(most, {"top_logprobs_num": asked.top_logprobs_num}, "")
    _check_each(token, asked.token_ids_logprob, "token_ids_logprob")
    if asked.input_ids is not None and min(asked.input_ids, default=0) < 0:
        raise ValueError("input_ids must not be negative")


def _check(checks: Mapping[str, Check], values: Mapping[str, Any], where: str) -> None:
    for name, check in checks.items():
        value = values.get(name)
        if value is not None and (wanted := check(value)) is not None:
            raise ValueError(f"{where}{name} must be {wanted}, not {_shown(value)}")


def _check_each(check: Check, values: Any, name: str) -> None:
    if values is None:
        return
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise ValueError(f"{name} must be a list, not {_shown(values)}")
    for value in values:
        if value is not None and (wanted := check(value)) is not None:
            raise ValueError(f"{name}: each must be {wanted}, not {_shown(value)}")


def _check_bias(bias: Any, vocab_size: int) -> None:
    if bias is None:
        return
    if (wanted := mapping(bias)) is not None:
        raise ValueError(f"sampling_params.logit_bias must be {wanted}, not {_shown(bias)}")
    for name, value in bias.items():
        # -inf forbids a token
        if value == -math.inf:
            continue
        if (wanted := real()(value)) is not None:
            raise ValueError(f"sampling_params.logit_bias of {_shown(name)} must be {wanted}")
    if any(not _is_token(name, vocab_size) for name in bias):
        raise ValueError(f"sampling_params.logit_bias: tokens must be in [0, {vocab_size - 1}]")


def _is_token(name: Any, vocab_size: int) -> bool:
    try:
        return 0 <= int(name) < vocab_size
    except (TypeError, ValueError):
        return False


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """Return a value as a message has it: short, and in ASCII."""
    return (
        ascii(value)[:80] if not isinstance(value, int) or abs(value) < 2**70 else "a huge number"
    )
