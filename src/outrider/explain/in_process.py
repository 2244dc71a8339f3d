"""Record a generation of a Transformers model, in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.clients import (
    check_drafter,
    check_target,
    draft_kind,
    load_model,
    load_tokenizer,
    render_chat,
)
from outrider.errors import Unsupported, UsageError
from outrider.explain.recording import (
    TOP,
    Decode,
    ExplainOptions,
    Logprobs,
    OnTokens,
    Recording,
    StepRecord,
)

if TYPE_CHECKING:
    from outrider.control import AdaptiveDrafter
    from outrider.engines.transformers import StepEvent

__all__ = ["chat_prompt", "local_decode", "record"]

MAX_DRAFTS = 8


def record(options: ExplainOptions, on_tokens: OnTokens) -> tuple[Recording, Decode]:
    """Return the generation and how to spell its tokens. Ctrl-C ends it early, not in vain."""
    import outrider

    model, draft, tokenizer = _load(options)
    text, ids = options.prompt, tokenizer.encode(options.prompt)
    if options.chat:
        text = chat_prompt(tokenizer, options.prompt)
        ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise UsageError("an empty prompt", fix="give at least one token to go on from")
    name = options.drafter or ("ngram" if draft is None else "model")
    drafter, control = _drafter(name, draft, model, tokenizer)
    max_drafts = MAX_DRAFTS if options.max_drafts is None else options.max_drafts
    given: dict[str, Any] = {
        "sampling": {
            "temperature": options.temperature,
            "seed": options.seed,
            "max_tokens": options.max_tokens,
            "logprobs": TOP,
        },
        "exactness": "bitwise" if options.compare else "lossless",
        "tokenizer": tokenizer,
    }
    recording = Recording(text, ids)
    recording.settings = {
        "engine": "Transformers, in process",
        "target": _name(options.target) or "tiny/target",
        "draft": (_name(options.draft) or "tiny/draft") if draft is not None else None,
        "drafter": name,
        "max_drafts": max_drafts,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed if options.temperature else None,
        "exactness": given["exactness"],
    }
    stream = outrider.stream(model, ids, drafter=drafter, max_drafts=max_drafts, **given)
    started = last = time.perf_counter()
    try:
        for event in stream:
            now = time.perf_counter()
            recording.steps.append(_step(event, control, name, now - last))
            on_tokens(len(stream.result.outputs[0]))
            last = now
        (reason,) = stream.result.finish_reasons
        recording.finish_reason = reason.value if reason is not None else "interrupted"
    except KeyboardInterrupt:
        if not recording.steps:
            raise
    finally:
        stream.close()
    recording.seconds = last - started
    recording.output_ids = [token for step in recording.steps for token in step.emitted]
    recording.logprobs = [Logprobs(one.token, one.top) for one in stream.result.logprobs[0]]
    if options.compare and recording.finish_reason != "interrupted":
        plain = outrider.generate(model, ids, drafter="none", **given)
        recording.plain_ids = plain.outputs[0]
    return recording, local_decode(tokenizer)


def _load(options: ExplainOptions) -> tuple[Any, Any, Any]:
    """Return the target, the draft model or None, and the tokenizer."""
    if options.target is None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise Unsupported(str(error), fix="pip install 'outrider[transformers]'") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def load(path: str | Path, dtype: torch.dtype) -> Any:
        if draft_kind(str(path)) != "model":
            import outrider

            return outrider.load_drafter(path)
        return load_model(str(path), dtype).to(device)

    if options.target is not None:
        check_target(options.target)
        model = load(options.target, torch.bfloat16)
        draft = load(options.draft, torch.bfloat16) if options.draft is not None else None
        return model, draft, load_tokenizer(options.target)
    with as_file(files("outrider") / "assets" / "tiny") as tiny:
        torch.set_num_threads(1)  # the models are tiny
        model = load(tiny / "target", torch.float32)
        draft = load(options.draft or tiny / "draft", torch.float32)
        return model, draft, load_tokenizer(str(tiny / "target"))


def _drafter(
    name: str, draft: Any, model: Any, tokenizer: Any
) -> tuple[Any, AdaptiveDrafter | None]:
    """Return what `stream` takes for a drafter of this name, and the one that chooses, if so."""
    if name == "model":
        if draft is None:
            raise UsageError("drafter 'model' without a draft model", fix="add --draft")
        return draft, None
    if name != "adaptive":
        check_drafter(name)
        return name, None
    import outrider

    control = outrider.adaptive(model, draft, tokenizer=tokenizer)
    return control, control


def _step(
    event: StepEvent, control: AdaptiveDrafter | None, name: str, seconds: float
) -> StepRecord:
    (outcome,) = event.outcomes
    drafts = tuple(event.proposal.tokens.tolist())
    parents = tuple(event.proposal.parents.tolist())
    return StepRecord(
        drafter=control.used(outcome.request) if control is not None else name,
        drafts=drafts,
        parents=parents,
        kept=_path(drafts, parents, outcome.tokens[: outcome.num_accepted_drafts]),
        emitted=outcome.tokens,
        seconds=seconds,
    )


def _path(drafts: Sequence[int], parents: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the drafts that lead along these tokens."""
    path: list[int] = []
    for token in tokens:
        here = path[-1] if path else -1
        pairs = enumerate(zip(drafts, parents, strict=True))
        path.append(next(i for i, pair in pairs if pair == (token, here)))
    return tuple(path)


def chat_prompt(tokenizer: Any, said: str) -> str:
    """Return what the model reads if a user says this. Raises Unsupported without a template."""
    if not tokenizer.chat_template:
        raise UsageError("--chat with a model that has no chat template", fix="leave out --chat")
    return render_chat(tokenizer, [{"role": "user", "content": said}])


def local_decode(tokenizer: Any) -> Decode:
    """Return how to spell tokens with a tokenizer of Transformers'."""

    def decode(lists: Sequence[Sequence[int]]) -> list[str]:
        return [tokenizer.decode(list(ids), clean_up_tokenization_spaces=False) for ids in lists]

    return decode


def _name(model: str | None) -> str | None:
    """Return the name of a model, without the folders in which it lies."""
    if model is None:
        return None
    return Path(model).resolve().name if os.path.exists(model) else model
