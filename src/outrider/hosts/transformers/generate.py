"""`generate` and `stream`: any Transformers causal model, any batch, with speculation."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.control import AdaptiveDrafter, adaptive_drafter
from outrider.core import (
    Budget,
    Drafter,
    FinishReason,
    Outcome,
    Proposal,
    Request,
    RuleName,
    SamplingParams,
    Stats,
    Step,
    Unsupported,
    step,
)
from outrider.drafters import (
    GuardedDrafter,
    ModelDrafter,
    NoDrafter,
    make_drafter,
)
from outrider.hosts.transformers.host import TransformersHost
from outrider.hosts.transformers.runner import Exactness, Runner
from outrider.hosts.transformers.tokenizers import check_same_tokenizer
from outrider.kernels.sample_match import DeviceCoins

DrafterLike: TypeAlias = "Drafter | PreTrainedModel | str | None"
SamplingLike: TypeAlias = "SamplingParams | Mapping[str, Any] | None"


@dataclass(frozen=True)
class TokenLogprobs:
    """The model's log-probabilities at one position, before any transform.

    token: of the emitted token
    top: the most likely tokens with theirs, best first
    """

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class StepEvent:
    """What one step of the loop did.

    indices: which of the inputs each outcome belongs to
    outcomes: [B] what each request emitted
    proposal: what had been drafted
    """

    indices: tuple[int, ...]
    outcomes: Sequence[Outcome]
    proposal: Proposal[Any]


@dataclass
class Generation:
    """The result of `generate`, one entry for each input.

    prompts, outputs: token ids
    finish_reasons: "stop" or "length"
    logprobs: for inputs that asked for them, one entry for each output token
    stats: what speculation did, over all inputs
    """

    prompts: list[list[int]]
    outputs: list[list[int]]
    finish_reasons: list[FinishReason | None]
    logprobs: list[list[TokenLogprobs]]
    stats: Stats

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and output of each input."""
        return [[*p, *o] for p, o in zip(self.prompts, self.outputs, strict=True)]


@dataclass
class Stream:
    """An iterator over the steps of a generation. `result` fills as it goes."""

    result: Generation
    _events: Generator[StepEvent, None, None] = field(repr=False)

    def __iter__(self) -> Iterator[StepEvent]:
        return self._events

    def __next__(self) -> StepEvent:
        return next(self._events)

    def close(self) -> None:
        """Stop early, and give everything back."""
        self._events.close()


def generate(
    model: PreTrainedModel, input_ids: Tensor | Sequence[Any], **options: Any
) -> Generation:
    """Generate as plain decoding would, faster. Options are those of `stream`."""
    run = stream(model, input_ids, **options)
    for _ in run:
        pass
    return run.result


def stream(
    model: PreTrainedModel,
    input_ids: Tensor | Sequence[Any],
    *,
    drafter: DrafterLike = "ngram",
    sampling: SamplingLike | Sequence[SamplingLike] = None,
    max_drafts: int = 8,
    rule: RuleName = "match",
    exactness: Exactness = "law",
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
    draft_timeout: float | None = None,
) -> Stream:
    """Start to generate, and return an iterator over the steps.

    model: any decoder-only causal LM of Transformers, in eval mode
    input_ids: one prompt or several: a tensor [L] or [B, L] without padding, or lists of ids
    drafter: "ngram", "suffix", "adaptive" (both, as far as they pay), "none", a smaller model with
        the same tokenizer, or a Drafter, such as that of `adaptive`
    sampling: parameters for all prompts, or for each; greedy by default
    max_drafts: K, the most drafts for a request in one step
    rule: how drafts are verified; "match" emits the tokens of plain decoding with the same seed
    exactness: "law", exact given the logits; or "bitwise", where the logits do not depend on the
        drafts or the batch either, so that the tokens are those of plain decoding
    tokenizer: for stop strings, and to compare with the draft model's
    draft_tokenizer: the draft model's, where it cannot be loaded from beside its weights
    draft_timeout: seconds that a drafter may take in one step
    """
    if max_drafts < 0:
        raise ValueError("max_drafts must be >= 0")
    if rule != "match" and exactness == "bitwise":
        raise Unsupported(
            f"exactness='bitwise' with rule={rule!r}, whose tokens depend on the drafts",
            fix="use rule='match'",
        )
    host = TransformersHost(model, exactness)
    requests = _requests(model, input_ids, sampling, tokenizer)
    for request in requests:
        if request.length + request.sampling.max_tokens > host.runner.max_length:
            raise Unsupported(
                f"{request.length} + {request.sampling.max_tokens} tokens in a model of "
                f"{host.runner.max_length} positions",
                fix="lower max_tokens",
            )
    found = _drafter(drafter, model, host.runner, tokenizer, draft_tokenizer)
    guarded = GuardedDrafter(found, host.runner.vocab_size, draft_timeout)
    host.read_hidden(guarded.hidden_layers)
    result = Generation(
        prompts=[list(request.prompt) for request in requests],
        outputs=[request.output for request in requests],
        finish_reasons=[None] * len(requests),
        logprobs=[[] for _ in requests],
        stats=Stats(fallbacks=guarded.fallbacks),
    )
    return Stream(result, _run(host, guarded, requests, result, max_drafts, rule))


def _run(
    host: TransformersHost,
    drafter: GuardedDrafter,
    requests: list[Request],
    result: Generation,
    max_drafts: int,
    rule: RuleName,
) -> Generator[StepEvent, None, None]:
    """Decode until every request has ended. The first step reads the prompts."""
    coins = DeviceCoins()
    active = list(requests)
    try:
        while active:
            prompts_read = bool(active[0].output)
            room = [min(max_drafts, r.remaining - 1) if prompts_read else 0 for r in active]
            budget = Budget(np.array(room), rule, coins)
            done = step(host, drafter, active, budget)
            host.commit(done.outcomes)
            if prompts_read:
                result.stats.record(done.outcomes, done.proposal)
            else:
                drafter.start(active)
            drafter.observe(host.with_hidden(done.outcomes))
            _record_logprobs(done, result)
            for outcome in done.outcomes:
                outcome.apply()
                result.finish_reasons[outcome.request.id] = outcome.finish_reason
            yield StepEvent(tuple(r.id for r in active), done.outcomes, done.proposal)
            ended = [r for r in active if r.finish_reason]
            active = [r for r in active if not r.finish_reason]
            host.release(ended)
            drafter.stop(ended)
    finally:
        host.release(active)
        drafter.stop(active)
        drafter.close()


def _record_logprobs(done: Step, result: Generation) -> None:
    for outcome, root in zip(done.outcomes, done.proposal.root_rows, strict=True):
        count = outcome.request.sampling.logprobs
        if count is None:
            continue
        rows = [root + row for row in outcome.rows]
        logprobs = done.logits[rows].float().log_softmax(-1)
        top = logprobs.topk(count, dim=-1)
        for i, token in enumerate(outcome.tokens):
            pairs = zip(top.indices[i].tolist(), top.values[i].tolist(), strict=True)
            entry = TokenLogprobs(logprobs[i, token].item(), tuple(pairs))
            result.logprobs[outcome.request.id].append(entry)


def _requests(
    model: PreTrainedModel,
    input_ids: Tensor | Sequence[Any],
    sampling: SamplingLike | Sequence[SamplingLike],
    tokenizer: Any,
) -> list[Request]:
    ids = input_ids.tolist() if isinstance(input_ids, Tensor) else list(input_ids)
    prompts = [ids] if ids and isinstance(ids[0], int) else ids
    if isinstance(sampling, Sequence):
        if len(sampling) != len(prompts):
            raise ValueError(f"{len(sampling)} sampling parameters for {len(prompts)} prompts")
        wanted = list(sampling)
    else:
        wanted = [sampling] * len(prompts)
    # from torch's own generator, so that torch.manual_seed makes a run repeatable
    seeds = torch.randint(2**62, (len(prompts),)).tolist()
    ends = _end_tokens(model)
    return [
        Request(
            id=i,
            prompt=tuple(int(token) for token in prompt),
            sampling=params,
            seed=seed if params.seed is None else params.seed,
            eos_token_ids=ends,
            detokenize=tokenizer.decode if tokenizer is not None else None,
        )
        for i, (prompt, params, seed) in enumerate(
            zip(prompts, map(_sampling, wanted), seeds, strict=True)
        )
    ]


def _sampling(given: SamplingLike) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    return replace(SamplingParams(), **(given or {}))


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    config = model.generation_config
    ends = config.eos_token_id if config is not None else model.config.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def _drafter(
    given: DrafterLike,
    model: PreTrainedModel,
    runner: Runner,
    tokenizer: Any,
    draft_tokenizer: Any,
) -> Drafter:
    if given is None:
        return NoDrafter()
    if given == AdaptiveDrafter.name:
        return adaptive_drafter()
    if isinstance(given, str):
        return make_drafter(given, {})
    if isinstance(given, PreTrainedModel):
        if given is not model:
            check_same_tokenizer(model, given, tokenizer, draft_tokenizer)
        return ModelDrafter(Runner(given), runner.vocab_size)
    return given


def adaptive(
    model: PreTrainedModel,
    draft: PreTrainedModel | None = None,
    *,
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
    **options: Any,
) -> AdaptiveDrafter:
    """Return a drafter that chooses, in each step, among lookups, a draft model and none.

    Keep it: what it has learnt in one call it brings to the next. It serves one call at a time.

    model: the one that is to be sped up
    draft: a smaller one with the same tokenizer
    options: those of `outrider.control.adaptive_drafter`
    """
    if draft is None:
        return adaptive_drafter(**options)
    if draft is not model:
        check_same_tokenizer(model, draft, tokenizer, draft_tokenizer)
    # how far to go is for control to say
    drafts = ModelDrafter(Runner(draft), Runner(model).vocab_size, min_survival=0.0, siblings=1)
    return adaptive_drafter(drafts, **options)
