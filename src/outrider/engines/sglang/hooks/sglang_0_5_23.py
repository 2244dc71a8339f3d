"""The hooks that SGLang 0.5.23 needs beside those of all versions.

The algorithm is registered by SGLang's public way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from outrider.engines.sglang.arguments import settings
from outrider.engines.sglang.arguments.chosen import NAME, is_chosen, refusing_start
from outrider.engines.sglang.hooks.common import Hooks
from outrider.engines.sglang.hooks.laying import after, around, before
from outrider.serving.profile import MODEL, REPAIR_VARIABLE

_PROCESSOR = "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_UPDATER = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_STREAMER = "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"


class Hooks0523(Hooks):
    """What SGLang 0.5.23 is hooked by."""

    save_remote_model = around(f"{_UPDATER}.save_remote_model")(Hooks.save_remote_model)
    stream_output = around(f"{_STREAMER}._stream_output_generation")(Hooks.stream_output)
    keep_prompt_logprobs = before(f"{_PROCESSOR}.process_batch_result_prefill")(
        Hooks.keep_prompt_logprobs
    )
    murmur_hash32 = around("layers.sampler.murmur_hash32", always=True)(Hooks.murmur_hash32)

    def register(self) -> None:
        """Register the algorithm."""
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        register = SpeculativeAlgorithm.register(
            NAME,
            supports_overlap=True,
            validate_server_args=self.apply_settings,
            spec_class=_algorithm_class(),
        )
        register(self.worker_for)

    def apply_settings(self, server_args: Any) -> None:
        """Check and complete the server's arguments. server_args: SGLang's, to be written to"""
        with refusing_start():
            self.check_contract()
            settings.apply(server_args)

    def worker_for(self, server_args: Any) -> Callable[..., Any]:
        """Return our worker, having made sure that all hooks hold."""
        self.check()
        from outrider.engines.sglang.workers.sglang_0_5_23 import Worker0523

        return partial(Worker0523, self.version)

    @before("server_args.ServerArgs.resolve_once", always=True)
    def _resolve_once(self, their: Any, *args: Any, **kwargs: Any) -> None:
        if os.environ.get(REPAIR_VARIABLE):
            raise SystemExit(f"outrider: {REPAIR_VARIABLE} is for SGLang 0.5.11; unset it")
        if is_chosen(their):
            settings.refuse_flags(their)

    @around("speculative.spec_utils.spec_prepare_for_decode", always=True)
    def _prepare_for_decode(self, original: Callable[..., Any], batch: Any) -> Any:
        from outrider.engines.sglang.carried import Carried

        if isinstance(batch.spec_info, Carried):
            return batch.spec_info.prepare_for_decode(batch)
        return original(batch)

    @after("sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward")
    def _copy_for_forward(self, result: Any, their: Any) -> None:
        result.outrider_source = their  # workers are given no more than the result

    @around(f"{_PROCESSOR}._resolve_spec_v2_tokens", always=True)
    def _resolve_tokens(
        self, original: Callable[..., Any], their: Any, result: Any, batch: Any
    ) -> Any:
        settle = getattr(their.model_worker, "settle_tokens", None)
        return original(their, result, batch) if settle is None else settle(their, result, batch)

    @around("model_executor.runner.eager_runner.get_eager_max_batch_size")
    def _eager_batch_size(self, original: Callable[..., Any], max_batch_size: int) -> Any:
        """Make room for a row for each draft: SGLang makes room for a row for each request."""
        return original(max_batch_size * self.chosen_args().speculative_num_draft_tokens)

    @around("arg_groups.speculative_hook._resolve_speculative_algorithm_alias", always=True)
    def _algorithm_alias(
        self, original: Callable[..., Any], speculative_algorithm: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Keep a head from SGLang, which would read its config.json as that of a model."""
        if (speculative_algorithm or "").upper() == NAME:
            return speculative_algorithm
        return original(speculative_algorithm, *args, **kwargs)

    @around("arg_groups.lora_hook.check_lora_speculative_compatibility", always=True)
    def _check_lora(self, original: Callable[..., Any], server_args: Any) -> Any:
        """Let rows have the adapters of their requests: SGLang knows its own algorithms only."""
        return None if is_chosen(server_args) else original(server_args)

    @around("arg_groups.boundary_reduction.resolve_boundary_reduction", always=True)
    def _boundary_reduction(self, original: Callable[..., Any], view: Any) -> Any:
        """Keep a head from SGLang, as above."""
        from outrider.engines.sglang.drafts.heads import draft_kind

        if is_chosen(view) and draft_kind(view) not in (None, MODEL):
            view = _WithoutDraft(view)
        return original(view)

    @after("session.streaming_session.StreamingSession._trim_overshoot")
    def _trim_overshoot(self, result: None, their: Any, req: Any, finished_len: int) -> None:
        """Keep in a session only what is cached: SGLang would keep all reserved slots."""
        kv = req.kv
        their._free_kv_aligned(kv, kv.kv_committed_len, kv.kv_allocated_len)
        kv.kv_allocated_len = min(kv.kv_allocated_len, kv.kv_committed_len)


class _WithoutDraft:
    """The server's arguments without a draft model."""

    speculative_draft_model_path = None

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def _algorithm_class() -> Any:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class NoRelay(FutureMap):
        """Relays nothing: the worker has what the next step needs, and waits if it must."""

        def publish(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing."""

        stash = resolve_seq_lens_cpu = _resolve_spec_extras = publish

    class Algorithm(CustomSpecAlgo):
        """What SGLang asks about ours.

        To the code that captures CUDA graphs it is not speculative: a verify pass of ours is a
        decode batch, so the graphs of plain decoding serve it.
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
