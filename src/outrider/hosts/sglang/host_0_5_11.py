"""SGLang 0.5.11: its hooks, its worker, and what is otherwise here than in other versions."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from outrider.core import Unsupported
from outrider.hosts.sglang import contract_0_5_11 as contract
from outrider.hosts.sglang import front, hooks, memory, plugin, rocm, settings
from outrider.hosts.sglang.host import Host


class Algorithm:
    """Stands in for a member of SGLang's `SpeculativeAlgorithm`, a closed enum in 0.5.11.

    To the scheduler it is speculative, by the contract of spec v2. To whoever captures CUDA graphs
    it is not: a verify pass of ours is a decode batch, so the graphs of plain decoding serve it.
    """

    name = hooks.NAME

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

    def create_worker(self, server_args: Any) -> type:
        """Return our worker, having made sure that all hooks hold."""
        plugin.check_hooks()
        return _worker_class()


def _worker_class() -> type:
    from outrider.hosts.sglang.drafting import make_draft_worker
    from outrider.hosts.sglang.worker import OutriderWorker

    class Worker(OutriderWorker):
        """What the scheduler of 0.5.11 calls."""

        def __init__(
            self,
            server_args: Any,
            gpu_id: int,
            tp_rank: int,
            dp_rank: int | None,
            moe_ep_rank: int,
            attn_cp_rank: int,
            moe_dp_rank: int,
            nccl_port: int,
            target_worker: Any,
        ) -> None:
            self._load(target_worker, server_args)
            draft = make_draft_worker(
                target_worker,
                server_args,
                gpu_id=gpu_id,
                tp_rank=tp_rank,
                dp_rank=dp_rank,
                moe_ep_rank=moe_ep_rank,
                attn_cp_rank=attn_cp_rank,
                moe_dp_rank=moe_dp_rank,
                nccl_port=nccl_port,
            )
            self._begin(draft, tp_rank, dp_rank)
            self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
            # the scheduler looks for a draft model's cache here
            self.draft_worker = SimpleNamespace(draft_runner=self.model_runner)

        def forward_batch_generation(self, plain: Any) -> Any:
            """Launch one step."""
            batch = plain.outrider_batch
            if plain.forward_mode.is_extend():
                mend_prompt_logprobs(plain)
            result = self._step(batch, plain)
            if plain.forward_mode.is_decode():
                batch.seq_lens_cpu = result.next_draft_input.lens_cpu
            return result

    return Worker


class Sglang0511(Host):
    """SGLang 0.5.11."""

    contract = contract
    accepted = "spec_accepted_drafts"
    caches = ("mem_cache.radix_cache.RadixCache",)
    prefix_lens, extend_lens = "extend_prefix_lens", "extend_seq_lens"

    def register(self, name: str) -> None:
        """Do nothing: the algorithm is known by hooks."""

    def hooks(self) -> dict[str, hooks.Hook]:
        """Return what this version is hooked by."""
        return _HOOKS

    def front_hooks(self) -> dict[str, tuple[Callable[..., Any], str]]:
        """Return what its HTTP server is hooked by."""
        return _FRONT

    def arguments(self, server_args: Any) -> Any:
        """Return them: SGLang completes them in place."""
        return server_args

    def current_arguments(self) -> Any:
        """Return this process's."""
        from sglang.srt.server_args import get_global_server_args

        try:
            return get_global_server_args()
        except ValueError:
            return None

    def cache_of(self, req: Any) -> Any:
        """Return the request."""
        return req

    def check_end(self, req: Any) -> None:
        """Let it look."""
        req.check_finished()

    def count_step(self, req: Any, accepted: int) -> None:
        """Count a step of a request."""
        req.spec_verify_ct += 1
        req.update_spec_acceptance_histogram(accepted)

    def count_accepted(self, result: Any, accepted: list[int]) -> None:
        """Note how many drafts of each request were accepted."""
        result.num_accepted_drafts = sum(accepted)
        result.num_accepted_drafts_per_req_cpu = accepted

    def pick(self, info: Any, rows: list[int], index: Tensor) -> None:
        """Leave these entries."""
        info.filter_batch(rows, index)

    def slots_per_step(self) -> int:
        """Return how many slots a request may need in a step."""
        from sglang.srt.managers.utils import get_alloc_len_per_decode

        return int(get_alloc_len_per_decode())

    def take_slots(self, tree_cache: Any, count: int) -> Tensor:
        """Return so many slots."""
        from sglang.srt.mem_cache.common import alloc_token_slots

        slots: Tensor = alloc_token_slots(tree_cache, count)
        return slots

    def attention_tp_size(self) -> int:
        """Return over how many ranks attention heads are spread."""
        from sglang.srt.layers.dp_attention import get_attention_tp_size

        return int(get_attention_tp_size())

    def draft_worker(self, target_worker: Any, server_args: Any, **options: Any) -> Any:
        """Return a worker of SGLang's, on the target's caches."""
        from sglang.srt.managers.tp_worker import TpModelWorker

        server_args.context_length = target_worker.model_config.context_len
        pool, allocator = target_worker.get_memory_pool()
        return TpModelWorker(
            server_args=server_args,
            pp_rank=0,
            is_draft_worker=True,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=allocator,
            memory_pool_config=target_worker.model_runner.memory_pool_config,
            **options,
        )

    def draft_batch(self, batch: Any, runner: Any) -> Any:
        """Return what a draft model's runner takes for this batch."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

        batch.capture_hidden_mode = CaptureHiddenMode.NULL
        return ForwardBatch.init_new(batch, runner)

    def return_states(self, runner: Any) -> None:
        """Let graphs return hidden states."""
        runner.server_args.enable_return_hidden_states = True

    def run_target(self, worker: Any, batch: Any, *, is_verify: bool, states: bool) -> Any:
        """Run the target over a batch."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        if states:
            batch.capture_hidden_mode = CaptureHiddenMode.FULL
        return worker.forward_batch_generation(batch, is_verify=is_verify)

    def graph_sizes(self, runner: Any) -> tuple[int, ...]:
        """Return the numbers of rows for which there are graphs."""
        return tuple(getattr(getattr(runner, "graph_runner", None), "capture_bs", ()))


# -- hooks of this version. AROUND gets the original first, AFTER its result.


def _from_string(original: Callable[..., Any], cls: type, name: str | None) -> Any:
    is_ours = name is not None and name.upper() == hooks.NAME
    return Algorithm() if is_ours else original(cls, name)


def _add_cli_args(result: None, parser: Any) -> None:
    (action,) = (a for a in parser._actions if a.dest == "speculative_algorithm")
    if hooks.NAME not in action.choices:
        action.choices = [*action.choices, hooks.NAME]


def _post_init(self: Any) -> None:
    if hooks.is_chosen(self):
        settings.refuse_flags(self)


def _handle_speculative_decoding(result: None, self: Any) -> None:
    try:
        if settings.repairs(self):
            plugin.check_hooks()
            plugin.check_repair()
        if hooks.is_chosen(self):
            self.speculative_algorithm = hooks.NAME
            plugin.check_contract()
            if self.disable_overlap_schedule:
                raise Unsupported(
                    "--disable-overlap-schedule in SGLang 0.5.11",
                    fix="leave it out: steps without drafts overlap as in plain decoding",
                )
            if self.enable_lora or self.lora_paths:
                raise Unsupported(
                    "LoRA adapters in SGLang 0.5.11",
                    fix="use SGLang 0.5.23, or serve a merged model: here they go with NGRAM only",
                )
            settings.apply(self)
    except Unsupported as error:
        raise SystemExit(f"outrider: {error}") from error


def _handle_gpu_memory_settings(original: Callable[..., Any], self: Any, gpu_mem: Any) -> Any:
    is_unset = self.mem_fraction_static is None and self.device != "cpu"
    result = original(self, gpu_mem)
    if is_unset and hooks.is_chosen(self) and gpu_mem is not None:
        memory.reserve(self, gpu_mem)
    return result


def _create_worker(result: type, self: Any, server_args: Any) -> None:
    if settings.repairs(server_args):
        # SGLang's schedulers are processes of their own: the launcher's check is not theirs
        plugin.check_repair()
        rocm.repair()


def _init_aux_hidden_state_capture(result: None, self: Any) -> None:
    if not self.is_draft_worker and hooks.is_chosen(self.server_args):
        from outrider.hosts.sglang.heads import capture_states

        capture_states(self)


def _model_worker_batch(result: Any, self: Any, seq_lens_cpu_cache: Any = None) -> None:
    if isinstance(self.spec_algorithm, Algorithm):
        result.outrider_batch = self  # workers are given no more than the result


def mend_prompt_logprobs(plain: Any) -> None:
    """Keep 0.5.11 from ending the scheduler when prompts with `token_ids_logprob` are read.

    It fails beside a prompt with logprobs that names no tokens. And a request that is retracted
    while its prompt is read keeps the logprobs of the first attempt: then there are too many.
    """
    asked = plain.token_ids_logprobs or ()
    if all(tokens is None for tokens in asked):
        return
    plain.token_ids_logprobs = [tokens or [] for tokens in asked]
    for req in plain.reqs:
        if req.input_token_logprobs is None:  # none of its prompt is done
            req.temp_input_token_ids_logprobs_val = None
            req.temp_input_token_ids_logprobs_idx = None


def _resolve_tokens(original: Callable[..., Any], self: Any, result: Any, batch: Any) -> Any:
    if isinstance(batch.spec_algorithm, Algorithm):
        return self.draft_worker.resolve(result, batch)
    return original(self, result, batch)


def _resolve_future(original: Callable[..., Any], self: Any, model_worker_batch: Any) -> Any:
    # ours keeps what the next step needs itself
    is_ours = isinstance(self.spec_algo, Algorithm)
    return None if is_ours else original(self, model_worker_batch)


def _store_to_map(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return None if isinstance(self.spec_algo, Algorithm) else original(self, *args, **kwargs)


_UPDATER = "managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
_MIXIN = "managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"


def _can_run_graph(original: Any, self: Any, forward_batch: Any) -> bool:
    """Keep TARGET_VERIFY out of the graphs of plain decoding, which have one row a request."""
    is_ours = isinstance(self.model_runner.spec_algorithm, Algorithm)
    if is_ours and forward_batch.forward_mode.is_target_verify():
        return False
    return bool(original(self, forward_batch))


def _compute_extra_key(original: Callable[..., Any], self: Any, request: Any) -> Any:
    """Keep `cache_salt` and `extra_key` apart: SGLang makes the same of "a", "bc" and "ab", "c"."""
    key, salt = original(self, request), getattr(request, "cache_salt", None)
    if not salt or hooks.chosen_args() is None:
        return key
    return f"{len(salt)}:{key}"


_HOOKS: dict[str, hooks.Hook] = {
    **hooks.COMMON,
    **front.HOOKS,
    "speculative.spec_info.SpeculativeAlgorithm.from_string": (_from_string, "AROUND"),
    "speculative.spec_info.SpeculativeAlgorithm.create_worker": (_create_worker, "AFTER"),
    "server_args.ServerArgs.add_cli_args": (_add_cli_args, "AFTER"),
    "server_args.ServerArgs.__post_init__": (_post_init, "BEFORE"),
    "server_args.ServerArgs._handle_speculative_decoding": (_handle_speculative_decoding, "AFTER"),
    "server_args.ServerArgs._handle_gpu_memory_settings": (_handle_gpu_memory_settings, "AROUND"),
    f"{_UPDATER}.save_remote_model": (hooks.save_remote_model, "AROUND"),
    f"{_MIXIN}.stream_output_generation": (hooks.stream_output, "AROUND"),
    f"{_MIXIN}.process_batch_result_prefill": (hooks.keep_prompt_logprobs, "BEFORE"),
    f"{_MIXIN}._resolve_spec_overlap_token_ids": (_resolve_tokens, "AROUND"),
    "managers.schedule_batch.ScheduleBatch.get_model_worker_batch": (_model_worker_batch, "AFTER"),
    "managers.overlap_utils.FutureMap.resolve_future": (_resolve_future, "AROUND"),
    "managers.overlap_utils.FutureMap.store_to_map": (_store_to_map, "AROUND"),
    "model_executor.model_runner.ModelRunner.init_aux_hidden_state_capture": (
        _init_aux_hidden_state_capture,
        "AFTER",
    ),
    "layers.utils.hash.murmur_hash32": (hooks.murmur_hash32, "AROUND"),
    "model_executor.cuda_graph_runner.CudaGraphRunner.can_run": (_can_run_graph, "AROUND"),
}

_FRONT: dict[str, hooks.Hook] = {
    **front.FRONT,
    "entrypoints.openai.serving_base.OpenAIServingBase._compute_extra_key": (
        _compute_extra_key,
        "AROUND",
    ),
}
