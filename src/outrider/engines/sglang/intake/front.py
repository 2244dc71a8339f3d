"""Hooks where requests come in: what the scheduler could not hold is refused with status 400."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from outrider.engines.sglang.hooks.laying import HookTable, after, around
from outrider.engines.sglang.intake import bodies
from outrider.engines.sglang.intake import parameters as intake
from outrider.engines.sglang.intake.patterns import check_patterns
from outrider.serving.profile import load_profile, request_options

_OPENAI = "entrypoints.openai"
_MANAGER = "managers.tokenizer_manager.TokenizerManager"


class RequestHooks(HookTable):
    """Hooks of what each request passes."""

    @after("sampling.sampling_params.SamplingParams.verify")
    def verify_sampling_params(self, result: None, their: Any, vocab_size: int) -> None:
        """Check what a request asks of Outrider."""
        from outrider.engines.sglang.drafts.heads import draft_kind

        args = self.chosen_args()
        profile, draft = load_profile(), draft_kind(args)
        request_options(their.custom_params, profile.names(draft), profile.report_acceptance)
        if their.min_p > 0 and args.enable_deterministic_inference:
            raise ValueError(
                "min_p with --enable-deterministic-inference: "
                "SGLang's seeded sampler does not have it"
            )

    @around("managers.io_struct.GenerateReqInput.normalize_batch_and_arguments")
    def normalize_request(self, original: Callable[..., Any], their: Any) -> Any:
        """Refuse a call of another form than SGLang takes, before it makes many of one prompt."""
        intake.check_form(their)
        with intake.refusing():
            return original(their)

    @around(f"{_MANAGER}._validate_one_request")
    def validate_one_request(
        self, original: Callable[..., Any], their: Any, obj: Any, input_ids: Any
    ) -> Any:
        """Refuse what the scheduler cannot hold, before SGLang looks at it."""
        if not hasattr(obj, "token_ids_logprob"):  # an embedding has none
            return original(their, obj, input_ids)
        allowed = self.chosen_args().tokenizer_metrics_allowed_custom_labels
        with _forgetting(their, obj), intake.refusing():
            intake.check_request(obj, their.model_config.vocab_size)
            intake.check_prompt(input_ids)
            intake.check_labels(obj, allowed)
            return original(their, obj, input_ids)

    @around(f"{_MANAGER}._create_tokenized_object")
    def create_tokenized_object(
        self, original: Callable[..., Any], their: Any, obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse what SGLang cannot read, and what the scheduler could not."""
        if not hasattr(obj, "token_ids_logprob"):
            return original(their, obj, *args, **kwargs)
        with _forgetting(their, obj), intake.refusing():
            made = original(their, obj, *args, **kwargs)
            params, most = made.sampling_params, their.model_config.context_len
            if params.max_new_tokens is not None:
                most = min(most, params.max_new_tokens)
            check_patterns(params.stop_regex_strs, most)
            self.version.check_sent(made)
            return made

    @around(
        f"{_OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request",
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
        front=True,
    )
    def convert_openai_request(
        self, original: Callable[..., Any], their: Any, request: Any, raw_request: Any = None
    ) -> Any:
        """Refuse what SGLang cannot make a request of its own of: it answers with 500."""
        with intake.refusing():
            return original(their, request, raw_request)

    @after(f"{_MANAGER}.__init__")
    def lay_front_hooks(self, result: None, their: Any, *args: Any, **kwargs: Any) -> None:
        """Hook the HTTP server in the processes that have one; others need not import it."""
        server = sys.modules.get("sglang.srt.entrypoints.http_server")
        if server is None:
            return
        from sglang.srt.plugins.hook_registry import HookRegistry

        self.lay(front=True)
        HookRegistry.apply_hooks()
        self.check(front=True)
        bodies.refuse_unread(server.app)


@contextmanager
def _forgetting(manager: Any, obj: Any) -> Iterator[None]:
    """Forget a request that is refused: SGLang 0.5.11 would keep it for good."""
    try:
        yield
    except BaseException:
        manager.rid_to_state.pop(obj.rid, None)
        raise
