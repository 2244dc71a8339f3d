"""Hooks where requests come in: what the scheduler could not hold is refused with status 400."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from outrider.hosts.sglang import bodies, intake
from outrider.hosts.sglang.hooks import Hook, chosen_args
from outrider.hosts.sglang.host import host
from outrider.hosts.sglang.patterns import check_patterns
from outrider.hosts.sglang.profile import load_profile, request_options


def verify_sampling_params(result: None, self: Any, vocab_size: int) -> None:
    """Check what a request asks of Outrider."""
    args = chosen_args()
    if args is None:
        return
    from outrider.hosts.sglang.heads import draft_kind

    profile, draft = load_profile(), draft_kind(args)
    request_options(self.custom_params, profile.names(draft), profile.report_acceptance)
    if self.min_p > 0 and args.enable_deterministic_inference:
        raise ValueError(
            "min_p with --enable-deterministic-inference: SGLang's seeded sampler does not have it"
        )


def normalize_request(original: Callable[..., Any], self: Any) -> Any:
    """Refuse a call of another form than SGLang takes, before it makes many of one prompt."""
    if chosen_args() is None:
        return original(self)
    intake.check_form(self)
    with intake.refusing():
        return original(self)


def validate_one_request(original: Callable[..., Any], self: Any, obj: Any, input_ids: Any) -> Any:
    """Refuse what the scheduler cannot hold, before SGLang looks at it."""
    args = chosen_args()
    if args is None or not hasattr(obj, "token_ids_logprob"):  # an embedding has none
        return original(self, obj, input_ids)
    with _forgetting(self, obj), intake.refusing():
        intake.check_request(obj, self.model_config.vocab_size)
        intake.check_prompt(input_ids)
        intake.check_labels(obj, args.tokenizer_metrics_allowed_custom_labels)
        return original(self, obj, input_ids)


def create_tokenized_object(
    original: Callable[..., Any], self: Any, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse what SGLang cannot read, and what the scheduler could not."""
    if chosen_args() is None or not hasattr(obj, "token_ids_logprob"):
        return original(self, obj, *args, **kwargs)
    with _forgetting(self, obj), intake.refusing():
        made = original(self, obj, *args, **kwargs)
        params, most = made.sampling_params, self.model_config.context_len
        if params.max_new_tokens is not None:
            most = min(most, params.max_new_tokens)
        check_patterns(params.stop_regex_strs, most)
        host().check_sent(made)
        return made


def convert_openai_request(
    original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None
) -> Any:
    """Refuse what SGLang cannot make a request of its own of: it answers with 500."""
    if chosen_args() is None:
        return original(self, request, raw_request)
    with intake.refusing():
        return original(self, request, raw_request)


def lay_front_hooks(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """Hook the HTTP server in the processes that have one; others need not import it."""
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None or chosen_args() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry

    from outrider.hosts.sglang import plugin
    from outrider.hosts.sglang.contract import hook_target

    plugin.lay({hook_target(name): hook for name, hook in host().front_hooks().items()})
    HookRegistry.apply_hooks()
    plugin.check_hooks(front=True)
    bodies.refuse_unread(server.app)


@contextmanager
def _forgetting(manager: Any, obj: Any) -> Iterator[None]:
    """Forget a request that is refused: SGLang 0.5.11 would keep it for good."""
    try:
        yield
    except BaseException:
        manager.rid_to_state.pop(obj.rid, None)
        raise


_OPENAI = "entrypoints.openai"

HOOKS: dict[str, Hook] = {
    "managers.tokenizer_manager.TokenizerManager.__init__": (lay_front_hooks, "AFTER"),
    "managers.io_struct.GenerateReqInput.normalize_batch_and_arguments": (
        normalize_request,
        "AROUND",
    ),
    "managers.tokenizer_manager.TokenizerManager._validate_one_request": (
        validate_one_request,
        "AROUND",
    ),
    "managers.tokenizer_manager.TokenizerManager._create_tokenized_object": (
        create_tokenized_object,
        "AROUND",
    ),
    "sampling.sampling_params.SamplingParams.verify": (verify_sampling_params, "AFTER"),
}
"""Hooks of what each request passes."""

FRONT: dict[str, Hook] = {
    f"{_OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request": (
        convert_openai_request,
        "AROUND",
    ),
    f"{_OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request": (
        convert_openai_request,
        "AROUND",
    ),
}
"""Hooks of the HTTP server, at places that the contract names too."""
