"""SGLang 0.5.23: its hooks, its worker, and what is otherwise here than in other versions.

The algorithm is registered by SGLang's public way. Its scheduler hands the worker a `ScheduleBatch`
whose changes it undoes afterwards, and relays lengths and last tokens from step to step by a map
that waits for the device. Ours waits for nothing: the worker keeps both, on the device and, where
that is known without a wait, on the host.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from outrider.core import Unsupported
from outrider.hosts.sglang import contract_0_5_23 as contract
from outrider.hosts.sglang import front, hooks, plugin, settings
from outrider.hosts.sglang.host import Host, changed
from outrider.hosts.sglang.profile import MODEL, REPAIR_VARIABLE


class Sglang0523(Host):
    """SGLang 0.5.23."""

    contract = contract
    accepted = "spec_num_correct_drafts"
    caches = ("mem_cache.radix_cache.RadixCache", "mem_cache.unified_radix_cache.UnifiedRadixCache")
    prefix_lens, extend_lens = "prefix_lens", "extend_lens"

    def __init__(self) -> None:
        self._view: tuple[Any, Any] = None, None

    def register(self, name: str) -> None:
        """Register the algorithm."""
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        register = SpeculativeAlgorithm.register(
            name,
            supports_overlap=True,
            validate_server_args=_apply_settings,
            spec_class=_algorithm_class(),
        )
        register(_worker_for)

    def hooks(self) -> dict[str, hooks.Hook]:
        """Return what this version is hooked by."""
        return _HOOKS

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

    def cache_of(self, req: Any) -> Any:
        """Return the request's part for it."""
        return req.kv

    def check_end(self, req: Any) -> None:
        """Let it look."""
        req.update_finish_state()

    def count_step(self, req: Any, accepted: int) -> None:
        """Count a step of a request."""
        req.spec_verify_ct += 1
        req.update_spec_correct_drafts_histogram(accepted)

    def count_accepted(self, result: Any, accepted: list[int]) -> None:
        """Note how many drafts of each request were accepted."""
        result.num_correct_drafts = sum(accepted)
        result.num_correct_drafts_per_req_cpu = accepted

    def pick(self, info: Any, rows: list[int], index: Tensor) -> None:
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

    def take_slots(self, tree_cache: Any, count: int) -> Tensor:
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

    def graph_sizes(self, runner: Any) -> tuple[int, ...]:
        """Return the numbers of rows for which there are graphs."""
        graphs = getattr(runner, "decode_cuda_graph_runner", None)
        return tuple(getattr(graphs, "capture_bs", ()))


def _apply_settings(server_args: Any) -> None:
    """Check and complete the server's arguments. server_args: SGLang's, to be written to"""
    try:
        plugin.check_contract()
        settings.apply(server_args)
    except Unsupported as error:
        raise SystemExit(f"outrider: {error}") from error


def _worker_for(server_args: Any) -> type:
    """Return our worker, having made sure that all hooks hold."""
    plugin.check_hooks()
    return _worker_class()


def _algorithm_class() -> Any:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class NoRelay(FutureMap):
        """Relays nothing: the worker has what the next step needs, and waits if it must."""

        def resolve_seq_lens_cpu(self, batch: Any, stream_ordered: bool = False) -> None:
            """Do nothing."""

        def publish(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing."""

        stash = _resolve_spec_extras = publish

    class Algorithm(CustomSpecAlgo):
        """What SGLang asks about ours.

        To whoever captures CUDA graphs it is not speculative: a verify pass of ours is a decode
        batch, so the graphs of plain decoding serve it.
        """

        def is_speculative(self) -> bool:
            """Say no: capture the graphs of plain decoding."""
            return False

        def carries_draft_hidden_states(self) -> bool:
            """Say no: nothing is sent to other servers."""
            return False

        def need_topk(self) -> bool:
            """Say no: nothing is relayed."""
            return False

        def create_future_map(self, device: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the relay between steps."""
            return NoRelay(device, self, pool, *args, **kwargs)

    return Algorithm


def _worker_class() -> type:
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

    from outrider.hosts.sglang.drafting import make_draft_worker
    from outrider.hosts.sglang.heads import capture_states
    from outrider.hosts.sglang.worker import OutriderWorker

    class Worker(OutriderWorker, BaseSpecWorker):
        """What the scheduler of 0.5.23 calls."""

        def __init__(
            self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any
        ) -> None:
            BaseSpecWorker.__init__(self)
            self._load(target_worker, server_args)
            capture_states(self.model_runner)
            self._draft_worker = make_draft_worker(
                target_worker, server_args, gpu_id=gpu_id, nccl_port=nccl_port
            )

        def _draft_model_runners(self) -> tuple[Any, ...]:
            draft = self._draft_worker
            return () if draft is None else (draft.model_runner,)

        def weight_update_runners(self) -> list[tuple[str, Any]]:
            """Return none: the draft model keeps its weights. The host would ask its own worker."""
            return []

        def init_cuda_graphs(self) -> None:
            """Begin: this comes last, when caches and attention backends are there."""
            super().init_cuda_graphs()
            ranks = get_parallel()
            self._begin(self._draft_worker, ranks.tp_rank, getattr(ranks, "dp_rank", None))
            # the number of cached tokens by req_pool_index: on the device, and as the host knows it
            self._lens = torch.zeros_like(self._last_tokens)
            self._lens_cpu = torch.zeros(len(self._lens), dtype=torch.int64)
            # what each request's grammar has yet to accept
            self._unread: list[tuple[Any, Any, list[int]]] = []

        def forward_batch_generation(
            self, plain: Any, on_publish: Any = None, pp_proxy_tensors: Any = None
        ) -> Any:
            """Launch one step."""
            self._advance_grammars()
            index, index_cpu = plain.req_pool_indices, plain.req_pool_indices_cpu
            if plain.forward_mode.is_decode():
                plain.seq_lens, plain.seq_lens_cpu = self._lens[index], self._lens_cpu[index_cpu]
            source = getattr(plain.sampling_info, "outrider_source", None)
            batch = changed(plain, sampling_info=source)
            result = self._step(batch, plain)
            draft = result.next_draft_input
            if (draft.is_current or draft.on_device) and len(plain.reqs):
                self._lens[index], self._lens_cpu[index_cpu] = draft.new_seq_lens, draft.lens_cpu
            return result

        def settle_tokens(self, processor: Any, result: Any, batch: Any) -> list[list[int]]:
            """Return what a step emitted for each request; the scheduler appends it."""
            told = self.resolve(result, batch)
            for req, tokens in zip(batch.reqs, told, strict=True):
                # of others the scheduler appends nothing
                is_told = tokens and not (req.finished() or req.is_retracted)
                if is_told and req.grammar is not None:
                    self._unread.append((processor, req, tokens))
            return told

        def _advance_grammars(self) -> None:
            """Let grammars accept what was appended: after the look for an end, as plain decoding.

            Before it, as the host does for its own algorithms, a request would end one token early.
            """
            unread, self._unread = self._unread, []
            for processor, req, tokens in unread:
                if not req.finished():
                    processor._accept_grammar_tokens(req, tokens)

    return Worker


# -- hooks of this version. AROUND gets the original first, AFTER its result.


def _resolve_once(self: Any, *args: Any, **kwargs: Any) -> None:
    if os.environ.get(REPAIR_VARIABLE):
        raise SystemExit(f"outrider: {REPAIR_VARIABLE} is for SGLang 0.5.11; unset it")
    if hooks.is_chosen(self):
        settings.refuse_flags(self)


def _prepare_for_decode(original: Callable[..., Any], batch: Any) -> Any:
    from outrider.hosts.sglang.flights import NextDraft

    if isinstance(batch.spec_info, NextDraft):
        return batch.spec_info.prepare_for_decode(batch)
    return original(batch)


def _copy_for_forward(result: Any, self: Any) -> None:
    if hooks.chosen_args() is not None:
        result.outrider_source = self  # workers are given no more than the result


def _resolve_tokens(original: Callable[..., Any], self: Any, result: Any, batch: Any) -> Any:
    settle = getattr(self.model_worker, "settle_tokens", None)
    return original(self, result, batch) if settle is None else settle(self, result, batch)


def _eager_batch_size(original: Callable[..., Any], max_batch_size: int) -> Any:
    """Make room for a row for each draft: SGLang makes room for a row for each request."""
    args = hooks.chosen_args()
    if args is None:
        return original(max_batch_size)
    return original(max_batch_size * args.speculative_num_draft_tokens)


def _algorithm_alias(
    original: Callable[..., Any], speculative_algorithm: Any, *args: Any, **kwargs: Any
) -> Any:
    """Keep a head from SGLang, which would read its config.json as that of a model."""
    if (speculative_algorithm or "").upper() == hooks.NAME:
        return speculative_algorithm
    return original(speculative_algorithm, *args, **kwargs)


def _check_lora(original: Callable[..., Any], server_args: Any) -> Any:
    """Let rows have the adapters of their requests: SGLang knows its own algorithms only."""
    return None if hooks.is_chosen(server_args) else original(server_args)


class _WithoutDraft:
    """The server's arguments without a draft model."""

    speculative_draft_model_path = None

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def _boundary_reduction(original: Callable[..., Any], view: Any) -> Any:
    """Keep a head from SGLang, as above."""
    from outrider.hosts.sglang.heads import draft_kind

    if hooks.is_chosen(view) and draft_kind(view) not in (None, MODEL):
        view = _WithoutDraft(view)
    return original(view)


def _trim_overshoot(result: None, self: Any, req: Any, finished_len: int) -> None:
    """Keep in a session only what is cached: SGLang takes all reserved slots of a text for that."""
    if hooks.chosen_args() is not None:
        kv = req.kv
        self._free_kv_aligned(kv, kv.kv_committed_len, kv.kv_allocated_len)
        kv.kv_allocated_len = min(kv.kv_allocated_len, kv.kv_committed_len)


_PROCESSOR = "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_ALIAS = "arg_groups.speculative_hook._resolve_speculative_algorithm_alias"
_UPDATER = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_STREAMER = "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"

_HOOKS: dict[str, hooks.Hook] = {
    **hooks.COMMON,
    **front.HOOKS,
    "server_args.ServerArgs.resolve_once": (_resolve_once, "BEFORE"),
    "speculative.spec_utils.spec_prepare_for_decode": (_prepare_for_decode, "AROUND"),
    "sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward": (_copy_for_forward, "AFTER"),
    f"{_PROCESSOR}.process_batch_result_prefill": (hooks.keep_prompt_logprobs, "BEFORE"),
    f"{_PROCESSOR}._resolve_spec_v2_tokens": (_resolve_tokens, "AROUND"),
    "session.streaming_session.StreamingSession._trim_overshoot": (_trim_overshoot, "AFTER"),
    f"{_UPDATER}.save_remote_model": (hooks.save_remote_model, "AROUND"),
    f"{_STREAMER}._stream_output_generation": (hooks.stream_output, "AROUND"),
    "model_executor.runner.eager_runner.get_eager_max_batch_size": (_eager_batch_size, "AROUND"),
    _ALIAS: (_algorithm_alias, "AROUND"),
    "arg_groups.boundary_reduction.resolve_boundary_reduction": (_boundary_reduction, "AROUND"),
    "arg_groups.lora_hook.check_lora_speculative_compatibility": (_check_lora, "AROUND"),
    "layers.sampler.murmur_hash32": (hooks.murmur_hash32, "AROUND"),
}
