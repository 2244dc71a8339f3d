"""Transformers' own way in: `model.generate(..., custom_generate=outrider.custom_generate)`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.core import SamplingParams, Unsupported
from outrider.hosts.exactness import Exactness
from outrider.hosts.transformers.arguments import call_arguments, check_arguments
from outrider.hosts.transformers.generate import DrafterLike, Stream, stream

_PROCESSORS = {
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
"""What our sampling parameters can express, in the order in which they are applied.

For each the attribute that holds its value, and the parameter."""

_PLAIN = {"filter_value": -math.inf, "min_tokens_to_keep": 1, "prompt_ignore_length": None}
"""Other attributes of these, and the value that our parameters assume."""


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    drafter: DrafterLike = "ngram",
    max_drafts: int = 8,
    exactness: Exactness = "lossless",
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate for `model.generate(..., custom_generate=outrider.custom_generate)`.

    Return [B, L] ids: the input, the output, then padding. Sampling parameters, lengths, end tokens
    and the streamer are those of the call. What cannot be done exactly is refused: see
    `outrider.hosts.transformers.arguments`. `stop_strings` are looked for in the output.

    model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: from
        Transformers
    drafter, max_drafts, exactness: as in `generate`; give them to `model.generate`
    stop_strings, tokenizer, streamer: as in Transformers' `generate`
    """
    given = call_arguments(model) or model_kwargs
    streamer = streamer if streamer is not None else given.get("streamer")
    try:
        own = inspect.signature(custom_generate).parameters
        check_arguments(generation_config, given, own)
        ends = _end_tokens(stopping_criteria)
        run = stream(
            model,
            _prompts(input_ids, model_kwargs.get("attention_mask")),
            drafter=drafter,
            sampling=SamplingParams(
                **_sampling(logits_processor, generation_config.do_sample),
                max_tokens=_max_length(stopping_criteria) - input_ids.shape[1],
                # the end tokens of this call, which may not be the model's
                ignore_eos=True,
                stop_token_ids=ends,
                stop=stop_strings or (),
            ),
            max_drafts=max_drafts,
            exactness=exactness,
            tokenizer=tokenizer if tokenizer is not None else given.get("tokenizer"),
        )
        pad = generation_config.pad_token_id
        if pad is None:
            pad = ends[0] if ends else 0
        output = _columns(run, pad, streamer)
    finally:
        if streamer is not None:
            streamer.end()  # also after an error: somebody may be waiting for it
    return torch.cat([input_ids, output.to(input_ids.device)], dim=-1)


def _columns(run: Stream, pad: int, streamer: Any) -> Tensor:
    """Run to the end, and return the outputs padded to the longest, [B, n].

    As in plain decoding the streamer gets one token of every row at a time, [B]: what is ahead in
    one row waits for the others. A row that has ended goes on with padding.
    """
    outputs, reasons = run.result.outputs, run.result.finish_reasons
    columns: list[list[int]] = []
    for _ in run:
        lengths = [len(o) for o, reason in zip(outputs, reasons, strict=True) if reason is None]
        ready = min(lengths) if lengths else max(map(len, outputs))
        for n in range(len(columns), ready):
            columns.append([output[n] if n < len(output) else pad for output in outputs])
            if streamer is not None:
                streamer.put(torch.tensor(columns[-1]))
    return torch.tensor(columns).T


def _prompts(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the tokens of each row that its mask lets through."""
    if mask is None:
        return [list(row) for row in input_ids.tolist()]
    return [row[keep].tolist() for row, keep in zip(input_ids, mask.bool(), strict=True)]


def _sampling(processors: Sequence[Any], do_sample: bool | None) -> dict[str, Any]:
    """Return the sampling parameters that do what these processors do, or refuse."""
    order, found = list(_PROCESSORS), {"temperature": 1.0}
    kinds = [type(processor) for processor in processors]
    wrong = [kind.__name__ for kind in kinds if kind not in _PROCESSORS]
    wrong = wrong or [
        f"{kind.__name__} after {before.__name__}"
        for before, kind in pairwise(kinds)
        if order.index(kind) <= order.index(before)
    ]
    if wrong:
        raise Unsupported(
            f"{wrong[0]} in custom_generate",
            fix="leave it out: no sampling parameter of Outrider can express it",
        )
    for processor in processors:
        attribute, parameter = _PROCESSORS[type(processor)]
        found[parameter] = getattr(processor, attribute)
        for name, plain in _PLAIN.items():
            if getattr(processor, name, plain) != plain:
                what = f"{type(processor).__name__} with {name}"
                raise Unsupported(f"{what} in custom_generate", fix="unset it")
    return found if do_sample else {**found, "temperature": 0.0}


def _max_length(criteria: Sequence[Any]) -> int:
    """Return the length at which these criteria stop, or refuse those that do more than that."""
    foreign = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
    if foreign:
        raise Unsupported(
            f"{type(foreign[0]).__name__} in custom_generate",
            fix="use max_new_tokens, eos_token_id or stop_strings",
        )
    return min(int(c.max_length) for c in criteria if type(c) is MaxLengthCriteria)


def _end_tokens(criteria: Sequence[Any]) -> tuple[int, ...]:
    ends = [c.eos_token_id.tolist() for c in criteria if type(c) is EosTokenCriteria]
    return tuple(dict.fromkeys(token for tokens in ends for token in tokens))
