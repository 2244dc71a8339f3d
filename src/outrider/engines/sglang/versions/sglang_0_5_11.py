"""SGLang 0.5.11: what is otherwise here than in other versions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.engines.sglang.versions import contract_0_5_11 as contract
from outrider.engines.sglang.versions.base import SglangVersion


class Sglang0511(SglangVersion):
    """SGLang 0.5.11."""

    contract = contract
    accepted = "spec_accepted_drafts"
    caches = ("mem_cache.radix_cache.RadixCache",)
    prefix_lens, extend_lens = "extend_prefix_lens", "extend_seq_lens"
    graph_runner = "graph_runner"

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

    def check_sent(self, made: Any) -> None:
        """Do nothing: whatever is made can be read."""

    def kv(self, req: Any) -> Any:
        """Return the request."""
        return req

    def check_finished(self, req: Any) -> None:
        """Let it look."""
        req.check_finished()

    def count_step(self, req: Any, accepted: int) -> None:
        """Count a step of a request."""
        req.spec_verify_ct += 1
        req.update_spec_acceptance_histogram(accepted)

    def report_accepted(self, result: Any, accepted: list[int]) -> None:
        """Note how many drafts of each request were accepted."""
        result.num_accepted_drafts = sum(accepted)
        result.num_accepted_drafts_per_req_cpu = accepted

    def pick_sampling(self, info: Any, rows: list[int], index: Tensor) -> None:
        """Leave these entries."""
        info.filter_batch(rows, index)

    def slots_per_step(self) -> int:
        """Return how many slots a request may need in a step."""
        from sglang.srt.managers.utils import get_alloc_len_per_decode

        return int(get_alloc_len_per_decode())

    def alloc_slots(self, tree_cache: Any, count: int) -> Tensor:
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
