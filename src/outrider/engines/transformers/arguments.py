"""What becomes of each argument of Transformers' `generate` under `custom_generate`.

Every argument is *supported*, *neutral* (it cannot change the tokens), or refused unless it has
the value that Transformers gives it by default. A test compares these lists with the installed
version, so that an argument of a new version is decided about; until then it is refused too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from outrider.core import Unsupported

SUPPORTED = frozenset(
    {
        "attention_mask",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",  # Transformers' prompt if there is none
        "custom_generate",
        "do_sample",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "generation_config",
        "input_ids",
        "inputs",
        "logits_processor",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_return_sequences",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefix_allowed_tokens_fn",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "return_dict_in_generate",
        "sequence_bias",
        "stop_strings",
        "stopping_criteria",
        "streamer",
        "suppress_tokens",
        "temperature",
        "tokenizer",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
    }
)

NEUTRAL: Mapping[str, str] = {
    "compile_config": "how Transformers compiles its own passes",
    "continuous_batching_config": "read by generate_batch only",
    "decoder_start_token_id": "for models with an encoder, which are refused",
    "disable_compile": "how Transformers compiles its own passes",
    "early_stopping": "for beams, which are refused",
    "length_penalty": "for beams, which are refused",
    "low_memory": "for contrastive search, which is refused",
    "max_cache_len": "Outrider has a cache of its own, as large as needed",
    "negative_prompt_attention_mask": "for guidance_scale, which is refused",
    "negative_prompt_ids": "for guidance_scale, which is refused",
    "output_attentions": "refused with return_dict_in_generate, and else without effect",
    "output_hidden_states": "refused with return_dict_in_generate, and else without effect",
    "prefill_chunk_size": "how a prompt is read, not what follows it",
    "return_legacy_cache": "no cache is returned",
    "transformers_version": "the version that wrote the configuration",
    "trust_remote_code": "for a custom_generate that is a name",
    "use_cache": "Outrider always has a cache of its own",
    "use_model_defaults": "applied before Outrider is called",
}
"""Arguments that cannot change the tokens, and why."""

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    # the same keys and values in another layout; models' own configurations have some of these
    "cache_implementation": ("dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window"),
    "synced_gpus": (False,),
}
"""Values that cannot change the tokens, of arguments that otherwise are refused."""

_OWN = "Outrider drafts by itself: use drafter= and max_drafts="
_CALLS = "leave it out: it remembers its calls, or is made for all rows of a batch at once"
_BEAMS = "leave it out, or call generate without custom_generate"
_CACHE = "leave it out: Outrider has a cache of its own"

REFUSED: Mapping[str, str] = {
    "assistant_confidence_threshold": _OWN,
    "assistant_early_exit": _OWN,
    "assistant_ensemble_weight": _OWN,
    "assistant_lookbehind": _OWN,
    "assistant_model": "pass it as drafter=",
    "assistant_tokenizer": "use a draft model with the target's tokenizer, as drafter=",
    "cache_config": _CACHE,
    "cache_implementation": _CACHE,
    "constraints": _BEAMS,
    "diversity_penalty": _BEAMS,
    "dola_layers": _BEAMS,
    "encoder_no_repeat_ngram_size": _CALLS,
    "encoder_repetition_penalty": _CALLS,
    "force_words_ids": _BEAMS,
    "guidance_scale": _CALLS,
    "is_assistant": _OWN,
    "max_matching_ngram_size": "use drafter=outrider.NgramDrafter(max_n=...)",
    "max_time": "leave it out, or use outrider.stream and close it in time",
    "num_assistant_tokens": "use max_drafts=",
    "num_assistant_tokens_schedule": "use drafter=outrider.adaptive(model, draft)",
    "num_beam_groups": _BEAMS,
    "num_beams": _BEAMS,
    "penalty_alpha": _BEAMS,
    "prompt_lookup_num_tokens": "use drafter='ngram' and max_drafts=",
    "speculation_type": _OWN,
    "synced_gpus": "run on one process",
    "target_lookbehind": _OWN,
    "token_healing": "heal the prompt before generate",
    "use_mtp": _OWN,
    "watermarking_config": _CALLS,
}
"""What to do instead, for arguments that are refused unless they have their default."""

_GENERATE = inspect.unwrap(GenerationMixin.generate)


def known_arguments() -> set[str]:
    """Return the names of all arguments that the installed `generate` takes by itself."""
    named = set(inspect.signature(_GENERATE).parameters) - {"self", "kwargs"}
    # these are taken from the keyword arguments
    named |= {"tokenizer", "assistant_tokenizer", "trust_remote_code", "input_ids"}
    return named | {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def check_arguments(config: Any, given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise Unsupported if `generate` was asked for something that would be left undone.

    config: the finished generation configuration
    given: the arguments of the call, as far as they are known
    own: those that are Outrider's
    """
    defaults, known = _defaults(), known_arguments()
    made = {name: value for name, value in vars(config).items() if name in known}
    # what was given comes first: the message names what the user wrote
    for name, value in [*given.items(), *made.items()]:
        if name in SUPPORTED or name in NEUTRAL or name in own or value is None:
            continue
        if any(value is v or value == v for v in defaults.get(name, ())):
            continue
        if value not in NEUTRAL_VALUES.get(name, ()):
            shown = repr(value) if isinstance(value, str | int | float) else type(value).__name__
            fix = REFUSED.get(name, "leave it out")
            raise Unsupported(f"{name}={shown:.80} in custom_generate", fix=fix)


def _defaults() -> dict[str, tuple[object, ...]]:
    """Return the values that a field of the configuration may have without being set."""
    made = getattr(GenerationConfig, "_get_default_generation_params", None)
    filled = made() if made is not None else {}
    return {name: (v, filled.get(name)) for name, v in vars(GenerationConfig()).items()}


def call_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """Return the arguments of the call of `model.generate` that is running, {} if there is none.

    Transformers hands a function only what its signature adds, and drops the streamer, the
    assistant model and the tokenizer. So they are read from the frames of the call.
    """
    for frame in _frames():
        local = frame.f_locals
        if frame.f_code is _GENERATE.__code__ and local.get("self") is model:
            named = inspect.signature(_GENERATE).parameters
            found = {name: local[name] for name in ("streamer", "assistant_model", "synced_gpus")}
            found |= {k: v for k, v in local["kwargs"].items() if k not in named}
            # `generate` has popped the tokenizer; torch's decorator around it still has it
            around = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None
            for name in ("tokenizer", "assistant_tokenizer"):
                found[name] = (around or {}).get(name)
            return found
    return {}


def _frames() -> Iterator[Any]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
