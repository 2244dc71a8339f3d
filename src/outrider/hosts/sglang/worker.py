"""The loop, in the shape of SGLang's speculative workers of version 1 (no overlap).

The scheduler hands over its `ScheduleBatch`; the worker extends the requests, ends those that end,
and leaves cache lengths and logprobs as plain decoding would have left them after as many steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.utils.common import freeze_gc
from torch import Tensor

from outrider.core import (
    Bools,
    Budget,
    FinishReason,
    Ints,
    Law,
    Outcome,
    Outcomes,
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
from outrider.hosts.sglang.roster import Columns, LiveRequest, Roster
from outrider.hosts.sglang.row_limits import share_rows
from outrider.hosts.sglang.rows import (
    Block,
    Company,
    Penalties,
    StepRows,
    kind_groups,
    read_slots,
    sample,
    sampling_kind,
    to_device,
    write_slots,
)
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
        self._later: Callable[[], None] | None = None
        labels = {"model_name": server_args.served_model_name, "dp_rank": str(dp_rank or 0)}
        self._metrics: Metrics | None = None
        if server_args.enable_metrics and tp_rank == 0:
            control = self._drafters.control
            self._metrics = Metrics(labels, None if control is None else control.cost)
        self._tracer = Tracer(labels) if profile.tracing and tp_rank == 0 else None
        # a full collection would look at all that was loaded, which takes 100 ms and more
        freeze_gc("Outrider")

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
        return self._run_prefill(batch.get_model_worker_batch())

    def _run_prefill(self, plain: Any) -> GenerationBatchResult:
        """Read prompts, and sample the first token of each."""
        result: GenerationBatchResult
        result = self.target_worker.forward_batch_generation(plain, is_verify=True)
        last = plain.seq_lens - 1
        groups = kind_groups(
            [sampling_kind(req.sampling_params) for req in plain.reqs], last.device
        )
        sampled = sample(self.model_runner, result.logits_output, plain, last, groups)
        result.next_token_ids = self._ranks.of_rank_0(sampled)
        self._prefill_draft(plain)
        self._meanwhile()
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
        self._penalties.catch_up(batch, requests)
        if self._drafters.wants_calibration:
            self._calibrate(batch, batch.get_model_worker_batch())
            clock.last = time.perf_counter()
        clock.lap("host")
        proposal, reserved = self._propose(batch, requests)
        self._charge_draft(clock)
        kinds = self._roster.columns.kinds
        block: Block | None = None
        if reserved is not None or proposal.num_rows > len(requests):
            members, lens = np.arange(len(requests)), batch.seq_lens_cpu.numpy()
            rows = StepRows.of(
                batch,
                batch.get_model_worker_batch(),
                Company(requests, members, lens, kinds),
                proposal,
                write_slots if reserved is None else read_slots,
            )
            block = reserved or Block(rows.forward.out_cache_loc, proposal.root_rows)
        else:
            rows = StepRows.plain(batch, kinds)
        clock.lap("host")

        # between the launch and the read of what it emits, the device works
        forward = rows.forward
        result = self.target_worker.forward_batch_generation(forward, is_verify=True)
        output, at = result.logits_output, forward.seq_lens - 1
        sampled = sample(self.model_runner, output, forward, at, rows.groups)
        self._meanwhile()
        emitted = self._ranks.of_rank_0(sampled).cpu()
        clock.lap("forward")

        outcomes = settle(requests, proposal, match(emitted, proposal), self._keep)
        clock.lap("verify")
        next_tokens = sampled
        if block is not None:
            next_tokens = self._commit(batch, block, outcomes)
        _count_tokens(batch.reqs, outcomes)
        self._attach(requests, outcomes, proposal, output)
        self._finish_step(batch.reqs, outcomes, proposal, clock)
        accepted = outcomes.num_accepted_drafts
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=next_tokens,
            num_accepted_drafts=int(accepted.sum()),
            num_accepted_drafts_per_req_cpu=accepted.tolist(),
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=torch.from_numpy(accepted),
        )

    def _meanwhile(self) -> None:
        """Do what could wait, while the device works: learn, count, trace."""
        later, self._later = self._later, None
        if later is not None:
            later()
        self._drafters.router.meanwhile()

    def _charge_draft(self, clock: StepClock) -> None:
        """Charge a proposal's time to the draft model's passes and to what is around them."""
        if passes := self._drafters.take_draft_seconds():
            clock.parts["draft_forward"] += passes
        clock.lap("draft", less=passes)

    def _budget(
        self, batch: Any, requests: Sequence[LiveRequest], members: Ints | None = None
    ) -> Budget:
        """Return how many drafts each request may have.

        members: their places in the batch; None if all of it is asked for
        """
        penalties = num_penalties(batch.sampling_info.penalizer_orchestrator)
        budget, cut = self._share(self._roster.columns, requests, members, penalties)
        if cut:
            self._drafters.fallbacks["rows"] += cut
        return budget

    def _share(
        self,
        columns: Columns,
        requests: Sequence[LiveRequest],
        members: Ints | None = None,
        penalties: int = 0,
    ) -> tuple[Budget, int]:
        """Return how many drafts each request may have, and how many have fewer for want of rows.

        The last token needs no draft beside it: a request that may emit n more drafts n - 1.

        penalties: kinds of them that the batch has; each takes memory for every row
        """
        some = slice(None) if members is None else members
        emitted = np.array([len(request.output) for request in requests])
        left = columns.max_tokens[some] - emitted - 1
        wanted = np.maximum(np.minimum(columns.max_drafts[some], left), 0)
        limit = min(self._max_rows, max_rows(*self._logits, penalties))
        drafts, cut = share_rows(wanted, limit)
        return Budget(drafts, "match", self._coins, trees=self._trees), cut

    def _propose(
        self, batch: Any, requests: Sequence[LiveRequest]
    ) -> tuple[Proposal[Law], Block | None]:
        """Ask the drafters. With tensor parallelism, what rank 0 was told holds for all.

        Also returns the slots that a draft model fills, if there is one.
        """
        if not self._roster.columns.may_draft:
            return Proposal.empty(len(requests)), None
        budget = self._budget(batch, requests)
        if self._drafters.model is None:
            return self._drafters.propose(None, requests, budget), None
        reserved = Block.reserve(batch, budget.max_drafts)
        plain = batch.get_model_worker_batch()
        return self._drafters.propose(plain, requests, budget), reserved

    def _calibrate(self, batch: Any, plain: Any) -> None:
        """Time passes of several sizes, so that control need not begin by guessing."""
        calibrate(batch, plain, self.target_worker, self._drafters, self._max_rows)

    def _keep(
        self, requests: Sequence[LiveRequest], tokens: Ints, counts: Ints
    ) -> tuple[Ints, Sequence[FinishReason | None]]:
        """Emit the tokens as plain decoding does, until the host ends a request.

        Nearly always nothing ends: then they are appended, all at once. The host is asked, token by
        token, where something may.
        """
        kept, ids, members = counts.copy(), tokens.tolist(), np.arange(len(requests))
        may_end = self._may_end(self._roster.columns, members, requests, ids, counts).tolist()
        reasons: list[FinishReason | None] = [None] * len(requests)
        start = 0
        for r, end in enumerate(counts.cumsum().tolist()):
            req, mine = requests[r].req, ids[start:end]
            start = end
            if may_end[r] or req.to_finish is not None:
                kept[r], reasons[r] = self._emit_all(req, mine)
            else:
                req.output_ids += mine
        return kept, reasons

    def _may_end(
        self,
        columns: Columns,
        members: Ints,
        requests: Sequence[LiveRequest],
        ids: Sequence[int],
        counts: Ints,
    ) -> Bools:
        """Say for which requests the host must be asked whether these tokens end them.

        members: the requests' places in the batch
        """
        odd = min(ids) < 0 or max(ids) >= self.model_config.vocab_size
        if odd or not columns.stop_ids.isdisjoint(ids):
            return np.ones(len(requests), np.bool_)
        lengths = np.array([len(request.output) for request in requests]) + counts
        found: Bools = columns.careful[members] | (lengths >= columns.max_tokens[members])
        return found

    def _emit_all(self, req: Any, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Emit tokens one by one until the host ends the request. Say how many, and why."""
        kept = 0
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

    def _commit(self, batch: Any, block: Block, outcomes: Outcomes) -> Any:
        """Keep the cache entries of the rows that were kept, and free the others' slots.

        Returns each request's last token. All that the device is told goes in one copy.
        """
        counts, last = outcomes.num_tokens, outcomes.tokens[outcomes.starts[1:] - 1]
        kept, rejected = block.split(outcomes)
        told = to_device(np.concatenate([counts, last, kept, rejected]), batch.device)
        sizes = [len(part) for part in (counts, last, kept, rejected)]
        new, last_tokens, kept_index, rejected_index = torch.split(told, sizes)
        kept_slots = block.slots[kept_index]
        self._straighten(batch, kept_slots, outcomes)
        if len(rejected):
            batch.token_to_kv_pool_allocator.free(block.slots[rejected_index])
        batch.out_cache_loc = kept_slots
        batch.seq_lens.add_(new.to(batch.seq_lens.dtype))
        batch.orig_seq_lens.add_(new.to(batch.orig_seq_lens.dtype))
        batch.seq_lens_cpu.add_(torch.from_numpy(counts).to(batch.seq_lens_cpu.dtype))
        batch.seq_lens_sum += len(outcomes.tokens)
        return last_tokens

    def _straighten(self, batch: Any, kept: Tensor, outcomes: Outcomes) -> None:
        """Put the slots of a tree's path into the table in its order. Nothing is copied."""
        places = np.arange(len(outcomes.tokens)) - outcomes.starts[outcomes.owners]
        moved = outcomes.rows != places
        if not moved.any():
            return
        positions = batch.seq_lens_cpu.numpy()[outcomes.owners] + places
        told = np.stack([outcomes.owners[moved], positions[moved], np.flatnonzero(moved)])
        owner, position, place = to_device(told, batch.device)
        table = batch.req_to_token_pool
        table.write((batch.req_pool_indices[owner], position), kept[place].to(torch.int32))

    def _attach(
        self,
        requests: Sequence[LiveRequest],
        outcomes: Outcomes,
        proposal: Proposal[Law],
        output: Any,
    ) -> None:
        """Give requests the logprobs and hidden states of the rows that were kept."""
        if self._roster.columns.wants_output:
            wanted = any(r.req.return_logprob for r in requests)
            logprobs = output.next_token_logprobs.tolist() if wanted else []
            roots = proposal.root_rows.tolist()
            for root, request, outcome in zip(roots, requests, outcomes, strict=True):
                rows = [root + row for row in outcome.rows]
                _attach_rows(request.req, outcome, output, rows, logprobs)
        output.hidden_states = None  # the host would add one row of them again

    def _finish_step(
        self, reqs: Sequence[Any], outcomes: Outcomes, proposal: Proposal[Law], clock: StepClock
    ) -> None:
        """Tell the drafters; extend the requests; forget those that ended. Count it later."""
        drafters: list[str] = []
        if self._metrics is not None or self._tracer is not None or self._roster.columns.explain:
            drafters = self._drafters.who(outcomes.requests, proposal)
        if self._roster.columns.may_draft:
            self._drafters.router.observe(outcomes)
        outcomes.apply()
        self._explain(outcomes, proposal, drafters)
        ended = [req.rid for req in reqs if req.finished_reason is not None]
        self._roster.dismiss(ended)
        clock.lap("host")
        self._step_ended = clock.last if self._roster else None
        self._later = partial(self._count, clock, outcomes, proposal, drafters)
        if not self._roster:
            self._meanwhile()  # there may be no next step

    def _count(
        self, clock: StepClock, outcomes: Outcomes, proposal: Proposal[Law], drafters: list[str]
    ) -> None:
        """Tell the counters and the traces of a step that is over."""
        if self._metrics is not None:
            self._metrics.record(outcomes, proposal, drafters)
            self._metrics.fallbacks(self._drafters.totals())
            self._metrics.times(clock.parts, outcomes)
        if self._tracer is not None:
            self._tracer.step(clock, outcomes, proposal, drafters)

    def _explain(
        self, outcomes: Outcomes, proposal: Proposal[Law], drafters: Sequence[str]
    ) -> None:
        """Note what the step did to each request that asks, and tell it when it ends."""
        if not self._roster.columns.explain:
            return
        drafts = proposal.drafts()
        for outcome, draft, name in zip(outcomes, drafts, drafters, strict=True):
            request: Any = outcome.request
            if request.explain:
                req = request.req  # it keeps the notes: it may be retracted, and come again
                req.outrider_steps = getattr(req, "outrider_steps", [])
                req.outrider_steps.append(step_record(outcome, draft, name))
                if outcome.finish_reason is not None or req.finished():
                    counted = req.spec_accepted_drafts
                    if not isinstance(counted, _Accepted):
                        counted = req.spec_accepted_drafts = _Accepted(counted)
                    counted.steps = req.outrider_steps


def _count_tokens(reqs: Sequence[Any], outcomes: Outcomes) -> None:
    """Tell the host's requests how much of them is cached now, and what was accepted."""
    numbers = zip(
        reqs,
        outcomes.num_tokens.tolist(),
        outcomes.num_drafts.tolist(),
        outcomes.num_accepted_drafts.tolist(),
        strict=True,
    )
    for req, tokens, drafts, accepted in numbers:
        req.kv_committed_len += tokens
        req.kv_allocated_len = req.kv_committed_len
        req.decode_batch_idx += 1
        count_accepted(req, drafts, accepted)


def count_accepted(req: Any, drafts: int, accepted: int) -> None:
    """Tell a request of the host's that it had a step, with so many drafts."""
    req.spec_verify_ct += 1
    req.update_spec_acceptance_histogram(accepted)
    if drafts:
        so_far = req.spec_accepted_drafts
        if not isinstance(so_far, _Accepted):
            so_far = _Accepted(so_far)
        req.spec_accepted_drafts = so_far.plus(accepted, drafts)


def _attach_rows(
    req: Any, outcome: Outcome, output: Any, rows: list[int], logprobs: Sequence[float]
) -> None:
    """Give a request the logprobs and hidden states of these rows.

    logprobs: of every row's token
    """
    if req.return_logprob:
        req.output_token_logprobs_val += [logprobs[row] for row in rows]
        req.output_token_logprobs_idx += outcome.tokens
        for name in _TOP_LOGPROBS if req.top_logprobs_num > 0 else ():
            _append(req, f"output_{name}", output, f"next_token_{name}", rows)
        for name in _ID_LOGPROBS if req.token_ids_logprob is not None else ():
            _append(req, f"output_{name}", output, f"next_token_{name}", rows)
    if req.return_hidden_states and output.hidden_states is not None:
        req.hidden_states += output.hidden_states[rows].cpu().tolist()


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
