"""What SGLang's scheduler calls instead of the target's worker.

SGLang launches step t + 1, then takes in what step t emitted, then schedules step t + 2, all while
the device works. So the worker does not append to SGLang's requests; it changes what they hold of
the KV pool, and counts. It hands each batch to the served step (`serving.step`), and tells the
scheduler what a step emitted when it asks (`resolve`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.utils.common import freeze_gc

from outrider.control.decision import Limits
from outrider.engines.sglang.answers.reported import add_record, count_step
from outrider.engines.sglang.arguments.chosen import ATTENTION_BACKEND, refusing_start
from outrider.engines.sglang.arguments.memory import num_penalties
from outrider.engines.sglang.arguments.settings import check_model, verify_pass
from outrider.engines.sglang.attention.backend import OutriderAttention
from outrider.engines.sglang.batches import SglangBatch, copied_rows
from outrider.engines.sglang.carried import Carried
from outrider.engines.sglang.drafts.draft_model import SglangDraftModel
from outrider.engines.sglang.drafts.heads import draft_kind, head_sources, load_heads
from outrider.engines.sglang.drafts.slot_heads import SglangHead, SlotHead
from outrider.engines.sglang.engine import SglangEngine
from outrider.engines.sglang.finish import attach_hidden, has_left, order_logprobs
from outrider.engines.sglang.requests import Describer
from outrider.engines.sglang.slots import Slots
from outrider.engines.sglang.verify_pass import VerifyPass
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.kernels.sample_match import DeviceCoins
from outrider.serving.calibration import ROW_COUNTS, calibrate
from outrider.serving.decider import Decider
from outrider.serving.device import DeviceTexts
from outrider.serving.device_drafters import DeviceDrafters
from outrider.serving.head_steps import HeadSteps
from outrider.serving.in_flight import InFlight
from outrider.serving.make_pool import make_pool
from outrider.serving.metrics import Metrics
from outrider.serving.profile import ADAPTIVE, DEVICE, Profile, load_profile
from outrider.serving.ranks import Ranks
from outrider.serving.rows import RowBudget
from outrider.serving.step import ServedStep
from outrider.serving.table import RequestTable
from outrider.serving.telemetry import Telemetry, explained
from outrider.serving.tracing import Tracer
from outrider.serving.values import Batch, PrefillLaunch, Settled

logger = logging.getLogger(__name__)


class OutriderWorker:
    """What SGLang's scheduler calls. Each version of SGLang has a subclass of its own."""

    def _load(self, version: SglangVersion, target_worker: Any, server_args: Any) -> None:
        """Begin with the target's weights loaded, and nothing else."""
        check_model(target_worker)
        self.version, self.server_args = version, server_args
        self._target_worker = target_worker
        self.model_config = target_worker.model_config
        self._ranks = Ranks(target_worker.world_group)
        # SGLang's hooks take the place of functions, not of properties
        Req.is_prefill_only = property(is_prefill_only)

    @property
    def target_worker(self) -> Any:
        """SGLang's own worker, of the target."""
        return self._target_worker

    @property
    def model_runner(self) -> Any:
        """The target's."""
        return self._target_worker.model_runner

    def _begin(self, draft_worker: Any, tp_rank: int, dp_rank: int | None) -> None:
        """Make the parts of the served step: the caches and the attention backend are there now.

        draft_worker: SGLang's worker of the draft model; None without one
        """
        args, profile = self.version.arguments(self.server_args), load_profile()
        runner = self.model_runner
        self.draft_model_worker = draft_worker
        self._coins = DeviceCoins()
        config = self.model_config
        self._rows = RowBudget(
            limit=backend_rows(args, runner),
            vocab_size=config.vocab_size,
            logit_bytes=config.dtype.itemsize,
            coins=self._coins,
            # a tree's slots change places, and those of a page must not
            trees=isinstance(runner.attn_backend, OutriderAttention) and runner.page_size == 1,
        )
        with refusing_start():
            self._make_drafters(profile, args, draft_worker)
        describe = Describer(self._names, profile, args, self._pool.fallbacks)
        self._options = describe.options
        self._table = RequestTable(describe, self._pool)
        self._in_flight = InFlight()
        self._slots = Slots(
            self.version, lambda reqs: self._in_flight.max_cached(reqs, self._table)
        )
        self._begin_verify(profile, args)
        labels = {"model_name": args.served_model_name, "dp_rank": str(dp_rank or 0)}
        self._step = self._make_step(profile, args, labels if tp_rank == 0 else None)
        # a full collection would look at all that was loaded, which takes 100 ms and more
        freeze_gc("Outrider")

    def _make_drafters(self, profile: Profile, args: Any, draft_worker: Any) -> None:
        runner, model = self.model_runner, None
        if draft_worker is not None:
            model = SglangDraftModel(draft_worker, self._rows.max_rows(), self.version, self._ranks)
        sources = head_sources(profile, args)
        heads = load_heads(sources, runner, self._ranks, self.version)
        self._names = profile.names(draft_kind(args))
        depths = {name: n for name, n in profile.depths().items() if name in heads}
        limits = Limits(
            launches_early=self._ranks.alone,
            reads_each_row=args.attention_backend != ATTENTION_BACKEND,
            graph_sizes=self.version.graph_sizes(runner),
        )
        self._pool = make_pool(
            profile,
            self._names,
            self.model_config.vocab_size,
            model=model,
            heads=heads,
            ranks=self._ranks,
            limits=limits,
            device_depths={DEVICE: self._rows.max_rows(), **depths},
        )
        # other backends plan a pass by lengths, which the CPU does not know then
        can = args.attention_backend in (ATTENTION_BACKEND, "torch_native") and self._ranks.alone
        drafts = can and bool({DEVICE, ADAPTIVE, *depths} & {*self._names})
        self._device = self._device_drafters(heads, drafts)
        own = [head for head in heads.values() if head is not None]
        self._engine = SglangEngine(
            self.version, self._target_worker, self._ranks, self._device, own, bool(sources)
        )

    def _device_drafters(self, heads: dict[str, SlotHead | None], drafts: bool) -> DeviceDrafters:
        """Return what can draft on the device, and let control choose the heads among it.

        drafts: whether anything can
        """
        table = self.model_runner.req_to_token_pool.req_to_token
        if not drafts:
            return DeviceDrafters(DeviceTexts(table, drafts=False))
        vocab_size = self.model_config.vocab_size
        steps = {
            name: HeadSteps(name, head, table, vocab_size, self._coins)
            for name, head in heads.items()
            # it reads all that the target may emit, which the CPU has not checked
            if isinstance(head, SglangHead) and head.vocab_size >= vocab_size
        }
        if self._pool.control is not None:
            self._pool.control.add_to_device(steps)
        return DeviceDrafters(DeviceTexts(table, self._pool.lookup), steps)

    def _begin_verify(self, profile: Profile, args: Any) -> None:
        """Choose how drafts are verified."""
        with refusing_start():
            found = verify_pass(profile.verify_pass, args, self.model_runner.sliding_window_size)
        verify, width = None, args.speculative_num_draft_tokens
        if found == "target_verify" or (found == "auto" and self._pool.control is not None):
            most = int(self.model_config.context_len)
            verify = VerifyPass(self._engine.run_target, width, most)
        self._engine.use(self._slots, verify, is_padding_chosen=found == "target_verify")
        logger.info("drafts are verified by %s", found if verify is not None else "rows")

    def _make_step(self, profile: Profile, args: Any, labels: dict[str, str] | None) -> ServedStep:
        """Return the served step. labels: of counters and spans; None if this rank has none"""
        metrics = tracer = None
        control = self._pool.control
        if labels is not None and args.enable_metrics:
            metrics = Metrics(labels, None if control is None else control.cost)
        if labels is not None and profile.tracing:
            tracer = Tracer(labels)
        # its rows have slots of no text, which the sanitizer would find
        is_timed = control is not None and not profile.sanitize
        decider = Decider(
            self._table,
            self._pool,
            self._device,
            self._rows,
            self._engine.padded_width,
            self._calibrate if is_timed else None,
        )
        telemetry = Telemetry(self._pool, metrics, tracer)
        parts = self._table, self._pool, self._device, decider, telemetry, self._in_flight
        return ServedStep(self._engine, *parts)

    # -- what the scheduler calls

    def _launch(self, batch: Any, worker_batch: Any) -> GenerationBatchResult:
        """Launch one pass.

        batch, worker_batch: the scheduler's own batch, and the same as its workers take it
        """
        own = SglangBatch(self.version, batch, worker_batch)
        if not worker_batch.forward_mode.is_decode():
            return self._prefill(own)
        carried: Carried = worker_batch.spec_info
        self._engine.use_stream(carried.main)
        before = carried.launched
        launched = self._step.launch(
            Batch(
                reqs=batch.reqs,
                knows=carried.knows,
                longest=worker_batch.seq_lens_cpu.numpy(),
                index=worker_batch.req_pool_indices,
                lens=worker_batch.seq_lens,
                own=own,
                device_drafter="" if before is None else before.device_drafter,
                room=carried.room,
                num_penalties=num_penalties(batch.sampling_info.penalizer_orchestrator),
            )
        )
        result: GenerationBatchResult = launched.ticket
        result.next_draft_input.note_launched(launched)
        return result

    def _prefill(self, own: SglangBatch) -> GenerationBatchResult:
        """Read prompts."""
        plain = own.worker_batch
        self._in_flight.begin_prefill()
        self._table.drop([req.rid for req in plain.reqs])  # retracted requests start over
        if plain.forward_mode.is_idle():
            result = self._engine.run_target(plain, is_verify=False)
        else:
            result = self._engine.run_prefill(own)
            self._enter(plain, result.next_token_ids)
            self._prefill_drafts(plain)
            self._step.meanwhile()
            lengths = [len(req.origin_input_ids) + len(req.output_ids) for req in plain.reqs]
            self._in_flight.append(PrefillLaunch(plain.reqs[:], lengths, result))
        result.next_draft_input = Carried(self._slots, plain.seq_lens, plain.seq_lens_cpu)
        return result

    def _enter(self, plain: Any, tokens: torch.Tensor) -> None:
        """Let the device have the texts of a prefill, and the tokens that it emits."""
        lengths = np.array([len(req.origin_input_ids) + len(req.output_ids) for req in plain.reqs])
        partial = np.flatnonzero(plain.seq_lens_cpu.numpy() < lengths)  # chunks of a prompt
        self._device.enter(plain.reqs, plain.req_pool_indices, plain.seq_lens, tokens, partial)

    def _prefill_drafts(self, plain: Any) -> None:
        """Let the draft model and heads read the prompts too, if they will draft for some."""
        if self._pool.readers:
            options = [self._options(req) for req in plain.reqs]
            drafters = {asked.drafter for asked in options if asked.max_drafts}
            self._pool.prefill(plain, drafters, int(plain.seq_lens_cpu.max()), len(plain.reqs))

    def resolve(self, result: Any, batch: Any) -> list[list[int]]:
        """Return what a step emitted for each request of its batch; the scheduler appends it.

        batch: as it was launched
        """
        self._engine.use_stream(torch.get_device_module(self.model_runner.device).current_stream())
        settled = self._step.outcome_of(result.next_draft_input.launched)
        outcomes = settled.outcomes
        emitted: list[list[int]] = [[] for _ in batch.reqs]
        accepted = [0] * len(batch.reqs)
        tokens, starts = outcomes.tokens.tolist(), outcomes.starts.tolist()
        counts = outcomes.num_accepted_drafts.tolist()
        for r, place in enumerate(settled.members.places.tolist()):
            emitted[place], accepted[place] = tokens[starts[r] : starts[r + 1]], counts[r]
        self.version.report_accepted(result, accepted)
        self._commit(settled, result.logits_output, batch)
        self._step.after_outcome()
        return emitted

    def _commit(self, settled: Settled, output: Any, batch: Any) -> None:
        """Bring SGLang's requests up to date; give them logprobs and hidden states."""
        outcomes, columns = settled.outcomes, settled.launched.columns
        for r, request in enumerate(settled.members.requests):
            if not has_left(request.req):
                self.version.kv(request.req).kv_committed_len += int(outcomes.num_tokens[r])
                drafts, accepted = outcomes.num_drafts[r], outcomes.num_accepted_drafts[r]
                count_step(self.version, request.req, int(drafts), int(accepted))
        if columns.explain:
            for request, outcome, record in explained(settled):
                is_last = outcome.finish_reason is not None or request.req.finished()
                add_record(self.version, request.req, record, is_last)
        if columns.wants_output:
            attach_hidden(settled, output)
            if batch.return_logprob:
                order_logprobs(settled, output, len(batch.reqs))
        output.hidden_states = None  # SGLang would add one row of them again

    def _calibrate(self, batch: Batch) -> None:
        """Measure passes. Their rows are copies of the first request's, in slots of their own."""
        own: SglangBatch = batch.own
        plain, pool = own.worker_batch, own.batch.token_to_kv_pool_allocator
        most = min(ROW_COUNTS[-1], pool.available_size(), self._rows.max_rows())
        slots = pool.alloc(most)
        if slots is None or not len(slots):
            return

        def rows(count: int) -> Any:
            tokens = [own.batch.reqs[0].origin_input_ids[-1]] * count
            positions, index = [int(batch.longest[0])] * count, own.index[:1].expand(count)
            reqs = plain.reqs[:1] * count
            return copied_rows(plain, tokens, index, positions, slots[:count], reqs=reqs)

        def timed(run: Callable[[Any], torch.Tensor]) -> Callable[[int], torch.Tensor]:
            return lambda count: run(rows(count))

        def run_target(batch: Any) -> Any:
            return self._engine.run_target(batch).logits_output.next_token_logits

        assert self._pool.control is not None
        target, models = timed(run_target), [timed(m.run) for m in self._pool.timed_models()]
        try:
            # of pages, only whole ones are given
            calibrate(self._pool.control, self._ranks, target, models, len(slots))
        finally:
            pool.free(slots)

    def clear_cache_pool(self) -> None:
        """Do nothing at a cache flush: SGLang flushes only when no request is running."""

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """Leave the draft model as it is when the target gets new weights: it costs speed only."""
        return True, "the draft model keeps its weights"

    update_weights_from_ipc = update_weights_from_disk

    def update_weights_from_tensor(self, recv_req: Any) -> tuple[bool, str]:
        """Give the target new weights: SGLang 0.5.11 leaves that to its draft worker."""
        done: tuple[bool, str] = self._target_worker.update_weights_from_tensor(recv_req)
        return done


def is_prefill_only(self: Any) -> bool:
    """Say whether a request generates nothing. SGLang's own says no beside any speculation."""
    return bool(self.sampling_params.max_new_tokens == 0)


def backend_rows(args: Any, runner: Any) -> int:
    """Return how many rows the attention backend has room for.

    SGLang's GPU backends make room for as many decode requests as may run at once. Others take all
    rows that there may be.
    """
    requests = int(runner.req_to_token_pool.size)
    if args.attention_backend in (ATTENTION_BACKEND, "torch_native"):
        return requests * int(args.speculative_num_draft_tokens)
    return requests
