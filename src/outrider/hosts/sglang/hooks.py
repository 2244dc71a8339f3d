"""The hooks that every version of SGLang gets, at a place that its contract names.

They are laid whenever the package is installed, because SGLang loads plugins before it reads its
arguments. Each calls SGLang's own code unless OUTRIDER was chosen, with three exceptions on CPU:
`murmur_hash32` always replaces a Triton kernel that cannot run there; `support_triton` and
`batch_invariant_mode` serve the attention backend `outrider` with any algorithm. An AROUND hook
gets the original first, an AFTER hook its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from outrider.hosts.sglang import cpu, memory
from outrider.hosts.sglang.field_checks import shown
from outrider.hosts.sglang.host import host
from outrider.hosts.sglang.profile import load_profile
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


def compute_cell_size(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the draft model's and heads' shares to what a token takes in the cache."""
    size, runner = original(self, *args, **kwargs), (*args, *kwargs.values())[0]
    if runner.is_draft_worker or not is_chosen(host().arguments(runner.server_args)):
        return size
    return size + memory.draft_cell_bytes(runner)


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


def compile_grammar(
    original: Callable[..., Any], self: Any, key: Any, require_reasoning: bool
) -> Any:
    """End a request whose grammar the compiler fails at: the scheduler would end with it.

    SGLang catches few of its errors; none is that of a tag without a format.
    """
    if chosen_args() is None:
        return original(self, key, require_reasoning)
    try:
        return original(self, key, require_reasoning)
    except Exception as error:
        from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

        return InvalidGrammarObject(shown(f"{type(error).__name__}: {error}"))


def preprocess_logits(
    original: Callable[..., Any], self: Any, logits: Any, sampling_info: Any
) -> Any:
    """Let a row whose tokens are all forbidden have token 0, as greedy sampling gives.

    A grammar at its end allows the end alone, which `min_new_tokens` forbids. What is not greedy
    would raise, and stop the scheduler.
    """
    found = original(self, logits, sampling_info)
    if not sampling_info.is_all_greedy and _may_forbid(sampling_info) and chosen_args() is not None:
        found[:, 0].masked_fill_(found.amax(-1) == -torch.inf, 0.0)
    return found


def _may_forbid(info: Any) -> bool:
    """Say whether sampling parameters of a batch may forbid tokens: few do."""
    penalties = info.penalizer_orchestrator
    return bool(
        info.grammars
        or info.has_custom_logit_processor
        or info.logit_bias is not None
        or info.acc_additive_penalties is not None
        or (penalties is not None and penalties.is_required)
    )


def support_triton(original: Callable[..., Any], backend: str) -> Any:
    """Say no for our own backend on CPU."""
    args = host().current_arguments()
    if backend == ATTENTION_BACKEND and args is not None and args.device == "cpu":
        return False
    return original(backend)


def murmur_hash32(original: Callable[..., Any], seed: Any, positions: Any, col_indices: Any) -> Any:
    """Hash on CPU, too."""
    if seed.device.type == "cpu":
        return cpu.murmur_hash32(seed, positions, col_indices)
    return original(seed, positions, col_indices)


def decode_slots(original: Callable[..., Any], self: Any, requests: Any, page_size: int) -> Any:
    """Ask the batch's own reserve how many free slots its next step takes: see `reserve`."""
    reserve = getattr(self.spec_info, "reserve", None)
    if reserve is None:
        return original(self, requests, page_size)
    return reserve.required(self, requests)


def set_internal_state(self: Any, obj: Any) -> None:
    """Refuse settings of SGLang's own speculation while the server runs, as at its start."""
    wanted = [key for key in obj.server_args or () if "spec" in key]
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
    "constrained.base_grammar_backend.BaseGrammarBackend._init_value_dispatch": (
        compile_grammar,
        "AROUND",
    ),
    "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": (apply_vocab_mask, "AROUND"),
    "layers.sampler.Sampler._preprocess_logits": (preprocess_logits, "AROUND"),
    "utils.common.support_triton": (support_triton, "AROUND"),
}
