"""Hooks where requests come in: what the scheduler could not hold is refused with status 400."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from outrider.engines.sglang.arguments.chosen import chosen_args
from outrider.engines.sglang.hooks.laying import Table, lay
from outrider.engines.sglang.intake import bodies
from outrider.engines.sglang.intake import parameters as intake
from outrider.engines.sglang.intake.patterns import check_patterns
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.engines.sglang.versions.contract import hook_target
from outrider.serving.profile import load_profile, request_options

_OPENAI = "entrypoints.openai"
_MANAGER = "managers.tokenizer_manager.TokenizerManager"


class RequestHooks:
    """Hooks of what each request passes.

    front_hooks: returns the hooks of the HTTP server
    check: stops the server unless all hooks were laid, those of the HTTP server included
    """

    def __init__(
        self,
        version: SglangVersion,
        front_hooks: Callable[[], Table],
        check: Callable[[bool], None],
    ) -> None:
        self._version, self._front_hooks, self._check = version, front_hooks, check

    def table(self) -> Table:
        """Return the hooks, by name."""
        return {
            f"{_MANAGER}.__init__": (self.lay_front_hooks, "AFTER"),
            "managers.io_struct.GenerateReqInput.normalize_batch_and_arguments": (
                self.normalize_request,
                "AROUND",
            ),
            f"{_MANAGER}._validate_one_request": (self.validate_one_request, "AROUND"),
            f"{_MANAGER}._create_tokenized_object": (self.create_tokenized_object, "AROUND"),
            "sampling.sampling_params.SamplingParams.verify": (
                self.verify_sampling_params,
                "AFTER",
            ),
        }

    def front_table(self) -> Table:
        """Return the hooks of the HTTP server, at places that the contract names too."""
        chat, completion = (
            "serving_chat.OpenAIServingChat",
            "serving_completions.OpenAIServingCompletion",
        )
        return {
            f"{_OPENAI}.{served}._convert_to_internal_request": (
                self.convert_openai_request,
                "AROUND",
            )
            for served in (chat, completion)
        }

    def verify_sampling_params(self, result: None, their: Any, vocab_size: int) -> None:
        """Check what a request asks of Outrider."""
        args = chosen_args(self._version)
        if args is None:
            return
        from outrider.engines.sglang.drafts.heads import draft_kind

        profile, draft = load_profile(), draft_kind(args)
        request_options(their.custom_params, profile.names(draft), profile.report_acceptance)
        if their.min_p > 0 and args.enable_deterministic_inference:
            raise ValueError(
                "min_p with --enable-deterministic-inference: "
                "SGLang's seeded sampler does not have it"
            )

    def normalize_request(self, original: Callable[..., Any], their: Any) -> Any:
        """Refuse a call of another form than SGLang takes, before it makes many of one prompt."""
        if chosen_args(self._version) is None:
            return original(their)
        intake.check_form(their)
        with intake.refusing():
            return original(their)

    def validate_one_request(
        self, original: Callable[..., Any], their: Any, obj: Any, input_ids: Any
    ) -> Any:
        """Refuse what the scheduler cannot hold, before SGLang looks at it."""
        args = chosen_args(self._version)
        if args is None or not hasattr(obj, "token_ids_logprob"):  # an embedding has none
            return original(their, obj, input_ids)
        with _forgetting(their, obj), intake.refusing():
            intake.check_request(obj, their.model_config.vocab_size)
            intake.check_prompt(input_ids)
            intake.check_labels(obj, args.tokenizer_metrics_allowed_custom_labels)
            return original(their, obj, input_ids)

    def create_tokenized_object(
        self, original: Callable[..., Any], their: Any, obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse what SGLang cannot read, and what the scheduler could not."""
        if chosen_args(self._version) is None or not hasattr(obj, "token_ids_logprob"):
            return original(their, obj, *args, **kwargs)
        with _forgetting(their, obj), intake.refusing():
            made = original(their, obj, *args, **kwargs)
            params, most = made.sampling_params, their.model_config.context_len
            if params.max_new_tokens is not None:
                most = min(most, params.max_new_tokens)
            check_patterns(params.stop_regex_strs, most)
            self._version.check_sent(made)
            return made

    def convert_openai_request(
        self, original: Callable[..., Any], their: Any, request: Any, raw_request: Any = None
    ) -> Any:
        """Refuse what SGLang cannot make a request of its own of: it answers with 500."""
        if chosen_args(self._version) is None:
            return original(their, request, raw_request)
        with intake.refusing():
            return original(their, request, raw_request)

    def lay_front_hooks(self, result: None, their: Any, *args: Any, **kwargs: Any) -> None:
        """Hook the HTTP server in the processes that have one; others need not import it."""
        server = sys.modules.get("sglang.srt.entrypoints.http_server")
        if server is None or chosen_args(self._version) is None:
            return
        from sglang.srt.plugins.hook_registry import HookRegistry

        lay({hook_target(name): hook for name, hook in self._front_hooks().items()})
        HookRegistry.apply_hooks()
        self._check(True)
        bodies.refuse_unread(server.app)


@contextmanager
def _forgetting(manager: Any, obj: Any) -> Iterator[None]:
    """Forget a request that is refused: SGLang 0.5.11 would keep it for good."""
    try:
        yield
    except BaseException:
        manager.rid_to_state.pop(obj.rid, None)
        raise
