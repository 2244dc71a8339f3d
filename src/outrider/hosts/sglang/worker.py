"""The loop, in the shape of SGLang's speculative workers of version 1 (no overlap).

The scheduler hands over its `ScheduleBatch`; the worker extends the requests, ends those that end,
and leaves cache lengths and logprobs as plain decoding would have left them after as many steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.common import alloc_token_slots
from torch import Tensor

from outrider.core import (
    Budget,
    FinishReason,
    Law,
    Outcome,
    Proposal,
    match,
    settle,
)
from outrider.hosts.sglang.attention import OutriderAttention
from outrider.hosts.sglang.calibration import calibrate
from outrider.hosts.sglang.drafting import Drafters, make_draft_model
from outrider.hosts.sglang.explain import step_record
from outrider.hosts.sglang.memory import max_rows, num_penalties
from outrider.hosts.sglang.metrics import Metrics
from outrider.hosts.sglang.profile import USES_MODEL, load_profile
from outrider.hosts.sglang.ranks import Ranks
from outrider.hosts.sglang.roster import LiveRequest, Roster
from outrider.hosts.sglang.row_limits import share_rows
from outrider.hosts.sglang.rows import Block, Penalties, sample, verify_batch
from outrider.hosts.sglang.tracing import StepClock, Tracer
from outrider.kernels.sample_match import DeviceCoins

logger = logging.getLogger(__name__)

_TOP_LOGPROBS = ("top_logprobs_val", "top_logprobs_idx")
_ID_LOGPROBS = ("token_ids_logprobs_val", "token_ids_logprobs_idx")


class _Accepted(int):
    """SGLang's count of a request's accepted drafts, which also knows how many were proposed.

    SGLang reckons the latter as K for every step, in another process; see the plugin's hook.

    steps: what each step did, of a request that asked and has ended: no sooner, for SGLang sends
        this with every chunk of a stream
    """

    proposed: int = 0
    steps: Sequence[dict[str, Any]] = ()

    def plus(self, accepted: int, proposed: int) -> _Accepted:
        """Return the count after one more step."""
        total = _Accepted(self + accepted)
        total.proposed = self.proposed + proposed
        return total


class OutriderWorker:
    """What SGLang's scheduler calls instead of the target's worker."""

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
        _check_model(target_worker)
        self.server_args = server_args
        self.target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.model_config = target_worker.model_config
        self._ranks = Ranks(target_worker.world_group)
        runner = self.model_runner
        self._logits = self.model_config.vocab_size, self.model_config.dtype.itemsize
        self._max_rows = min(_max_rows(runner), max_rows(*self._logits))
        self._trees = isinstance(runner.attn_backend, OutriderAttention)
        profile = load_profile()
        model = None
        if server_args.speculative_draft_model_path is not None:
            model = make_draft_model(
                target_worker,
                server_args,
                self._max_rows,
                gpu_id=gpu_id,
                tp_rank=tp_rank,
                dp_rank=dp_rank,
                moe_ep_rank=moe_ep_rank,
                attn_cp_rank=attn_cp_rank,
                moe_dp_rank=moe_dp_rank,
                nccl_port=nccl_port,
            )
        names, default = profile.names(bool(model)), profile.default_drafter(bool(model))
        vocab_size = self.model_config.vocab_size
        self._drafters = Drafters.make(
            profile, names, vocab_size, model, self._ranks, _graph_sizes(runner)
        )
        self._roster = Roster(self._drafters, names, default, server_args, profile.max_drafts)
        self._penalties = Penalties()
        self._coins = DeviceCoins()
        self._step_ended: float | None = None
        labels = {"model_name": server_args.served_model_name, "dp_rank": str(dp_rank or 0)}
        self._metrics: Metrics | None = None
        if server_args.enable_metrics and tp_rank == 0:
            control = self._drafters.control
            self._metrics = Metrics(labels, None if control is None else control.cost)
        self._tracer = Tracer(labels) if profile.tracing and tp_rank == 0 else None

    # -- what the scheduler calls

    def forward_batch_generation(self, batch: Any) -> GenerationBatchResult:
        """Run one step: a prefill batch as the host would, a decode batch with drafts."""
        if batch.forward_mode.is_decode():
            return self._decode(batch)
        return self._prefill(batch)

    def clear_cache_pool(self) -> None:
        """Do nothing at a cache flush: SGLang flushes only when no request is running."""

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """Leave the draft model as it is when the target gets new weights: it costs speed only."""
        return True, "the draft model keeps its weights"

    update_weights_from_ipc = update_weights_from_disk

    # -- prefill

    def _prefill(self, batch: Any) -> GenerationBatchResult:
        self._step_ended = None
        self._roster.dismiss([req.rid for req in batch.reqs])  # who was retracted begins anew
        if batch.forward_mode.is_idle() or batch.is_prefill_only:
            plain = batch.get_model_worker_batch()
            result: GenerationBatchResult = self.target_worker.forward_batch_generation(plain)
            return result
        self._penalties.renew(batch)
        plain = batch.get_model_worker_batch()
        result = self.target_worker.forward_batch_generation(plain, is_verify=True)
        last = plain.seq_lens - 1
        sampled = sample(self.model_runner, result.logits_output, plain, last)
        result.next_token_ids = self._ranks.of_rank_0(sampled)
        self._prefill_draft(plain)
        return result

    def _prefill_draft(self, plain: Any) -> None:
        """Let the draft model read the prompts too, if it will draft for one of them."""
        model = self._drafters.model
        if model is None:
            return
        wishes = [self._roster.wishes(req) for req in plain.reqs]
        wanted = any(wish.drafter in USES_MODEL and wish.max_drafts for wish in wishes)
        if not wanted or int(plain.seq_lens_cpu.max()) > model.max_length:
            model.skip(plain)
            return
        self._drafters.prefill(plain)

    # -- decode: the four verbs

    def _decode(self, batch: Any) -> GenerationBatchResult:
        clock = StepClock(self._step_ended)
        clock.lap("scheduler")
        requests = self._roster.call(batch.reqs)
        self._penalties.catch_up(batch)
        budget = self._budget(requests, num_penalties(batch.sampling_info.penalizer_orchestrator))
        block = self._allocate(batch, budget)
        clock.lap("host")

        plain = batch.get_model_worker_batch()
        if self._drafters.wants_calibration:
            self._calibrate(batch, plain)
            clock.last = time.perf_counter()
        proposal = self._propose(plain, requests, budget)
        self._charge_draft(clock)
        last_tokens = [request.last_token for request in requests]
        verify = verify_batch(batch, plain, last_tokens, proposal, block)
        clock.lap("host")
        result = self.target_worker.forward_batch_generation(verify, is_verify=True)
        output = result.logits_output
        clock.lap("forward")
        sampled = sample(self.model_runner, output, verify, verify.seq_lens - 1)
        emitted = self._ranks.of_rank_0(sampled)
        verdict = match(emitted, proposal.to(emitted.device))
        outcomes = settle(requests, proposal, verdict, self._keep)
        clock.lap("verify")

        self._commit(batch, block, outcomes)
        self._attach(requests, outcomes, proposal, output)
        drafters = self._finish_step(batch.reqs, outcomes, proposal)
        self._explain(requests, outcomes, proposal, drafters)
        clock.lap("host")
        if self._metrics is not None:
            self._metrics.times(clock.parts, outcomes)
        if self._tracer is not None:
            self._tracer.step(clock, outcomes, proposal, drafters)
        self._step_ended = clock.last if self._roster else None
        accepted = [outcome.num_accepted_drafts for outcome in outcomes]
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=torch.tensor([o.tokens[-1] for o in outcomes], device=batch.device),
            num_accepted_drafts=sum(accepted),
            num_accepted_drafts_per_req_cpu=accepted,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=torch.tensor(accepted),
        )

    def _charge_draft(self, clock: StepClock) -> None:
        """Charge a proposal's time to the draft model's passes and to what is around them."""
        if passes := self._drafters.take_draft_seconds():
            clock.parts["draft_forward"] += passes
        clock.lap("draft", less=passes)

    def _budget(self, requests: Sequence[LiveRequest], penalties: int = 0) -> Budget:
        """Return how many drafts each request may have.

        The last token needs no draft beside it: a request that may emit n more drafts n - 1.

        penalties: kinds of them that the batch has; each takes memory for every row
        """
        most = [
            max(0, min(r.max_drafts, r.req.sampling_params.max_new_tokens - len(r.output) - 1))
            for r in requests
        ]
        limit = min(self._max_rows, max_rows(*self._logits, penalties))
        drafts, cut = share_rows(most, limit)
        if cut:
            self._drafters.fallbacks["rows"] += cut
        return Budget(drafts, "match", self._coins, trees=self._trees)

    def _allocate(self, batch: Any, budget: Budget) -> Block:
        """Give each request a slot for its last token and for each draft it may have."""
        starts, lines = [0], list[int]()
        positions: list[int] = []
        lens = batch.seq_lens_cpu.tolist()
        for r, (drafts, length) in enumerate(zip(budget.max_drafts, lens, strict=True)):
            starts.append(starts[-1] + drafts + 1)
            lines += [r] * (drafts + 1)
            positions += range(length, length + drafts + 1)
        slots = alloc_token_slots(batch.tree_cache, starts[-1])
        pool = batch.req_to_token_pool
        line = batch.req_pool_indices[torch.tensor(lines, device=batch.device)]
        position = torch.tensor(positions, device=batch.device)
        pool.write((line, position), slots.to(torch.int32))
        return Block(slots, tuple(starts))

    def _propose(
        self, plain: Any, requests: Sequence[LiveRequest], budget: Budget
    ) -> Proposal[Law]:
        """Ask the drafters. With tensor parallelism, what rank 0 was told holds for all."""
        return self._drafters.propose(plain, requests, budget)

    def _calibrate(self, batch: Any, plain: Any) -> None:
        """Time passes of several sizes, so that control need not begin by guessing."""
        calibrate(batch, plain, self.target_worker, self._drafters, self._max_rows)

    def _keep(self, request: LiveRequest, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Emit tokens one by one, as plain decoding does, until the host ends the request."""
        req, kept = request.req, 0
        for token in tokens:
            kept += 1
            if not self._emit(req, token):
                break
        if not req.finished():
            return kept, None
        length = isinstance(req.finished_reason, FINISH_LENGTH)
        return kept, FinishReason.LENGTH if length else FinishReason.STOP

    def _emit(self, req: Any, token: int) -> bool:
        """Append a token, in the order of the host's own decode. Say whether more may follow."""
        req.output_ids.append(token)
        think_end = self.model_config.think_end_id
        if req.require_reasoning and think_end is not None:
            req.update_reasoning_tokens(token, think_end)
        req.check_finished()
        if req.grammar is not None:
            try:
                req.grammar.accept_token(token)
            except ValueError as error:
                logger.error("grammar of request %s: %s", req.rid, error)
                req.to_finish = FINISH_ABORT()
                return False
        return not req.finished()

    def _commit(self, batch: Any, block: Block, outcomes: Sequence[Outcome]) -> None:
        """Keep the cache entries of the rows that were kept, and free the others' slots."""
        counts = [len(outcome.tokens) for outcome in outcomes]
        kept, rejected = block.split([outcome.rows for outcome in outcomes])
        self._straighten(batch, kept, outcomes)
        batch.token_to_kv_pool_allocator.free(rejected)
        batch.out_cache_loc = kept
        new = torch.tensor(counts)
        on_device = new.to(batch.device, non_blocking=True)
        batch.seq_lens.add_(on_device.to(batch.seq_lens.dtype))
        batch.orig_seq_lens.add_(on_device.to(batch.orig_seq_lens.dtype))
        batch.seq_lens_cpu.add_(new.to(batch.seq_lens_cpu.dtype))
        batch.seq_lens_sum += sum(counts)
        for req, n, outcome in zip(batch.reqs, counts, outcomes, strict=True):
            req.kv_committed_len += n
            req.kv_allocated_len = req.kv_committed_len
            req.decode_batch_idx += 1
            req.spec_verify_ct += 1
            accepted, proposed = outcome.num_accepted_drafts, outcome.num_drafts
            so_far = req.spec_accepted_drafts
            if not isinstance(so_far, _Accepted):
                so_far = _Accepted(so_far)
            req.spec_accepted_drafts = so_far.plus(accepted, proposed)
            req.update_spec_acceptance_histogram(accepted)

    def _straighten(self, batch: Any, kept: Tensor, outcomes: Sequence[Outcome]) -> None:
        """Put the slots of a tree's path into the table in its order. Nothing is copied."""
        lines, positions, places = list[int](), list[int](), list[int]()
        lens, place = batch.seq_lens_cpu.tolist(), 0
        for r, (length, outcome) in enumerate(zip(lens, outcomes, strict=True)):
            if outcome.rows[-1] >= len(outcome.rows):
                lines += [r] * len(outcome.rows)
                positions += range(length, length + len(outcome.rows))
                places += range(place, place + len(outcome.rows))
            place += len(outcome.rows)
        if lines:
            line = batch.req_pool_indices[torch.tensor(lines, device=batch.device)]
            position = torch.tensor(positions, device=batch.device)
            batch.req_to_token_pool.write((line, position), kept[places].to(torch.int32))

    def _attach(
        self,
        requests: Sequence[LiveRequest],
        outcomes: Sequence[Outcome],
        proposal: Proposal[Law],
        output: Any,
    ) -> None:
        """Give requests the logprobs and hidden states of the rows that were kept."""
        wanted = any(r.req.return_logprob for r in requests)
        logprobs = output.next_token_logprobs.tolist() if wanted else []
        for root, request, outcome in zip(proposal.root_rows, requests, outcomes, strict=True):
            req = request.req
            rows = [root + row for row in outcome.rows]
            if req.return_logprob:
                req.output_token_logprobs_val += [logprobs[row] for row in rows]
                req.output_token_logprobs_idx += outcome.tokens
                for name in _TOP_LOGPROBS if req.top_logprobs_num > 0 else ():
                    _append(req, f"output_{name}", output, f"next_token_{name}", rows)
                for name in _ID_LOGPROBS if req.token_ids_logprob is not None else ():
                    _append(req, f"output_{name}", output, f"next_token_{name}", rows)
            if req.return_hidden_states and output.hidden_states is not None:
                req.hidden_states += output.hidden_states[rows].cpu().tolist()
        output.hidden_states = None  # the host would add one row of them again

    def _finish_step(
        self, reqs: Sequence[Any], outcomes: Sequence[Outcome], proposal: Proposal[Law]
    ) -> list[str]:
        """Tell the drafters and the counters; extend the requests; forget those that ended.

        Returns who drafted for each of them.
        """
        names = [self._drafters.who(outcome.request) for outcome in outcomes]
        self._drafters.router.observe(outcomes)
        for outcome in outcomes:
            outcome.apply()
        self._roster.dismiss([req.rid for req in reqs if req.finished()])
        if self._metrics is not None:
            self._metrics.record(outcomes, proposal, names)
            self._metrics.fallbacks(self._drafters.totals())
        return names

    def _explain(
        self,
        requests: Sequence[LiveRequest],
        outcomes: Sequence[Outcome],
        proposal: Proposal[Law],
        drafters: Sequence[str],
    ) -> None:
        """Note what the step did to each request that asks, and tell it when it ends."""
        if not any(request.explain for request in requests):
            return
        drafts = proposal.drafts()
        for request, outcome, draft, name in zip(requests, outcomes, drafts, drafters, strict=True):
            if request.explain:
                req = request.req  # it keeps the notes: it may be retracted, and come again
                req.outrider_steps = getattr(req, "outrider_steps", [])
                req.outrider_steps.append(step_record(outcome, draft, name))
                if req.finished():
                    req.spec_accepted_drafts.steps = req.outrider_steps


def _append(req: Any, to: str, output: Any, source: str, rows: Sequence[int]) -> None:
    """Append what the sampler attached to these rows, tensors as lists."""
    values = getattr(output, source)
    new = [values[row] for row in rows]
    getattr(req, to).extend(v.tolist() if isinstance(v, Tensor) else v for v in new)


def _max_rows(runner: Any) -> int:
    """Return how many rows the attention backend has room for.

    SGLang's GPU backends make room for as many decode requests as may run at once.
    """
    if runner.server_args.attention_backend in ("outrider", "torch_native"):
        return 1 << 30
    return int(runner.req_to_token_pool.size)


def _graph_sizes(runner: Any) -> tuple[int, ...]:
    """Return the numbers of rows for which the host has captured graphs, if it has."""
    graphs = getattr(runner, "graph_runner", None)
    return tuple(getattr(graphs, "capture_bs", ()))


def _check_model(target_worker: Any) -> None:
    """Stop the server for models whose cache is more than keys and values by position."""
    runner, config = target_worker.model_runner, target_worker.model_config
    kinds = {
        "sliding-window layers with a cache of their own": runner.is_hybrid_swa,
        "state-space layers": runner.mambaish_config is not None,
        "an encoder": config.is_encoder_decoder,
        "multimodal input": config.is_multimodal,
        "n-gram embeddings": runner.use_ngram_embedding,
        "a page size above 1": runner.page_size != 1,
    }
    for what, is_so in kinds.items():
        if is_so:
            raise SystemExit(f"outrider: a model with {what} is not supported")
