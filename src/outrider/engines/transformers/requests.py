"""Requests from what a user gives: prompts as token ids, and how to go on from each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core import Request, SamplingParams, Unsupported
from outrider.engines.transformers.runner import Runner

Prompts: TypeAlias = "Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]"
LARGEST = 1e30
"""Parameters of this size leave room in 32 bits for what they are multiplied with."""

SamplingLike: TypeAlias = "SamplingParams | Mapping[str, Any] | None"


def make_requests(
    runner: Runner,
    input_ids: Prompts,
    sampling: SamplingLike | Sequence[SamplingLike],
    tokenizer: Any,
) -> list[Request]:
    """Return a request for each prompt. Refuse what the model cannot read or cannot hold."""
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise TypeError(f"tokenizer is {type(tokenizer).__name__}: pass the tokenizer itself")
    prompts = token_ids(input_ids)
    params = _sampling_of_each(sampling, len(prompts))
    # from torch's own generator, so that torch.manual_seed makes a run repeatable
    seeds = torch.randint(2**62, (len(prompts),)).tolist()
    ends = _end_tokens(runner.model)
    requests = [
        Request(
            id=i,
            prompt=tuple(prompt),
            sampling=wanted,
            seed=seed if wanted.seed is None else wanted.seed,
            eos_token_ids=ends,
            detokenize=tokenizer.decode if tokenizer is not None else None,
        )
        for i, (prompt, wanted, seed) in enumerate(zip(prompts, params, seeds, strict=True))
    ]
    for request in requests:
        _check_ids(request, runner.vocab_size)
        _check_values(request.sampling)
        _check_length(request, runner)
    return requests


def token_ids(input_ids: Prompts) -> list[list[int]]:
    """Return the prompts as lists of ids. Raise TypeError for what is not token ids."""
    if isinstance(input_ids, str | bytes):
        raise TypeError("input_ids is text: pass token ids, such as tokenizer.encode(text)")
    if isinstance(input_ids, Mapping):
        raise TypeError(
            f"input_ids is a {type(input_ids).__name__}: pass its ids, without padding, such as "
            "tokenizer(texts)['input_ids']"
        )
    given = _listed(input_ids)
    one = bool(given) and isinstance(given[0], Integral)
    prompts = [given] if one else [_listed(prompt) for prompt in given]
    for i, prompt in enumerate(prompts):
        for n, token in enumerate(prompt):
            if not isinstance(token, Integral):
                kind = "text" if isinstance(token, str) else type(token).__name__
                raise TypeError(
                    f"prompt {i} has {kind} at position {n}: pass token ids, such as "
                    "tokenizer(texts)['input_ids']"
                )
    return [[int(token) for token in prompt] for prompt in prompts]


def _listed(values: Any) -> list[Any]:
    """Return a tensor, an array or a sequence as a list; anything else as the only entry of one."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    is_sequence = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    return list(values) if is_sequence else [values]


def _sampling_of_each(
    sampling: SamplingLike | Sequence[SamplingLike], count: int
) -> list[SamplingParams]:
    if isinstance(sampling, list | tuple):
        if len(sampling) != count:
            raise ValueError(f"{len(sampling)} sampling parameters for {count} prompts")
        return [_sampling(given) for given in sampling]
    return [_sampling(sampling)] * count


def _sampling(given: Any) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    if given is None or isinstance(given, Mapping):
        return SamplingParams(**(given or {}))
    raise TypeError(
        f"sampling is of type {type(given).__name__}: pass SamplingParams, a dict such as "
        "{'max_tokens': 64}, or a list of these, one for each prompt"
    )


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    config = model.generation_config
    ends = config.eos_token_id if config is not None else model.config.eos_token_id
    return frozenset() if ends is None else frozenset(map(int, _listed(ends)))


def _check_values(sampling: SamplingParams) -> None:
    """Refuse what would make every logit infinite, or the same, in 32 bits."""
    least, most = 1 / LARGEST, LARGEST
    allowed = {
        "temperature": sampling.temperature == 0 or least <= sampling.temperature <= most,
        "repetition_penalty": least <= sampling.repetition_penalty <= most,
        "frequency_penalty": abs(sampling.frequency_penalty) <= most,
        "presence_penalty": abs(sampling.presence_penalty) <= most,
        "logit_bias": all(abs(b) <= most or b == -math.inf for b in sampling.logit_bias.values()),
    }
    for name, holds in allowed.items():
        if not holds:
            raise ValueError(
                f"{name}={getattr(sampling, name)!r:.80} is beyond what 32 bits can hold: choose "
                f"a size between {least:.0e} and {most:.0e}"
            )


def _check_ids(request: Request, vocab_size: int) -> None:
    sampling = request.sampling
    for where, ids in (
        (f"prompt {request.id}", request.prompt),
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"{where} has the token id {wrong}, and the model's ids are 0 to {vocab_size - 1}: "
                "use the model's own tokenizer"
            )
    if sampling.logprobs is not None and sampling.logprobs > vocab_size:
        raise ValueError(f"logprobs={sampling.logprobs} of a vocabulary of {vocab_size} tokens")


def _check_length(request: Request, runner: Runner) -> None:
    prompt, most, longest = request.length, request.sampling.max_tokens, runner.max_length
    changes = ", beyond which its rotary factors change with each position"
    why = changes if longest == runner.rope_limit else ""
    if prompt + most > longest:
        raise Unsupported(
            f"prompt {request.id} of {prompt} tokens and max_tokens={most}, for a model of "
            f"{longest} positions{why}",
            fix=f"lower max_tokens to {longest - prompt} or less"
            if prompt < longest
            else f"shorten the prompt to fewer than {longest} tokens",
        )
