"""What a request may ask of the server: fields of their types, numbers that arithmetic holds.

SGLang checks some fields, in the tokenizer's process. What it lets through reaches the scheduler,
and what raises there stops the server, and all requests with it. So each request is checked before
SGLang looks at it, and refused with status 400: first its form, before one prompt becomes many,
then the values of each. What is checked here is harmless where it is not refused; what SGLang
itself refuses is left to SGLang. Its own errors about a request become refusals, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from outrider.engines.sglang.intake.fields import (
    INT32,
    INT64,
    MAX_BIAS,
    MIN_PENALTY,
    Check,
    anything,
    flag,
    grammar,
    mapping,
    nothing,
    patterns,
    real,
    schema,
    shallow,
    shown,
    tag,
    text,
    texts,
    tokens_only,
    whole,
)

MAX_ANSWERS = 4096
"""Answers to one prompt (`n`). Each takes a place in the queue before the first is served."""

MAX_REQUESTS = 1 << 16
"""Answers to all prompts of one call."""

SAMPLING: Mapping[str, Check] = {
    "temperature": real(0.0),
    "top_p": real(0.0, 1.0),
    "min_p": real(0.0, 1.0),
    "top_k": whole(-1, INT32),
    "frequency_penalty": real(),
    "presence_penalty": real(),
    "repetition_penalty": real(MIN_PENALTY),
    "max_new_tokens": whole(0, INT32),
    "min_new_tokens": whole(0, INT32),
    "n": whole(1, MAX_ANSWERS),
    "beam_width": whole(1, MAX_ANSWERS),
    "sampling_seed": whole(-INT64 - 1, INT64),
    "stream_interval": whole(1, INT32),
    "stop": texts,
    "stop_token_ids": anything,  # with the vocabulary's size: see `check_request`
    "logit_bias": anything,
    "stop_regex": patterns,
    "json_schema": schema,
    "regex": grammar,
    "ebnf": grammar,
    "structural_tag": tag,
    "ebnf_full_assistant": flag,
    "ignore_eos": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "no_stop_trim": flag,
    "custom_params": mapping,
    "watermark": anything,
}
"""Sampling parameters. None stands for the default of each; there are no others."""

SESSION: Mapping[str, Check] = {
    "id": text,
    "rid": text,
    "offset": whole(-INT32, INT32),
    "replace": flag,
    "drop_previous_output": flag,
}
"""What `session_params` may have."""

EACH: Mapping[str, Check] = {
    "text": text,
    "rid": text,
    "sampling_params": mapping,
    "return_logprob": flag,
    "logprob_start_len": whole(-1, INT32),
    "top_logprobs_num": whole(0, INT32),
    "return_hidden_states": anything,
    "return_sampling_mask": flag,
    "sampling_logprobs_mode": text,
    "lora_path": text,
    "custom_logit_processor": text,
    "bootstrap_host": text,
    "bootstrap_port": whole(0, 65535),
    "bootstrap_room": whole(0, INT64 - MAX_REQUESTS),
    "bootstrap_pair_key": text,
    "decode_tp_size": whole(1, INT32),
    "extra_key": text,
    "cache_salt": text,
    "kv_hints": anything,
}
"""Fields of one value, or of a list with one for each prompt."""

ALONE: Mapping[str, Check] = {
    "session_id": text,
    "session_params": mapping,
    "conversation_id": text,
    "routing_key": text,
    "priority": whole(-INT64 - 1, INT64),
    "routed_dp_rank": whole(-INT32, INT32),
    "disagg_prefill_dp_rank": whole(-INT32, INT32),
    "data_parallel_rank": whole(-INT32, INT32),
    "routed_experts_start_len": whole(0, INT32),
    "max_thinking_tokens": whole(0, INT32),
    "received_time": real(0.0),
    "custom_labels": mapping,
    "external_trace_header": mapping,
    # prompts and media, of which there may be lists of lists
    **dict.fromkeys(("input_ids", "token_ids_logprob"), anything),
    "input_embeds": tokens_only,
    **dict.fromkeys(("image_data", "video_data", "audio_data", "modalities"), anything),
    **dict.fromkeys(("mm_hashes", "mm_content_hashes", "video_config"), anything),
    **dict.fromkeys(("images_config", "mm_processor_kwargs", "watermark"), anything),
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch"), whole(0, INT32)),
    **dict.fromkeys(("image_max_dynamic_patch", "video_max_dynamic_patch"), whole(0, INT32)),
}
"""Fields of one value for all prompts."""

FLAGS = (
    *("stream", "log_metrics", "no_logs", "background", "return_text_in_logprobs"),
    *("return_routed_experts", "return_indexer_topk", "return_prompt_token_ids", "return_bytes"),
    *("return_entropy", "require_reasoning", "use_audio_in_video", "return_flat_raw_top_logprobs"),
    *("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64"),
)
"""Fields that are true or false."""

INTERNAL = (
    *("http_worker_ipc", "lora_id", "positional_embed_overrides", "need_wait_for_mm_inputs"),
    *("num_items_assigned", "encoder_urls"),
    # of scoring: beside a request that has none the scheduler stops
    *("multi_item_delimiter_indices", "token_indices_to_pool"),
)
"""Fields that SGLang sets itself, after this check."""

REQUEST = {**ALONE, **dict.fromkeys(FLAGS, flag), **dict.fromkeys(INTERNAL, nothing)}
"""All fields of `GenerateReqInput` but those of EACH."""


@contextmanager
def refusing() -> Iterator[None]:
    """Make what SGLang raises about a request a refusal: it answers ValueError with status 400."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        from fastapi import HTTPException

        if isinstance(error, HTTPException):
            raise
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"the request cannot be read ({shown(said)})") from error


def check_form(asked: Any) -> None:
    """Raise ValueError, with the name, if a call has another form than SGLang takes.

    asked: SGLang's `GenerateReqInput` as it came, of one prompt or of several
    """
    values = vars(asked)
    containers = {k: v for k, v in values.items() if isinstance(v, (list, tuple, Mapping))}
    _check(dict.fromkeys(containers, shallow), containers, "")
    count = _prompts(asked)
    _check(REQUEST, values, "")
    for name, check in EACH.items():
        value = getattr(asked, name, None)
        if not isinstance(value, list):
            _check({name: check}, {name: value}, "")
        elif len(value) != count:
            wanted = "no list" if count is None else f"a list of {count}, as there are prompts"
            raise ValueError(f"{name} must be {wanted}")
        else:
            for one in value:
                _check({name: check}, {name: one}, f"in the list {name}, ")
    _check_answers(asked.sampling_params, count)
    if asked.session_params is not None:
        _check_names(SESSION, asked.session_params, "session_params.")
        # the scheduler would stop: it drops all requests of the session while it goes over them
        if asked.session_params.get("replace") and asked.session_params.get("rid") is None:
            raise ValueError(
                "session_params.replace: name the request that is replaced, by its rid"
            )


def _prompts(asked: Any) -> int | None:
    """Return the number of prompts of a call in the form of a list, else None."""
    for name, depth in (("text", 0), ("input_ids", 1), ("input_embeds", 2)):
        value = getattr(asked, name)
        if value is not None:
            return len(value) if _depth(value, name) > depth else None
    return None  # SGLang refuses it


def _depth(value: Any, name: str) -> int:
    depth = 0
    while isinstance(value, list):
        if not value:
            raise ValueError(f"{name} must not be empty")
        value, depth = value[0], depth + 1
    return depth


def _check_answers(params: Any, count: int | None) -> None:
    for one in params if isinstance(params, list) else [params]:
        n = (one or {}).get("n")
        _check({"n": SAMPLING["n"]}, {"n": n}, "sampling_params.")
        if (n or 1) * (count or 1) > MAX_REQUESTS:
            raise ValueError(f"prompts times sampling_params.n must be at most {MAX_REQUESTS}")


def check_request(asked: Any, vocab_size: int) -> None:
    """Raise ValueError, with the name, if one request asks for what the scheduler cannot hold.

    asked: SGLang's `GenerateReqInput`, of one prompt
    vocab_size: of the target
    """
    params = asked.sampling_params
    if not isinstance(params, Mapping):
        raise ValueError(f"sampling_params must be a mapping, not {shown(params)}")
    _check_names(SAMPLING, params, "sampling_params.")
    _check(EACH, vars(asked), "")
    token = whole(0, vocab_size - 1)
    # SGLang takes these as they are; only beside min_new_tokens are they looked up
    end = token if params.get("min_new_tokens") else whole(-INT64 - 1, INT64)
    _check_each(end, params.get("stop_token_ids"), "sampling_params.stop_token_ids")
    _check_bias(params.get("logit_bias"), vocab_size)
    _check({"top_logprobs_num": whole(0, vocab_size)}, vars(asked), "")
    _check_each(token, asked.token_ids_logprob, "token_ids_logprob")
    if asked.input_ids and not 0 <= min(asked.input_ids) <= max(asked.input_ids) < vocab_size:
        raise ValueError(f"input_ids: tokens must be in [0, {vocab_size - 1}]")


def check_prompt(tokens: Any) -> None:
    """Raise ValueError if a prompt has no tokens: the scheduler stops at a batch without any.

    tokens: of the prompt; those of an empty text are none with tokenizers that begin with no token
    """
    if tokens is not None and not len(tokens):
        raise ValueError("the prompt has no tokens")


def check_labels(asked: Any, allowed: Iterable[str] | None) -> None:
    """Raise ValueError if a request has labels for metrics that the server was not started with."""
    for name, value in (asked.custom_labels or {}).items():
        if name not in (allowed or ()) or text(value) is not None:
            raise ValueError(
                f"custom_labels: the server has no label {shown(name)} of such a value"
            )


def _check(checks: Mapping[str, Check], values: Mapping[str, Any], where: str) -> None:
    for name, check in checks.items():
        value = values.get(name)
        if value is not None and (wanted := check(value)) is not None:
            raise ValueError(f"{where}{name} must be {wanted}, not {shown(value)}")


def _check_names(checks: Mapping[str, Check], values: Mapping[str, Any], where: str) -> None:
    """Check the values, and that there are no others."""
    for name in values:
        if name not in checks:
            raise ValueError(f"{where}{shown(name)}: there is no such parameter")
    _check(checks, values, where)


def _check_each(check: Check, values: Any, name: str) -> None:
    if values is None:
        return
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise ValueError(f"{name} must be a list, not {shown(values)}")
    for value in values:
        if value is not None and (wanted := check(value)) is not None:
            raise ValueError(f"{name}: each must be {wanted}, not {shown(value)}")


def _check_bias(bias: Any, vocab_size: int) -> None:
    if bias is None:
        return
    if (wanted := mapping(bias)) is not None:
        raise ValueError(f"sampling_params.logit_bias must be {wanted}, not {shown(bias)}")
    for name, value in bias.items():
        # -inf forbids a token
        if value == -math.inf:
            continue
        if (wanted := real(-MAX_BIAS, MAX_BIAS)(value)) is not None:
            raise ValueError(f"sampling_params.logit_bias of {shown(name)} must be {wanted}")
    if any(not _is_token(name, vocab_size) for name in bias):
        raise ValueError(f"sampling_params.logit_bias: tokens must be in [0, {vocab_size - 1}]")


def _is_token(name: Any, vocab_size: int) -> bool:
    try:
        return 0 <= int(name) < vocab_size
    except (TypeError, ValueError):
        return False
