"""From SGLang's arguments to ours: what the flags mean, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from outrider.core import Unsupported
from outrider.drafters.registry import OURS
from outrider.engines.sglang.arguments.chosen import refusing_start
from outrider.engines.sglang.arguments.flags import REFUSED, WITH_DRAFT_MODEL
from outrider.engines.tokenizers import check_same_tokens
from outrider.serving import tracing
from outrider.serving.profile import (
    ADAPTIVE,
    DEVICE,
    LOOKUP,
    MODEL,
    REPAIR_VARIABLE,
    Profile,
    load_profile,
    repair_wanted,
)

logger = logging.getLogger(__name__)

DEFAULT_DRAFTS = 4
"""K of a fixed drafter, if neither --speculative-num-steps, --speculative-num-draft-tokens nor the
profile says."""

ADAPTIVE_DRAFTS = 24
"""The same with control, the default, which uses as many as pay: in copied text more than 12 are
accepted."""

REPAIRED = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH")
"""SGLang's own algorithms that take the most likely token on ROCm, whatever the temperature."""

VERIFYING = ["fa3", "flashinfer", "triton", "aiter"]
"""Attention backends whose TARGET_VERIFY takes a chain without a mask."""

SAME_WINDOW = "fa3"
"""The one among them of which both passes are known to read the same keys of a sliding window. With
triton and aiter, SGLang's plain decoding reads one key less than TARGET_VERIFY."""


def refuse_flags(given: Any) -> None:
    """Stop the server if it is given a flag whose effect Outrider cannot give.

    given: SGLang's arguments before it completes them; it resets some flags without a word
    """
    from outrider.engines.sglang.drafts.heads import draft_kind

    with refusing_start():
        for refusal in REFUSED:
            refusal.check(given)
        if draft_kind(given) != MODEL:
            for refusal in WITH_DRAFT_MODEL:
                refusal.check(given)


def apply(server_args: Any) -> None:
    """Check SGLang's arguments and complete them. Raises Unsupported."""
    from outrider.engines.sglang.drafts.heads import draft_kind, head_sources

    profile, draft = load_profile(), draft_kind(server_args)
    has_draft_model = draft == MODEL
    if MODEL in (profile.drafter, *profile.drafters) and not has_draft_model:
        raise Unsupported(
            f"the profile's drafter {MODEL!r} without a draft model",
            fix="add --speculative-draft-model-path",
        )

    if profile.draft_bits is not None and not has_draft_model:
        raise Unsupported(
            f"draft_bits {profile.draft_bits} without a draft model",
            fix="add --speculative-draft-model-path",
        )
    if profile.draft_bits is not None and server_args.device != "cpu":
        raise Unsupported(
            f"draft_bits {profile.draft_bits} on {server_args.device}",
            fix="on a GPU load a quantized draft model: SGLang runs it with kernels made for it",
        )

    if profile.tracing:
        tracing.check_installed()
    verify_pass(profile.verify_pass, server_args)
    _check_drafters(profile, draft)
    if sources := head_sources(profile, server_args):
        _check_heads(sources, server_args)
    if has_draft_model:
        _check_tokenizers(server_args)

    steps = _num_steps(profile, server_args)
    if profile.flush_tokens is not None and profile.flush_tokens <= steps:
        logger.warning(
            "flush_tokens %d: a step may give %d tokens, and several chunks at once show it",
            profile.flush_tokens,
            steps + 1,
        )
    server_args.speculative_num_steps = steps
    server_args.speculative_num_draft_tokens = steps + 1
    server_args.speculative_eagle_topk = 1
    if server_args.enable_mixed_chunk:
        server_args.enable_mixed_chunk = False
        logger.warning("mixed chunked prefill is off with speculation, as with SGLang's own")
    overlap = "off" if server_args.disable_overlap_schedule else "on"
    logger.info("K = %d; overlap scheduling is %s", steps, overlap)


def _num_steps(profile: Profile, server_args: Any) -> int:
    """Return the most drafts of a step. Raises Unsupported if what was given disagrees."""
    steps, rows = server_args.speculative_num_steps, server_args.speculative_num_draft_tokens
    if steps is None:
        usual = profile.max_drafts
        if usual is None:
            usual = ADAPTIVE_DRAFTS if profile.drafter == ADAPTIVE else DEFAULT_DRAFTS
            usual = max([usual, *profile.depths().values()])
        steps = usual if rows is None else rows - 1
    if steps < 0 or rows not in (None, steps + 1):
        raise Unsupported(
            f"--speculative-num-steps {steps} with --speculative-num-draft-tokens {rows}",
            fix="K drafts and the last token make K + 1 rows: give one of the two",
        )
    if profile.max_drafts is not None and profile.max_drafts > steps:
        raise Unsupported(
            f"the profile's max_drafts {profile.max_drafts} with --speculative-num-steps {steps}",
            fix="leave the flag out, or give it the most that any request may have",
        )
    for name, depth in profile.depths().items():
        if depth > (steps if profile.max_drafts is None else profile.max_drafts):
            raise Unsupported(
                f"the drafter {name!r} of depth {depth} with at most {steps} drafts in a step",
                fix="a smaller depth, or more with --speculative-num-steps or max_drafts",
            )
    return int(steps)


def _check_heads(sources: Mapping[str, Any], server_args: Any) -> None:
    """Raise Unsupported for a head that cannot be had, as far as its files tell.

    sources: see `heads.head_sources`
    """
    for name, source in sources.items():
        source.shape()
        if name in (ADAPTIVE, DEVICE, MODEL, *OURS):
            raise Unsupported(f"a head of the name {name!r}", fix="choose another name for it")
    # 0.5.23 has both
    mode = getattr(server_args, "return_hidden_states_mode", None)
    if server_args.enable_return_hidden_states or mode is not None:
        raise Unsupported(
            "--enable-return-hidden-states or --return-hidden-states-mode with a head",
            fix="leave one out: SGLang returns either the last states or those that heads read",
        )


def _check_drafters(profile: Profile, draft: str | None) -> None:
    """Raise Unsupported for a drafter that is not there, or options that it does not have.

    Those of other packages are made by the worker only: they may need its device.
    """
    from outrider.control import Limits, adaptive_control
    from outrider.drafters import NgramDrafter
    from outrider.drafters.registry import known_drafters, make_drafter

    heads = {*profile.head_names(), *((draft,) if draft else ())}
    known = known_drafters(ADAPTIVE, DEVICE, MODEL, *heads)
    made_here: dict[str, Callable[..., Any]]

    def control(**options: Any) -> Any:
        # as the worker does: what the engine can do is no option
        return adaptive_control(limits=Limits(), **options)

    made_here = {ADAPTIVE: control, DEVICE: partial(NgramDrafter, **LOOKUP)}
    for name in profile.names(draft):
        options = profile.drafters.get(name, {})
        if name in made_here:
            try:
                made_here[name](**options)
            except (TypeError, ValueError) as error:
                raise Unsupported(f"drafter {name!r} with {options}", fix=str(error)) from error
        elif name not in (MODEL, *heads) and known.get(name) is None:
            make_drafter(name, options, others=(ADAPTIVE, DEVICE, MODEL, *heads))


def _check_tokenizers(server_args: Any) -> None:
    """Raise Unsupported unless the draft model reads the target's tokens."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    target = server_args.tokenizer_path or server_args.model_path
    found = []
    for path in (target, server_args.speculative_draft_model_path):
        try:
            found.append(get_tokenizer(path, trust_remote_code=server_args.trust_remote_code))
        except (OSError, ValueError) as error:
            raise Unsupported(
                f"the tokenizer of {path}", fix=f"it cannot be loaded: {error}"
            ) from error
    check_same_tokens(*found)


def verify_pass(asked: str | None, server_args: Any, window: int | None = None) -> str:
    """Return how drafts are verified: "rows", "target_verify" or "auto". Raises Unsupported.

    asked: in the profile; by default what the backend and the exactness asked for allow
    window: SGLang's sliding window of the model, None or 0 without one: see `SAME_WINDOW`
    """
    backend, exact = server_args.attention_backend, server_args.enable_deterministic_inference
    if window and window > 0 and (others := _backends(server_args) - {SAME_WINDOW}):
        if asked == "target_verify":
            raise Unsupported(
                f"verify_pass target_verify with sliding windows on {', '.join(sorted(others))}",
                fix="use verify_pass: rows: TARGET_VERIFY reads other keys than plain decoding",
            )
        return "rows"
    if asked in (None, "rows"):
        return "auto" if asked is None and backend in VERIFYING and not exact else "rows"
    if exact:
        raise Unsupported(
            f"verify_pass {asked} with --enable-deterministic-inference",
            fix="use verify_pass: rows: only decode rows give the bits of plain decoding",
        )
    if backend not in (None, *VERIFYING):
        raise Unsupported(
            f"verify_pass {asked} with --attention-backend {backend}",
            fix=f"use verify_pass: rows, or one of {', '.join(VERIFYING)}",
        )
    return asked


def _backends(server_args: Any) -> set[str]:
    """Return the attention backends that read prompts and that decode."""
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return {name for name in (getattr(server_args, key, None) for key in names) if name}


def repairs(server_args: Any) -> bool:
    """Say whether SGLang's own speculation is to be repaired. Raises Unsupported if it can't be."""
    if not repair_wanted():
        return False
    from sglang.srt.utils.common import is_hip

    if not is_hip():
        raise Unsupported(
            f"{REPAIR_VARIABLE} without ROCm", fix="unset it: SGLang samples by itself elsewhere"
        )
    if (server_args.speculative_algorithm or "").upper() not in REPAIRED:
        logger.warning("%s: nothing to repair without %s", REPAIR_VARIABLE, ", ".join(REPAIRED))
        return False
    return True


def check_model(target_worker: Any) -> None:
    """Stop the server for models whose cache is more than keys and values by position."""
    runner, config = target_worker.model_runner, target_worker.model_config
    kinds = {
        "sliding-window layers with a cache of their own": runner.is_hybrid_swa,
        "state-space layers": getattr(runner, "mambaish_config", None) is not None,
        "an encoder": config.is_encoder_decoder,
        "multimodal input": config.is_multimodal,
        "n-gram embeddings": getattr(runner, "use_ngram_embedding", False),
    }
    for what, is_so in kinds.items():
        if is_so:
            hint = "; add --disable-hybrid-swa-memory" if runner.is_hybrid_swa else ""
            raise SystemExit(f"outrider: a model with {what} is not supported{hint}")
