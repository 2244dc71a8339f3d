"""The hooks that SGLang 0.5.11 needs beside those of all versions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from outrider.core import Unsupported
from outrider.engines.sglang import rocm
from outrider.engines.sglang.arguments import memory, settings
from outrider.engines.sglang.arguments.chosen import NAME, is_chosen, refusing_start
from outrider.engines.sglang.hooks.common import Hooks
from outrider.engines.sglang.hooks.laying import after, around, before

_ALGORITHM = "speculative.spec_info.SpeculativeAlgorithm"
_FUTURES = "managers.overlap_utils.FutureMap"
_UPDATER = "managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
_MIXIN = "managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"


class Algorithm:
    """Stands in for a member of SGLang's `SpeculativeAlgorithm`, a closed enum in 0.5.11.

    To the scheduler it is speculative, by the contract of spec v2. To the code that captures CUDA
    graphs it is not: a verify pass of ours is a decode batch, so the graphs of plain decoding
    serve it.
    """

    name = NAME

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def is_none(self) -> bool:
        """Say no: there is a worker of ours."""
        return False

    def supports_spec_v2(self) -> bool:
        """Say yes: the scheduler may overlap."""
        return True

    def is_speculative(self) -> bool:
        """Say no: capture the graphs of plain decoding."""
        return False

    is_eagle = is_eagle3 = is_dflash = is_standalone = is_ngram = is_speculative

    def create_worker(self, server_args: Any) -> Callable[..., Any]:
        """Return our worker, having made sure that all hooks hold."""
        self._hooks.check()
        from outrider.engines.sglang.workers.sglang_0_5_11 import Worker0511

        return partial(Worker0511, self._hooks.version)


class Hooks0511(Hooks):
    """What SGLang 0.5.11 is hooked by."""

    save_remote_model = around(f"{_UPDATER}.save_remote_model")(Hooks.save_remote_model)
    stream_output = around(f"{_MIXIN}.stream_output_generation")(Hooks.stream_output)
    keep_prompt_logprobs = before(f"{_MIXIN}.process_batch_result_prefill")(
        Hooks.keep_prompt_logprobs
    )
    murmur_hash32 = around("layers.utils.hash.murmur_hash32", always=True)(Hooks.murmur_hash32)

    @around(f"{_ALGORITHM}.from_string", always=True)
    def _from_string(self, original: Callable[..., Any], cls: type, name: str | None) -> Any:
        is_ours = name is not None and name.upper() == NAME
        return Algorithm(self) if is_ours else original(cls, name)

    @after("server_args.ServerArgs.add_cli_args", always=True)
    def _add_cli_args(self, result: None, parser: Any) -> None:
        (action,) = (a for a in parser._actions if a.dest == "speculative_algorithm")
        if NAME not in action.choices:
            action.choices = [*action.choices, NAME]

    @before("server_args.ServerArgs.__post_init__", always=True)
    def _post_init(self, their: Any) -> None:
        if is_chosen(their):
            settings.refuse_flags(their)

    @after("server_args.ServerArgs._handle_speculative_decoding", always=True)
    def _handle_speculative_decoding(self, result: None, their: Any) -> None:
        with refusing_start():
            if settings.repairs(their):
                self.check()
                self.check_repair()
            if is_chosen(their):
                their.speculative_algorithm = NAME
                self.check_contract()
                if their.disable_overlap_schedule:
                    raise Unsupported(
                        "--disable-overlap-schedule in SGLang 0.5.11",
                        fix="leave it out: steps without drafts overlap as in plain decoding",
                    )
                if their.enable_lora or their.lora_paths:
                    raise Unsupported(
                        "LoRA adapters in SGLang 0.5.11",
                        fix="use SGLang 0.5.23, or serve a merged model: here NGRAM alone has them",
                    )
                settings.apply(their)

    @around("server_args.ServerArgs._handle_gpu_memory_settings", always=True)
    def _handle_gpu_memory_settings(
        self, original: Callable[..., Any], their: Any, gpu_mem: Any
    ) -> Any:
        is_unset = their.mem_fraction_static is None and their.device != "cpu"
        result = original(their, gpu_mem)
        if is_unset and is_chosen(their) and gpu_mem is not None:
            memory.reserve(their, gpu_mem)
        return result

    @after(f"{_ALGORITHM}.create_worker", always=True)
    def _create_worker(self, result: type, their: Any, server_args: Any) -> None:
        if settings.repairs(server_args):
            # SGLang's schedulers are processes of their own: the launcher's check is not theirs
            self.check_repair()
            rocm.repair()

    @after("model_executor.model_runner.ModelRunner.init_aux_hidden_state_capture", always=True)
    def _init_aux_hidden_state_capture(self, result: None, their: Any) -> None:
        if not their.is_draft_worker and is_chosen(their.server_args):
            from outrider.engines.sglang.drafts.heads import capture_states

            capture_states(their, self.version)

    @after("managers.schedule_batch.ScheduleBatch.get_model_worker_batch", always=True)
    def _model_worker_batch(self, result: Any, their: Any, seq_lens_cpu_cache: Any = None) -> None:
        if isinstance(their.spec_algorithm, Algorithm):
            result.outrider_batch = their  # workers are given no more than the result

    @around(f"{_MIXIN}._resolve_spec_overlap_token_ids", always=True)
    def _resolve_tokens(
        self, original: Callable[..., Any], their: Any, result: Any, batch: Any
    ) -> Any:
        if isinstance(batch.spec_algorithm, Algorithm):
            return their.draft_worker.resolve(result, batch)
        return original(their, result, batch)

    @around(f"{_FUTURES}.resolve_future", f"{_FUTURES}.store_to_map", always=True)
    def _relay(self, original: Callable[..., Any], their: Any, *args: Any, **kwargs: Any) -> Any:
        # ours keeps what the next step needs itself
        return None if isinstance(their.spec_algo, Algorithm) else original(their, *args, **kwargs)

    @around("model_executor.cuda_graph_runner.CudaGraphRunner.can_run", always=True)
    def _can_run_graph(self, original: Any, their: Any, forward_batch: Any) -> bool:
        """Keep TARGET_VERIFY out of the graphs of plain decoding, which have one row a request."""
        is_ours = isinstance(their.model_runner.spec_algorithm, Algorithm)
        if is_ours and forward_batch.forward_mode.is_target_verify():
            return False
        return bool(original(their, forward_batch))

    @around("entrypoints.openai.serving_base.OpenAIServingBase._compute_extra_key", front=True)
    def _compute_extra_key(self, original: Callable[..., Any], their: Any, request: Any) -> Any:
        """Keep `cache_salt` and `extra_key` apart: SGLang joins "a", "bc" like "ab", "c"."""
        key, salt = original(their, request), getattr(request, "cache_salt", None)
        return f"{len(salt)}:{key}" if salt else key
