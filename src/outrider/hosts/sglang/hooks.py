"""The hooks that every version of SGLang gets, at a place that its contract names.

They are laid whenever the package is installed, because SGLang loads plugins before it reads its
arguments. Each calls SGLang's own code unless OUTRIDER was chosen, with three exceptions on CPU:
`murmur_hash32` always replaces a Triton kernel that cannot run there; `support_triton` and
`batch_invariant_mode` serve the attention backend `outrider` with any algorithm. An AROUND hook
gets the original first, an AFTER hook its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from outrider.hosts.sglang import bodies, cpu, intake, memory
from outrider.hosts.sglang.host import host
from outrider.hosts.sglang.profile import load_profile, request_options
from outrider.hosts.sglang.reported import correct_meta_info

NAME = "OUTRIDER"
ATTENTION_BACKEND = "outrider"

Hook = tuple[Callable[..., Any], str]
"""What is called, and how: BEFORE, AFTER or AROUND what it hooks."""


def is_chosen(args: Any) -> bool:
    """Say whether these arguments choose our algorithm."""
    return args is not None and (args.speculative_algorithm or "").upper() == NAME


def chosen_args() -> Any:
    """Return this process's arguments if they choose our algorithm, else None."""
    args = host().current_arguments()
    return args if is_chosen(args) else None


def attention_backend(runner: Any) -> Any:
    """Return the attention backend `outrider`."""
    from outrider.hosts.sglang import attention

    return attention.attention_backend(runner)


def compute_cell_size(original: Callable[..., Any], self: Any, runner: Any, layers: int) -> Any:
    """Add the draft model's and heads' shares to what a token takes in the cache."""
    size, args = original(self, runner, layers), host().arguments(runner.server_args)
    if runner.is_draft_worker or not is_chosen(args):
        return size
    return size + memory.draft_cell_bytes(runner)


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


def set_global_state(result: None, global_state: Any) -> None:
    """Refuse bodies that SGLang's validators trip over."""
    if chosen_args() is not None:
        from sglang.srt.entrypoints import http_server

        bodies.refuse_unread(http_server.app)


@contextmanager
def _forgetting(manager: Any, obj: Any) -> Iterator[None]:
    """Forget a request that is refused: SGLang 0.5.11 would keep it for good."""
    try:
        yield
    except BaseException:
        manager.rid_to_state.pop(obj.rid, None)
        raise


def spec_decoding_metrics(
    result: None, self: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> None:
    """Correct what SGLang computes as if every step drafted K tokens, or take it away."""
    if chosen_args() is None:
        return
    if not load_profile().report_acceptance:
        for name in [name for name in meta_info if name.startswith("spec_")]:
            del meta_info[name]
        return
    correct_meta_info(meta_info, getattr(recv_obj, host().accepted)[i])


def keep_prompt_logprobs(self: Any, batch: Any, result: Any) -> None:
    """Drop the prompt logprobs of requests that have left: SGLang does not step over them.

    Whoever follows in the batch would get theirs.
    """
    if chosen_args() is None or not batch.return_logprob:
        return
    found = result.logits_output.input_token_logprobs
    if found is None:
        return
    left = [
        req.is_retracted or (req.finished() and getattr(req, "inflight_middle_chunks", 0) <= 0)
        for req in batch.reqs
    ]
    if not any(left):
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    lens, starts = result.extend_input_len_per_req, result.extend_logprob_start_len_per_req
    kept = np.repeat(~np.array(left), np.array(lens) - np.array(starts))
    result.logits_output.input_token_logprobs = found[torch.from_numpy(kept).to(found.device)]


def stream_output(
    original: Callable[..., Any],
    self: Any,
    reqs: list[Any],
    return_logprob: bool,
    skip_req: Any = None,
    is_idle_batch: bool = False,
) -> Any:
    """Send whole chunks, if the profile asks for chunks.

    A request without output is left out, unless it has ended. It was retracted while its prompt was
    read, and SGLang would count the logprob of its first token as sent.
    """
    size = None
    if chosen_args() is not None:
        reqs = [req for req in reqs if req.output_ids or req.finished()]
        size = load_profile().flush_tokens
    if size is None:
        return original(self, reqs, return_logprob, skip_req, is_idle_batch)
    from outrider.hosts.sglang.flush import send_chunks

    told = [req for req in reqs if req is not skip_req]
    left = send_chunks(lambda ready: original(self, ready, return_logprob), told, size)
    # SGLang says how busy it is after every step, even if it has nothing else to say
    return original(self, left, return_logprob, None, is_idle_batch or bool(reqs))


def handle_batch_output(original: Callable[..., Any], self: Any, recv_obj: Any) -> Any:
    """Let each stream take a chunk before the next, if the profile asks for chunks."""
    if chosen_args() is None or load_profile().flush_tokens is None:
        return original(self, recv_obj)
    from outrider.hosts.sglang.flush import one_by_one

    return one_by_one(original, self, recv_obj)


def init_kv_copy(original: Callable[..., Any], self: Any) -> Any:
    """Do without a Triton kernel on CPU: we never move cache entries."""
    if self.device == "cpu" and chosen_args() is not None:
        self._kv_copy_config = None
        return None
    return original(self)


def batch_invariant_mode(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make linear layers row invariant on CPU, too."""
    current = host().current_arguments()
    if (
        current is not None
        and current.device == "cpu"
        and (is_chosen(current) or current.attention_backend == ATTENTION_BACKEND)
    ):
        return cpu.enable_row_invariance()
    return original(*args, **kwargs)


def apply_vocab_mask(original: Callable[..., Any], self: Any, logits: Any, vocab_mask: Any) -> Any:
    """Apply grammars' masks on CPU, too."""
    if logits.device.type == "cpu" and chosen_args() is not None:
        return cpu.apply_vocab_mask(logits, vocab_mask)
    return original(self, logits=logits, vocab_mask=vocab_mask)


def support_triton(original: Callable[..., Any], backend: str) -> Any:
    """Say no for our own backend on CPU."""
    args = host().current_arguments()
    if backend == ATTENTION_BACKEND and args is not None and args.device == "cpu":
        return False
    return original(backend)


def murmur_hash32(original: Callable[..., Any], seed: Any, positions: Any, columns: Any) -> Any:
    """Hash on CPU, too."""
    if seed.device.type == "cpu":
        return cpu.murmur_hash32(seed, positions, columns)
    return original(seed, positions, columns)


def decode_slots(original: Callable[..., Any], self: Any, reqs: Any, page_size: int) -> Any:
    """Ask the batch's own reserve how many free slots its next step takes: see `reserve`."""
    reserve = getattr(self.spec_info, "reserve", None)
    return original(self, reqs, page_size) if reserve is None else reserve.required(self, reqs)


def set_internal_state(self: Any, asked: Any) -> None:
    """Refuse settings of SGLang's own speculation while the server runs, as at its start."""
    wanted = [key for key in asked.server_args or () if "spec" in key]
    if wanted and chosen_args() is not None:
        from fastapi import HTTPException

        raise HTTPException(400, f"{', '.join(wanted)}: not with --speculative-algorithm {NAME}")


def share_plugins(
    original: Callable[..., Any], port_args: Any, server_args: Any, scheduler_info: dict[str, Any]
) -> Any:
    """Let tokenizer workers load the plugins, which SGLang starts without them.

    They unpickle this before they do anything else.
    """
    if is_chosen(host().arguments(server_args)):
        scheduler_info = {**scheduler_info, NAME: _Plugins()}
    return original(port_args, server_args, scheduler_info)


class _Plugins:
    """Loads the plugins where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return load_here, ()


def load_here() -> None:
    """Load SGLang's plugins in this process, and make sure that all hooks hold."""
    from sglang.srt.plugins import load_plugins

    from outrider.hosts.sglang import plugin

    load_plugins()
    plugin.check_hooks()


def save_remote_model(original: Callable[..., Any], self: Any, params: Any) -> Any:
    """Save the target, and the draft model if there is one: SGLang takes our worker for one."""
    worker = self.draft_worker
    if chosen_args() is None:
        return original(self, params)
    self.draft_worker = worker.draft_model_worker
    try:
        return original(self, params)
    finally:
        self.draft_worker = worker


def is_prefill_only(self: Any) -> bool:
    """Say whether a request generates nothing. SGLang's own says no beside any speculation."""
    return bool(self.sampling_params.max_new_tokens == 0)


_OPENAI = "entrypoints.openai"

COMMON: dict[str, Hook] = {
    "managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2": (
        decode_slots,
        "AROUND",
    ),
    "managers.tokenizer_manager.TokenizerManager.set_internal_state": (
        set_internal_state,
        "BEFORE",
    ),
    "managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer": (share_plugins, "AROUND"),
    "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size": (
        compute_cell_size,
        "AROUND",
    ),
    "entrypoints.http_server.set_global_state": (set_global_state, "AFTER"),
    f"{_OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request": (
        convert_openai_request,
        "AROUND",
    ),
    f"{_OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request": (
        convert_openai_request,
        "AROUND",
    ),
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
    "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics": (
        spec_decoding_metrics,
        "AFTER",
    ),
    "managers.tokenizer_manager.TokenizerManager._handle_batch_output": (
        handle_batch_output,
        "AROUND",
    ),
    "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup": (init_kv_copy, "AROUND"),
    "batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode": (
        batch_invariant_mode,
        "AROUND",
    ),
    "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": (apply_vocab_mask, "AROUND"),
    "utils.common.support_triton": (support_triton, "AROUND"),
}
