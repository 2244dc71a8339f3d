"""What the scheduler of SGLang 0.5.23 calls.

It hands the worker a `ScheduleBatch` whose changes it undoes afterwards, and relays lengths and
last tokens from step to step by a map that waits for the device. Ours waits for nothing: the worker
keeps both, on the device and, where that is known without a wait, on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from outrider.engines.sglang.copies import changed
from outrider.engines.sglang.drafts.draft_model import make_draft_worker
from outrider.engines.sglang.drafts.heads import capture_states
from outrider.engines.sglang.finish import has_left
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.engines.sglang.workers.base import OutriderWorker
from outrider.serving.values import Knows


class Worker0523(OutriderWorker, BaseSpecWorker):
    """What the scheduler of 0.5.23 calls."""

    def __init__(
        self,
        version: SglangVersion,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: Any,
    ) -> None:
        BaseSpecWorker.__init__(self)
        self._load(version, target_worker, server_args)
        capture_states(self.model_runner, self.version)
        self._draft_worker = make_draft_worker(
            self.version, target_worker, server_args, gpu_id=gpu_id, nccl_port=nccl_port
        )

    def _draft_model_runners(self) -> tuple[Any, ...]:
        draft = self._draft_worker
        return () if draft is None else (draft.model_runner,)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """Return none: the draft model keeps its weights. SGLang would ask its own worker."""
        return []

    def init_cuda_graphs(self) -> None:
        """Begin: this comes last, when caches and attention backends are there."""
        super().init_cuda_graphs()
        ranks = get_parallel()
        self._begin(self._draft_worker, ranks.tp_rank, getattr(ranks, "dp_rank", None))
        # the number of cached tokens by row of the table: on the device, and as the CPU knows it
        table = self.model_runner.req_to_token_pool.req_to_token
        self._lens = torch.zeros(len(table), dtype=torch.int64, device=table.device)
        self._lens_cpu = torch.zeros(len(self._lens), dtype=torch.int64)
        # what each request's grammar has yet to accept
        self._unread: list[tuple[Any, Any, list[int]]] = []

    def forward_batch_generation(
        self, plain: Any, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        """Launch one pass."""
        self._advance_grammars()
        index, index_cpu = plain.req_pool_indices, plain.req_pool_indices_cpu
        if plain.forward_mode.is_decode():
            plain.seq_lens, plain.seq_lens_cpu = self._lens[index], self._lens_cpu[index_cpu]
        source = getattr(plain.sampling_info, "outrider_source", None)
        batch = changed(plain, sampling_info=source)
        result = self._launch(batch, plain)
        carried = result.next_draft_input
        if carried.knows is not Knows.CPU and len(plain.reqs):
            self._lens[index] = carried.new_seq_lens
            self._lens_cpu[index_cpu] = carried.lens_cpu
        return result

    def settle_tokens(self, processor: Any, result: Any, batch: Any) -> list[list[int]]:
        """Return what a step emitted for each request; the scheduler appends it."""
        emitted = self.resolve(result, batch)
        for req, tokens in zip(batch.reqs, emitted, strict=True):
            # for requests that have left the scheduler appends nothing
            if tokens and req.grammar is not None and not has_left(req):
                self._unread.append((processor, req, tokens))
        return emitted

    def _advance_grammars(self) -> None:
        """Let grammars accept what was appended: after the look for an end, as plain decoding.

        Before it, as SGLang does for its own algorithms, a request would end one token early.
        """
        unread, self._unread = self._unread, []
        for processor, req, tokens in unread:
            if not req.finished():
                processor._accept_grammar_tokens(req, tokens)
