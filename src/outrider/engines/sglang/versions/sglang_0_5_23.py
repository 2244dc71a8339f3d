"""SGLang 0.5.23: what is otherwise here than in other versions."""

from __future__ import annotations

import dataclasses
from copy import copy
from typing import Any

import torch
from torch import Tensor

from outrider.engines.sglang.versions import contract_0_5_23 as contract
from outrider.engines.sglang.versions.base import SglangVersion


class Sglang0523(SglangVersion):
    """SGLang 0.5.23."""

    contract = contract
    accepted = "spec_num_correct_drafts"
    caches = ("mem_cache.radix_cache.RadixCache", "mem_cache.unified_radix_cache.UnifiedRadixCache")
    prefix_lens, extend_lens = "prefix_lens", "extend_lens"
    graph_runner = "decode_cuda_graph_runner"

    def __init__(self) -> None:
        self._view: tuple[Any, Any] = None, None

    def arguments(self, server_args: Any) -> Any:
        """Return a view of them: SGLang keeps what it completed beside what was given."""
        from sglang.srt.arg_groups.overrides import resolving_view

        if self._view[0] is not server_args:
            self._view = server_args, resolving_view(server_args)
        return self._view[1]

    def current_arguments(self) -> Any:
        """Return this process's."""
        from sglang.srt.runtime_context import get_server_args

        try:
            return self.arguments(get_server_args())
        except ValueError:
            return None

    def check_sent(self, made: Any) -> None:
        """Raise if what the scheduler reads has other types than it knows. It would stop there."""
        from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

        made = copy(made)
        # SGLang has made these itself, and they may be large
        made.mm_inputs = made.input_embeds = made.time_stats = None
        made.input_ids = made.input_ids and made.input_ids[:1]
        msgpack_decode(msgpack_encode(made))

    def kv(self, req: Any) -> Any:
        """Return the request's part for it."""
        return req.kv

    def check_finished(self, req: Any) -> None:
        """Let it look."""
        req.update_finish_state()

    def count_step(self, req: Any, accepted: int) -> None:
        """Count a step of a request."""
        req.spec_verify_ct += 1
        req.update_spec_correct_drafts_histogram(accepted)

    def report_accepted(self, result: Any, accepted: list[int]) -> None:
        """Note how many drafts of each request were accepted."""
        result.num_correct_drafts = sum(accepted)
        result.num_correct_drafts_per_req_cpu = accepted

    def pick_sampling(self, info: Any, rows: list[int], index: Tensor) -> None:
        """Leave these entries. SGLang's own way applies a processor to the last of equal rows."""
        processors = info.custom_logit_processor
        info.filter_batch(rows, index)
        if not info.custom_logit_processor:
            return
        info.custom_logit_processor = {}
        for key, entry in processors.items():
            mine = [row for row, of in enumerate(rows) if of in entry.rows]
            if mine:
                indices = torch.tensor(mine, device=index.device)
                entry = dataclasses.replace(entry, rows=mine, indices=indices)
                info.custom_logit_processor[key] = entry

    def slots_per_step(self) -> int:
        """Return how many slots a request may need in a step."""
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_len_per_decode

        return int(get_alloc_len_per_decode())

    def alloc_slots(self, tree_cache: Any, count: int) -> Tensor:
        """Return so many slots."""
        from sglang.srt.mem_cache.allocation import alloc_token_slots

        slots: Tensor = alloc_token_slots(tree_cache, count)
        return slots

    def attention_tp_size(self) -> int:
        """Return over how many ranks attention heads are spread."""
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().attn_tp_size)

    def draft_worker(self, target_worker: Any, server_args: Any, **options: Any) -> Any:
        """Return a worker of SGLang's. Its caches come later."""
        from sglang.srt.managers.tp_worker import TpModelWorker

        return TpModelWorker(
            server_args=server_args,
            is_draft_worker=True,
            context_length=target_worker.model_config.context_len,
            **options,
        )

    def draft_batch(self, batch: Any, runner: Any) -> Any:
        """Return what a draft model's runner takes for this batch."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

        batch.sampling_info = None  # SGLang would change the grammars in it
        return ForwardBatch.init_new(
            batch,
            runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )

    def return_states(self, runner: Any) -> None:
        """Let graphs return hidden states."""
        from sglang.srt.runtime_context import get_context

        get_context().override("outrider", enable_return_hidden_states=True)

    def run_target(self, worker: Any, batch: Any, *, is_verify: bool, states: bool) -> Any:
        """Run the target over a batch."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        mode = CaptureHiddenMode.FULL if states else None
        return worker.forward_batch_generation(batch, is_verify=is_verify, capture_hidden_mode=mode)
