"""SGLang as the served step sees it: lays rows out, launches passes, keeps requests in step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.utils import GenerationBatchResult
from torch import Tensor

from outrider.control.decision import CpuDrafts, Decision
from outrider.core import FinishReason, Ints, Proposal
from outrider.engines.sglang.batches import (
    Groups,
    SglangBatch,
    device_rows,
    kind_groups,
    last_token_rows,
    proposal_rows,
)
from outrider.engines.sglang.carried import Carried
from outrider.engines.sglang.copies import changed
from outrider.engines.sglang.drafts.slot_heads import SlotHead
from outrider.engines.sglang.finish import order_slots, would_keep
from outrider.engines.sglang.sampling.penalties import Penalties
from outrider.engines.sglang.sampling.processors import keep_params
from outrider.engines.sglang.sampling.sampler import sample, sampling_kind
from outrider.engines.sglang.slots import Slots
from outrider.engines.sglang.verify_pass import VerifyPass
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.device import DeviceRows
from outrider.serving.device_drafters import DeviceDrafters
from outrider.serving.ranks import Ranks
from outrider.serving.values import (
    Batch,
    Knows,
    Launched,
    Members,
    ServedRequest,
    Settled,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a step.

    forward: SGLang's decode batch over them
    groups: rows that are sampled together
    following: what the batch carries from this step to the next
    drafts: of the device, if it makes them
    launch: how the pass is launched, if not as a decode batch
    """

    forward: Any
    groups: Groups
    following: Carried
    drafts: DeviceRows | None = None
    launch: Callable[[], GenerationBatchResult] | None = None


class SglangEngine:
    """Runs the target of an SGLang server.

    target_worker: SGLang's own, of the target
    heads: what is given the target's states
    wants_states: whether a rank of this server has heads
    """

    def __init__(
        self,
        version: SglangVersion,
        target_worker: Any,
        ranks: Ranks,
        device: DeviceDrafters,
        heads: Sequence[SlotHead] = (),
        wants_states: bool = False,
    ) -> None:
        self._version, self._target_worker, self._ranks = version, target_worker, ranks
        self._device, self._heads, self._wants_states = device, heads, wants_states
        self._runner = target_worker.model_runner
        self._vocab_size = target_worker.model_config.vocab_size
        self._penalties = Penalties()
        self._streams = torch.get_device_module(self._runner.device)
        self._slots: Slots | None = None
        self._verify: VerifyPass | None = None
        self._is_padding_chosen, self._main = False, None

    def use(self, slots: Slots, verify: VerifyPass | None, is_padding_chosen: bool) -> None:
        """Give batches their slots by these, and verify drafts by this padded pass, if any.

        is_padding_chosen: whether it verifies all drafts, whatever control wants
        """
        self._slots, self._verify, self._is_padding_chosen = slots, verify, is_padding_chosen

    def use_stream(self, main: Any) -> None:
        """Order slots on this stream, which is the scheduler's own."""
        self._main = main

    def padded_width(self) -> int:
        """Return the rows of each request in a padded pass; 0 if there is no such pass."""
        return 0 if self._verify is None else self._verify.width

    # -- what the served step calls

    def prepare(self, batch: Batch, requests: Sequence[ServedRequest]) -> Batch:
        """Return the batch with lengths that the CPU knows, and penalties that are up to date."""
        own: SglangBatch = batch.own
        lens = np.array([request.length for request in requests], np.int64) - 1
        is_same = batch.knows is not Knows.BOTH or bool((batch.longest == lens).all())
        assert is_same, "CPU and device differ in lengths"
        self._penalties.catch_up(own.batch, requests)
        known = torch.from_numpy(lens).to(own.worker_batch.seq_lens_cpu.dtype)
        plain = changed(own.worker_batch, seq_lens_cpu=known, seq_lens_sum=int(lens.sum()))
        return replace(batch, longest=lens, own=replace(own, worker_batch=plain))

    def choose_pass(self, batch: Batch, members: Members, decision: CpuDrafts) -> CpuDrafts:
        """Return the decision with what verifies its drafts, the same on all ranks."""
        padded = self._pads(batch, members, decision)
        return decision if padded == decision.padded else replace(decision, padded=padded)

    def _pads(self, batch: Batch, members: Members, decision: CpuDrafts) -> bool:
        verify = self._verify
        # padding needs slots too
        if verify is None or batch.room is not None or members.columns.wants_output:
            return False
        if not verify.can_run(members, decision.proposal):
            return False
        if self._is_padding_chosen:
            return True
        if not self._ranks.any(decision.padded):
            return False
        return verify.is_checked or self._check(verify, batch.own, members)

    def _check(self, verify: VerifyPass, own: SglangBatch, members: Members) -> bool:
        """Check SGLang's own verify pass before it is first used. If it fails, it never will be."""
        fault = "its logits are not those of decode rows"
        try:
            agrees = verify.agrees(own, members)
        except Exception as error:
            agrees, fault = False, repr(error)
        if not self._ranks.any(not agrees):
            return True
        logger.warning("TARGET_VERIFY is not used, drafts are verified by rows: %s", fault)
        self._verify = None
        return False

    def lay_out(
        self, batch: Batch, members: Members, decision: Decision, drafts: DeviceRows | None
    ) -> Rows:
        """Return the rows of a step."""
        assert self._slots is not None
        own: SglangBatch = batch.own
        plain = own.worker_batch
        if drafts is not None:
            forward, groups = device_rows(own, members, drafts)
            counts = drafts.layout.shape.num_drafts
            longest = torch.from_numpy(members.lens + counts + 1).to(plain.seq_lens_cpu.dtype)
            # their lengths are known when the step is: see `run`
            following = Carried(self._slots, drafts.lens, longest, Knows.DEVICE)
            return Rows(forward, groups, following, drafts)
        proposal: Proposal = Proposal.empty(len(members.requests))
        if isinstance(decision, CpuDrafts):
            proposal = decision.proposal
        is_plain = members.is_whole and not len(proposal.parents)
        if is_plain and batch.knows is Knows.BOTH and not members.columns.needs_text:
            forward, groups = last_token_rows(own, self._device.last_tokens, members.columns.kinds)
        else:
            forward, groups = proposal_rows(own, members, proposal)
        lens, knows = (forward, Knows.BOTH) if is_plain else (plain, Knows.CPU)
        done = self._record()
        following = Carried(self._slots, lens.seq_lens, lens.seq_lens_cpu, knows, done)
        launch = None
        if isinstance(decision, CpuDrafts) and decision.padded and self._verify is not None:
            launch = partial(self._verify.run, own, members, proposal)
        return Rows(forward, groups, following, launch=launch)

    def run(self, rows: Rows) -> GenerationBatchResult:
        """Launch the pass of a step, and the sampling of its rows."""
        forward, following = rows.forward, rows.following
        grammars = forward.sampling_info.grammars
        result = self.run_target(forward) if rows.launch is None else rows.launch()
        forward.sampling_info.grammars = grammars  # SGLang may have put each request's own there
        output = result.logits_output
        emitted = self._sample(output, forward, rows.groups)
        keep_params(forward.sampling_info)
        if following.knows is Knows.BOTH:
            self._device.append(forward.req_pool_indices, forward.seq_lens, emitted)
        if rows.drafts is not None:
            lens, emitted = self._device.advance(rows.drafts, emitted)
            following.note_accepted(lens, self._record())
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=emitted,
            can_run_cuda_graph=result.can_run_cuda_graph,
            next_draft_input=following,
        )

    def emitted(self, ticket: Any) -> Tensor:
        """Wait for a step. Return what it emitted after each row, on the CPU."""
        ticket.copy_done.synchronize()
        tokens: Tensor = ticket.next_token_ids.cpu()
        return tokens

    def first_tokens(self, ticket: Any) -> Sequence[int]:
        """Wait for a prefill. Return the token that it emitted for each request."""
        ticket.copy_done.synchronize()
        tokens: list[int] = ticket.next_token_ids.tolist()
        return tokens

    def keep(
        self,
        launched: Launched,
        running: Ints,
        requests: Sequence[ServedRequest],
        tokens: Ints,
        counts: Ints,
    ) -> tuple[Ints, Sequence[FinishReason | None]]:
        """Return how many tokens SGLang will append, and why it will end a request there.

        Where something may end one, a copy of it is asked, token by token.
        """
        kept, ids, ends = counts.copy(), tokens.tolist(), counts.cumsum().tolist()
        reasons: list[FinishReason | None] = [None] * len(requests)
        places = launched.members.places[running]
        may_end = launched.columns.may_end(places, requests, ids, counts)
        if min(ids) < 0 or max(ids) >= self._vocab_size:  # SGLang ends the request
            may_end[:] = True
        for r in np.flatnonzero(may_end).tolist():
            own = ids[ends[r] - counts[r] : ends[r]]
            kept[r], reasons[r] = would_keep(self._version, requests[r].req, own)
        return kept, reasons

    def place(self, settled: Settled) -> None:
        """Put the slots of a tree's path into the order of its tokens."""
        if not settled.proposal.is_chain:
            order_slots(settled, self._version, self._runner, self._main)

    # -- passes

    def run_target(self, batch: Any, is_verify: bool = True) -> GenerationBatchResult:
        """Run the target over a batch as its workers take it, and give the heads its states.

        is_verify: whether the sampling is left to us
        """
        found: GenerationBatchResult = self._version.run_target(
            self._target_worker, batch, is_verify=is_verify, states=self._wants_states
        )
        if self._wants_states and found.logits_output is not None:
            for head in self._heads:
                head.tell(batch, found.logits_output.hidden_states)
            found.logits_output.hidden_states = None  # nothing else reads these
        return found

    def run_prefill(self, own: SglangBatch) -> Any:
        """Read prompts, and sample the first token of each.

        If no request of the batch may emit a token, SGLang appends token 0, and a step that is
        launched before the scheduler has seen their end takes it for their last.
        """
        plain = own.worker_batch
        self._penalties.renew(own.batch)
        if own.batch.sampling_info.penalizer_orchestrator.is_required:
            plain = changed(plain, sampling_info=own.batch.sampling_info.copy_for_forward())
        result = self.run_target(plain, is_verify=not plain.is_prefill_only)
        if not plain.is_prefill_only:
            kinds = [sampling_kind(req.sampling_params) for req in plain.reqs]
            groups = kind_groups(kinds, plain.seq_lens.device)
            result.next_token_ids = self._sample(result.logits_output, plain, groups)
        return result

    def _sample(self, output: Any, forward: Any, groups: Groups) -> Tensor:
        """Return what SGLang emits at each row of a pass, the same on all ranks."""
        at = forward.seq_lens - 1
        return self._ranks.of_rank_0(
            sample(self._version, self._runner, output, forward, at, groups)
        )

    def _record(self) -> Any:
        """Return an event at this point of the stream."""
        event = self._streams.Event()
        event.record()
        return event
