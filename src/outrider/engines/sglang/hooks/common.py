"""The hooks that every version of SGLang gets, at a place that its contract names.

They are laid whenever the package is installed, because SGLang loads plugins before it reads its
arguments. Each calls SGLang's own code unless OUTRIDER was chosen: see `laying` (on CPU there are
exceptions: see `on_cpu`). Those without a name here have another one in each version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from outrider.engines.sglang.answers.reported import correct_meta_info
from outrider.engines.sglang.arguments import memory
from outrider.engines.sglang.arguments.chosen import NAME, is_chosen
from outrider.engines.sglang.hooks.laying import WITHOUT_US, after, around, before, stop
from outrider.engines.sglang.hooks.on_cpu import CpuHooks
from outrider.engines.sglang.intake.fields import shown
from outrider.engines.sglang.intake.front import RequestHooks
from outrider.engines.sglang.versions import contract
from outrider.kernels import use_triton
from outrider.serving.profile import REPAIR_VARIABLE, load_profile

_MANAGER = "managers.tokenizer_manager.TokenizerManager"
_BATCH = "managers.schedule_batch.ScheduleBatch"


class Hooks(RequestHooks, CpuHooks):
    """What one version of SGLang is hooked by."""

    def register(self) -> None:
        """Make the algorithm known, if that takes more than hooks."""

    def check_contract(self) -> None:
        """Stop the server unless this SGLang is as the contract says."""
        self._check(contract.differences(self.version.contract), WITHOUT_US)

    def check_repair(self) -> None:
        """Stop the server unless what the repair for ROCm sets is as the contract says."""
        differences = contract.rocm_differences(self.version.contract)
        self._check(differences, f"unset {REPAIR_VARIABLE}")

    def _check(self, differences: list[str], instead: str) -> None:
        if differences:
            known = self.version.contract.VERSION
            what = f"this SGLang differs from the {known} that Outrider knows"
            stop(what, *differences, instead=instead)

    def attention_backend(self, runner: Any) -> Any:
        """Return the attention backend `outrider` for a model runner's device."""
        if use_triton(torch.device(runner.device)):
            from outrider.engines.sglang.attention.triton import TritonAttention

            return TritonAttention(runner, self.version)
        from outrider.engines.sglang.attention.backend import OutriderAttention

        return OutriderAttention(runner, self.version)

    @around(
        "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size", always=True
    )
    def compute_cell_size(
        self, original: Callable[..., Any], their: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Add the draft model's and heads' shares to what a token takes in the cache."""
        size, runner = original(their, *args, **kwargs), (*args, *kwargs.values())[0]
        if runner.is_draft_worker or not is_chosen(self.version.arguments(runner.server_args)):
            return size
        return size + memory.draft_cell_bytes(runner, self.version)

    @after(f"{_MANAGER}._calculate_spec_decoding_metrics")
    def spec_decoding_metrics(
        self, result: None, their: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
    ) -> None:
        """Correct what SGLang computes as if every step drafted K tokens, or take it away."""
        if not load_profile().report_acceptance:
            for name in [name for name in meta_info if name.startswith("spec_")]:
                del meta_info[name]
            return
        correct_meta_info(meta_info, getattr(recv_obj, self.version.accepted)[i])

    def keep_prompt_logprobs(self, their: Any, batch: Any, result: Any) -> None:
        """Drop the prompt logprobs of requests that have left: SGLang does not step over them.

        The next request of the batch would get theirs.
        """
        if not batch.return_logprob:
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
        self,
        original: Callable[..., Any],
        their: Any,
        reqs: list[Any],
        return_logprob: bool,
        skip_req: Any = None,
        is_idle_batch: bool = False,
    ) -> Any:
        """Send whole chunks, if the profile asks for chunks.

        A request without output is left out, unless it has ended. It was retracted while its prompt
        was read, and SGLang would count the logprob of its first token as sent.
        """
        reqs = [req for req in reqs if req.output_ids or req.finished()]
        size = load_profile().flush_tokens
        if size is None:
            return original(their, reqs, return_logprob, skip_req, is_idle_batch)
        from outrider.engines.sglang.answers.flush import send_chunks

        sent = [req for req in reqs if req is not skip_req]
        left = send_chunks(lambda ready: original(their, ready, return_logprob), sent, size)
        # SGLang says how busy it is after every step, even if it has nothing else to say
        return original(their, left, return_logprob, None, is_idle_batch or bool(reqs))

    @around(f"{_MANAGER}._handle_batch_output")
    def handle_batch_output(self, original: Callable[..., Any], their: Any, recv_obj: Any) -> Any:
        """Let each stream take a chunk before the next, if the profile asks for chunks."""
        if load_profile().flush_tokens is None:
            return original(their, recv_obj)
        from outrider.engines.sglang.answers.flush import one_by_one

        return one_by_one(original, their, recv_obj)

    @around("constrained.base_grammar_backend.BaseGrammarBackend._init_value_dispatch")
    def compile_grammar(
        self, original: Callable[..., Any], their: Any, key: Any, require_reasoning: bool
    ) -> Any:
        """End a request whose grammar the compiler fails at: the scheduler would end with it.

        SGLang catches few of its errors; none is that of a tag without a format.
        """
        try:
            return original(their, key, require_reasoning)
        except Exception as error:
            from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

            return InvalidGrammarObject(shown(f"{type(error).__name__}: {error}"))

    @around("layers.sampler.Sampler._preprocess_logits")
    def preprocess_logits(
        self, original: Callable[..., Any], their: Any, logits: Any, sampling_info: Any
    ) -> Any:
        """Let a row whose tokens are all forbidden have token 0, as greedy sampling gives.

        A grammar at its end allows the end alone, which `min_new_tokens` forbids. What is not
        greedy would raise, and stop the scheduler.
        """
        found = original(their, logits, sampling_info)
        if not sampling_info.is_all_greedy and _may_forbid(sampling_info):
            found[:, 0].masked_fill_(found.amax(-1) == -torch.inf, 0.0)
        return found

    @around(f"{_BATCH}._new_tokens_required_next_decode_spec_v2", always=True)
    def decode_slots(
        self, original: Callable[..., Any], their: Any, requests: Any, page_size: int
    ) -> Any:
        """Ask how many free slots the batch's next step takes: see `slots`."""
        slots = getattr(their.spec_info, "slots", None)
        if slots is None:
            return original(their, requests, page_size)
        required: int = slots.required(their, requests)
        return required

    @before(f"{_MANAGER}.set_internal_state")
    def set_internal_state(self, their: Any, obj: Any) -> None:
        """Refuse settings of SGLang's own speculation while the server runs, as at its start."""
        wanted = [key for key in obj.server_args or () if "spec" in key]
        if wanted:
            from fastapi import HTTPException

            raise HTTPException(
                400, f"{', '.join(wanted)}: not with --speculative-algorithm {NAME}"
            )

    @around("managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer", always=True)
    def share_plugins(
        self,
        original: Callable[..., Any],
        port_args: Any,
        server_args: Any,
        scheduler_info: dict[str, Any],
    ) -> Any:
        """Let tokenizer workers load the plugins, which SGLang starts without them.

        They unpickle this before they do anything else.
        """
        if is_chosen(self.version.arguments(server_args)):
            scheduler_info = {**scheduler_info, NAME: _Loading(self._load)}
        return original(port_args, server_args, scheduler_info)

    def save_remote_model(self, original: Callable[..., Any], their: Any, params: Any) -> Any:
        """Save the target, and the draft model if there is one: SGLang takes our worker for one."""
        worker = their.draft_worker
        their.draft_worker = worker.draft_model_worker
        try:
            return original(their, params)
        finally:
            their.draft_worker = worker


class _Loading:
    """Calls a function where it is unpickled."""

    def __init__(self, load: Callable[[], None]) -> None:
        self._load = load

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return self._load, ()


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
