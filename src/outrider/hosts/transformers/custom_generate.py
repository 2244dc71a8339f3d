"""Transformers' own way in: `model.generate(..., custom_generate=outrider.custom_generate)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core import SamplingParams, Unsupported
from outrider.hosts.transformers.generate import DrafterLike, generate
from outrider.hosts.transformers.runner import Exactness

# What these do is done by our own sampling parameters and end tokens.
_PROCESSORS = {
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
}
_CRITERIA = {"EosTokenCriteria", "MaxLengthCriteria", "StopStringCriteria"}


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    drafter: DrafterLike = "ngram",
    max_drafts: int = 8,
    exactness: Exactness = "law",
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate for `model.generate`, from whose configuration the sampling parameters come.

    Return [B, L] ids: the input, the output, then padding. What cannot be done exactly is refused.
    """
    config = generation_config
    foreign = {type(p).__name__ for p in logits_processor} - _PROCESSORS
    foreign |= {type(c).__name__ for c in stopping_criteria} - _CRITERIA
    if foreign or config.num_beams != 1 or config.return_dict_in_generate:
        what = ", ".join(sorted(foreign)) or "beams or return_dict_in_generate"
        raise Unsupported(
            f"{what} in custom_generate", fix="use outrider.generate, or leave it out"
        )
    mask = model_kwargs.get("attention_mask")
    rows = input_ids.tolist()
    keep = [[1] * len(row) for row in rows] if mask is None else mask.tolist()
    prompts = [[t for t, k in zip(r, m, strict=True) if k] for r, m in zip(rows, keep, strict=True)]
    eos = config.eos_token_id
    ends = (eos,) if isinstance(eos, int) else tuple(eos or ())
    sampling = SamplingParams(
        temperature=(1.0 if config.temperature is None else config.temperature)
        if config.do_sample
        else 0.0,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty or 1.0,
        max_tokens=config.max_length - input_ids.shape[1],
        # the end tokens of this call, which may not be the model's
        ignore_eos=True,
        stop_token_ids=ends,
        stop=config.stop_strings or (),
    )
    done = generate(
        model,
        prompts,
        drafter=drafter,
        sampling=sampling,
        max_drafts=max_drafts,
        exactness=exactness,
        tokenizer=tokenizer,
    )
    pad = config.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    longest = max(len(output) for output in done.outputs)
    padded = [[*output, *[pad] * (longest - len(output))] for output in done.outputs]
    return torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=-1)
