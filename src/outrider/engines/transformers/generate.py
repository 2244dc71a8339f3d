"""`generate` and `stream`: any Transformers causal model, any batch, with speculation."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
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
    Stats,
    Step,
    Unsupported,
    is_whole,
    step,
)
from outrider.drafters import (
    GuardedDrafter,
    ModelDrafter,
    NoDrafter,
    OwnRequests,
    make_drafter,
)
from outrider.engines.exactness import Exactness
from outrider.engines.transformers.heads import HeadFile
from outrider.engines.transformers.host import TransformersHost
from outrider.engines.transformers.requests import Prompts, SamplingLike, make_requests
from outrider.engines.transformers.runner import Runner
from outrider.engines.transformers.tokenizers import check_same_tokenizer
from outrider.engines.transformers.view import unwrapped
from outrider.errors import check_choice
from outrider.kernels.sample_match import DeviceCoins

DrafterLike: TypeAlias = "Drafter | PreTrainedModel | HeadFile | str | None"


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
    logits: [N, V] the model's, one row for each request and each draft
    """

    indices: tuple[int, ...]
    outcomes: Sequence[Outcome]
    proposal: Proposal[Any]
    logits: Tensor = field(repr=False)


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
    """An iterator over the steps of a generation, each a `StepEvent`.

    result: is filled by each step
    """

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
    model: PreTrainedModel,
    input_ids: Prompts,
    *,
    drafter: DrafterLike = "ngram",
    sampling: SamplingLike | Sequence[SamplingLike] = None,
    max_drafts: int = 8,
    rule: RuleName = "match",
    exactness: Exactness = "lossless",
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
    draft_timeout: float | None = None,
) -> Generation:
    """Generate what plain decoding would generate, in fewer passes of the model.

    model: any decoder-only causal LM of Transformers, in eval mode
    input_ids: one prompt or several, as token ids: a list, a list of lists, or a tensor [L] or
        [B, L] without padding
    drafter: "ngram", "suffix", "adaptive" (chooses in each step), "none", the name of an installed
        drafter, a smaller model with the same tokenizer, or a `Drafter` such as that of `adaptive`
    sampling: `SamplingParams` or a dict of its fields, for all prompts or one for each; greedy and
        at most 128 tokens by default
    max_drafts: the most draft tokens for a prompt in one step; 0 is plain decoding
    rule: how drafts are verified: "match" emits the tokens of plain decoding with the same seed;
        "residual" and "block" keep the distribution and use other random numbers
    exactness: "lossless", the distribution of plain decoding, given the logits; or "bitwise", where
        also the logits do not depend on the drafts or the batch, so that the tokens are those of
        plain decoding
    tokenizer: the model's; needed for stop strings, and compared with the draft model's
    draft_tokenizer: the draft model's, if it cannot be loaded from beside its weights
    draft_timeout: seconds that a drafter may take in one step; None is no limit

    Raises `Unsupported` for what cannot be served exactly, and TypeError or ValueError for
    arguments that are wrong in themselves.
    """
    run = stream(
        model,
        input_ids,
        drafter=drafter,
        sampling=sampling,
        max_drafts=max_drafts,
        rule=rule,
        exactness=exactness,
        tokenizer=tokenizer,
        draft_tokenizer=draft_tokenizer,
        draft_timeout=draft_timeout,
    )
    for _ in run:
        pass
    return run.result


def stream(
    model: PreTrainedModel,
    input_ids: Prompts,
    *,
    drafter: DrafterLike = "ngram",
    sampling: SamplingLike | Sequence[SamplingLike] = None,
    max_drafts: int = 8,
    rule: RuleName = "match",
    exactness: Exactness = "lossless",
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
    draft_timeout: float | None = None,
) -> Stream:
    """Start what `generate` does, with the same arguments, and return an iterator over the steps.

    Arguments are checked here, before the first step.
    """
    check_choice("rule", rule, get_args(RuleName))
    if not is_whole(max_drafts, 0):
        raise ValueError(f"max_drafts must be a whole number >= 0, not {max_drafts!r}")
    if rule != "match" and exactness == "bitwise":
        raise Unsupported(
            f"exactness='bitwise' with rule={rule!r}, whose tokens depend on the drafts",
            fix="use rule='match'",
        )
    model = unwrapped(model)
    host = TransformersHost(model, exactness)
    requests = make_requests(host.runner, input_ids, sampling, tokenizer)
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
    own = OwnRequests(drafter)
    try:
        while active:
            prompts_read = bool(active[0].output)
            room = [
                min(max_drafts, r.remaining - 1, host.room(r)) if prompts_read else 0
                for r in active
            ]
            budget = Budget(np.array(room), rule, coins)
            done = step(host, own, active, budget)
            host.commit(done.outcomes)
            if done.withdrawn:
                drafter.fallbacks["withdrawn"] += len(active)
            if prompts_read:
                result.stats.record(done.outcomes, done.proposal)
            else:
                own.start(active)
            own.observe(host.with_hidden(done.outcomes))
            _record_logprobs(done, result)
            for outcome in done.outcomes:
                outcome.apply()
                result.finish_reasons[outcome.request.id] = outcome.finish_reason
            yield StepEvent(tuple(r.id for r in active), done.outcomes, done.proposal, done.logits)
            ended = [r for r in active if r.finish_reason]
            active = [r for r in active if not r.finish_reason]
            host.release(ended)
            own.stop(ended)
    finally:
        if not sys.is_finalizing():  # torch no longer works then, and nothing needs to be freed
            host.release(active)
            own.stop(active)
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


def _drafter(
    given: DrafterLike,
    model: PreTrainedModel,
    runner: Runner,
    tokenizer: Any,
    draft_tokenizer: Any,
) -> Drafter:
    given = unwrapped(given)
    if given is None:
        return NoDrafter()
    if isinstance(given, str):
        if given == AdaptiveDrafter.name:
            return adaptive_drafter()
        return make_drafter(given, {}, others=[AdaptiveDrafter.name])
    if isinstance(given, HeadFile):
        return given.drafter(model, runner.vocab_size)
    if isinstance(given, PreTrainedModel):
        if given is not model:
            check_same_tokenizer(model, given, tokenizer, draft_tokenizer)
        return ModelDrafter(Runner(given), runner.vocab_size)
    needed = ("name", "start", "propose", "observe", "stop")
    missing = [name for name in needed if not hasattr(given, name)]
    if missing or isinstance(given, type):
        what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise TypeError(
            f"drafter is {what}: pass a name, a Transformers model, or an object with "
            f"{', '.join(needed)}"
        )
    return given


def adaptive(
    model: PreTrainedModel,
    draft: PreTrainedModel | HeadFile | Sequence[PreTrainedModel | HeadFile] | None = None,
    *,
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
    trace: str | Path | None = None,
    ahead: str | Path | bool | None = None,
) -> AdaptiveDrafter:
    """Return a drafter that chooses, in each step, among lookups, draft models and none.

    Keep it: what it has learnt in one call it brings to the next. It serves one call at a time.

    model: the one that is to be sped up
    draft: a smaller one with the same tokenizer, or a head: see `load_drafter`; or several of them.
        Draft models are named "model", "model 2" and so on, and heads after their kind
    tokenizer, draft_tokenizer: those of the two models, if they cannot be loaded from beside their
        weights
    trace: a file to which each step is appended, as a line of JSON
    ahead: the socket of a draft server, True for the default one: see docs/ahead.md
    """
    model = unwrapped(model)
    listed = [] if draft is None else draft if isinstance(draft, (list, tuple)) else [draft]
    drafts = [unwrapped(one) for one in listed]
    passing, names = list[ModelDrafter[Any]](), Counter[str]()
    for one in drafts:
        if isinstance(one, PreTrainedModel) and one is not model:
            check_same_tokenizer(model, one, tokenizer, draft_tokenizer)
        drafter = _drafts(model, one)
        names[drafter.name] += 1
        if names[drafter.name] > 1:
            drafter.name += f" {names[drafter.name]}"
        passing.append(drafter)
    return adaptive_drafter(passing, trace=trace, ahead=ahead)


def _drafts(model: PreTrainedModel, draft: PreTrainedModel | HeadFile) -> ModelDrafter[Any]:
    """Return what drafts for control, which says how far to go."""
    vocab_size = Runner(model).vocab_size
    if isinstance(draft, HeadFile):
        return draft.drafter(model, vocab_size, min_survival=0.0, siblings=1)
    if not isinstance(draft, PreTrainedModel):
        raise TypeError(
            f"draft is {type(draft).__name__}: pass a Transformers model, what `load_drafter` "
            "returns, or a list of these"
        )
    return ModelDrafter(Runner(draft), vocab_size, min_survival=0.0, siblings=1)
