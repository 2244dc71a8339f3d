"""Transformers' own way in: `model.generate(..., custom_generate=outrider.custom_generate)`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outrider.core import SamplingParams, Unsupported
from outrider.engines.exactness import Exactness
from outrider.engines.transformers.arguments import call_arguments, check_arguments
from outrider.engines.transformers.generate import DrafterLike, Stream, stream
from outrider.engines.transformers.own_rows import OwnRows
from outrider.engines.transformers.runner import check_model
from outrider.engines.transformers.view import unwrapped


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
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate for `model.generate(..., custom_generate=outrider.custom_generate)`.

    Return [B, L] ids: the input, the output, then padding. Sampling parameters, logits processors,
    stopping criteria and the streamer are those of the call; processors and criteria of the caller
    see one row at a time, with drafts that may not be kept, and must not remember calls. What
    cannot be done exactly is refused: see `arguments`. `stop_strings` are sought in the output.

    model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: from
        Transformers
    drafter, max_drafts, exactness: as in `generate`; give them to `model.generate`
    stop_strings, tokenizer, streamer: as in Transformers' `generate`
    """
    given = call_arguments(model) or model_kwargs
    streamer = streamer if streamer is not None else given.get("streamer")
    try:
        check_model(unwrapped(model))
        check_arguments(generation_config, given, inspect.signature(custom_generate).parameters)
        _check_outputs(generation_config, len(input_ids))
        vocab_size = unwrapped(model).config.get_text_config(decoder=True).vocab_size
        ends = _end_tokens(stopping_criteria, vocab_size)
        prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
        rows = OwnRows(logits_processor, stopping_criteria, generation_config.do_sample)
        if len(prompts) > 1 and (rows.criteria or stop_strings):
            _check_padding(stopping_criteria)
        # the end tokens of this call, which may not be the model's
        shared: Any = {"ignore_eos": True, "stop_token_ids": ends, "stop": stop_strings or ()}
        shared["max_tokens"] = _max_length(stopping_criteria) - input_ids.shape[1]
        run = stream(
            model,
            prompts,
            drafter=drafter,
            sampling=[
                SamplingParams(**rows.sampling(i, row, len(prompts[i])), **shared)
                for i, row in enumerate(input_ids)
            ],
            max_drafts=max_drafts,
            exactness=exactness,
            tokenizer=tokenizer if tokenizer is not None else given.get("tokenizer"),
        )
        logits: list[Tensor] = []
        output = _columns(run, _pad_token(generation_config, ends), streamer, logits)
    finally:
        if streamer is not None:
            streamer.end()  # also after an error: a consumer may be waiting for it
    return _returned(input_ids, output, generation_config, logits_processor, logits)


def _pad_token(config: Any, ends: Sequence[int]) -> int:
    """Return what rows that have ended are filled up with."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return ends[0] if ends else 0


def _returned(
    input_ids: Tensor, output: Tensor, config: Any, processors: Any, logits: list[Tensor]
) -> Any:
    """Return what the call asks for: the ids alone, or an object that has them.

    logits: of each token, if there is one row
    """
    sequences = torch.cat([input_ids, output.to(input_ids.device)], dim=-1)
    if not config.return_dict_in_generate:
        return sequences
    scores = [
        processors(sequences[:, : input_ids.shape[1] + n], row) for n, row in enumerate(logits)
    ]
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(scores) if config.output_scores else None,
        logits=tuple(logits) if config.output_logits else None,
    )


def _columns(run: Stream, pad: int, streamer: Any, logits: list[Tensor]) -> Tensor:
    """Run to the end, and return the outputs padded to the longest, [B, n].

    logits: is given those of each token, [1, V] in 32 bits, if there is one row

    As in plain decoding the streamer gets one token of every row at a time, [B]: what is ahead in
    one row waits for the others. A row that has ended goes on with padding.
    """
    outputs, reasons = run.result.outputs, run.result.finish_reasons
    columns: list[list[int]] = []
    for event in run:
        if len(outputs) == 1:
            logits += event.logits[list(event.outcomes[0].rows)].float()[:, None]
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
    if not bool(mask[:, -1].all()):
        raise Unsupported(
            "attention_mask with padding after a prompt in custom_generate",
            fix="pad on the left: tokenizer.padding_side = 'left'",
        )
    return [row[keep].tolist() for row, keep in zip(input_ids, mask.bool(), strict=True)]


def _check_outputs(config: Any, count: int) -> None:
    """Refuse what plain `generate` returns and we do not have."""
    if not config.return_dict_in_generate:
        return
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise Unsupported(
                f"{name} with return_dict_in_generate in custom_generate", fix="leave it out"
            )
    for name in ("output_scores", "output_logits"):
        if getattr(config, name, None) and count > 1:
            raise Unsupported(
                f"{name} for {count} rows in custom_generate: those of a row that has ended are "
                "computed from padding",
                fix="ask for one row at a time, or use outrider.generate with logprobs",
            )


def _max_length(criteria: Sequence[Any]) -> int:
    """Return the length at which these criteria stop."""
    return min(int(c.max_length) for c in criteria if type(c) is MaxLengthCriteria)


def _check_padding(criteria: Sequence[Any]) -> None:
    """Refuse rows that end at different times if plain `generate` does not pad what follows."""
    if not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        raise Unsupported(
            "stopping criteria or stop strings for several rows without an end token in "
            "custom_generate: a row that has ended is not padded in Transformers, it goes on",
            fix="pass eos_token_id, or one row at a time",
        )


def _end_tokens(criteria: Sequence[Any], vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a row. Others, such as -1, are never emitted."""
    ends = [c.eos_token_id.tolist() for c in criteria if type(c) is EosTokenCriteria]
    tokens = dict.fromkeys(token for tokens in ends for token in tokens)
    return tuple(token for token in tokens if 0 <= token < vocab_size)
