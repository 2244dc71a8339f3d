"""The loop under SGLang's overlap scheduler (spec v2): a step is launched before the last is known.

SGLang launches step t + 1, then takes in what step t emitted, then schedules step t + 2, all while
the device works. So the worker changes no request: it reads what a step emitted once, where that is
needed first, decides (`settle`), and tells the scheduler when it asks (`resolve`). Who needs it
first?

* A step that looks for drafts: it reads before its launch, and the device waits for what lies
  between: decide, look, lay the rows out. Everything else is off its path.
* A step without drafts after a step without drafts needs nothing: the device has each request's
  last token, and the host knows the lengths. It is launched as bare SGLang launches its own. The
  scheduler reads later, and what was emitted is learnt then.

Slots are reserved ahead, two steps' worth for each request, as SGLang does for its own algorithms;
rejected ones stay where they are, and the next step writes over them.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.managers.utils import GenerationBatchResult, get_alloc_len_per_decode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from outrider.core import FinishReason, Ints, Law, Outcomes, Proposal, match, settle
from outrider.hosts.sglang.roster import Columns, LiveRequest
from outrider.hosts.sglang.rows import (
    Company,
    StepRows,
    kind_groups,
    read_slots,
    sample,
    to_device,
    write_slots,
)
from outrider.hosts.sglang.tracing import StepClock
from outrider.hosts.sglang.worker import OutriderWorker, count_accepted


@dataclass(eq=False)
class Flight:
    """A decode step that was launched.

    requests: those that have rows in it
    members: [R] their places in the batch
    columns: of the whole batch
    proposal: their drafts
    rows: [N] which of the result's rows are theirs; None for all
    result: what SGLang was told
    clock: of this step
    outcomes: what it did, once that is known
    drafters: who drafted for each request, if somebody asks
    """

    requests: Sequence[LiveRequest]
    members: Ints
    columns: Columns
    proposal: Proposal[Law]
    clock: StepClock
    rows: Ints | None = None
    result: Any = None
    outcomes: Outcomes | None = None
    drafters: Sequence[str] = ()

    def drop_ended(self) -> None:
        """Take out who ended before this step: what it emits for them is seen by nobody."""
        alive = [r for r, q in enumerate(self.requests) if q.finish_reason is None]
        if len(alive) == len(self.requests):
            return
        assert self.proposal.num_rows == len(self.requests), "who has ended is given no drafts"
        self.rows = np.array(alive, np.int64) if self.rows is None else self.rows[alive]
        self.requests = [self.requests[r] for r in alive]
        self.members, self.proposal = self.members[alive], Proposal.empty(len(alive))

    def emitted(self) -> Tensor:
        """Return what the target emits after each row. Waits for the step."""
        self.result.copy_done.synchronize()
        tokens: Tensor = self.result.next_token_ids.cpu()
        return tokens if self.rows is None else tokens[torch.from_numpy(self.rows)]

    def kept_rows(self) -> Ints:
        """Return which of the result's rows were kept, [T] in the order of the outcomes' tokens."""
        assert self.outcomes is not None
        rows = self.proposal.root_rows[self.outcomes.owners] + self.outcomes.rows
        return rows if self.rows is None else self.rows[rows]


@dataclass(eq=False)
class Reading:
    """A prefill that was launched. lengths: of its requests, before the token that it emits"""

    reqs: Sequence[Any]
    lengths: Sequence[int]
    result: Any


class NextDraft(SpecInput):
    """What a batch of SGLang's carries from one step to the next.

    new_seq_lens: [B] what is cached after the step, if it had no drafts
    is_current: whether the device knows each request's length and last token: after a step with
        drafts only the host will
    verify_done: when `new_seq_lens` can be read
    flight: the step
    future_indices: set by the scheduler; the values are in a buffer of the worker's
    main: the scheduler's own stream
    """

    future_indices: Any = None
    main: Any = None

    def __init__(
        self, new_seq_lens: Tensor, is_current: bool, verify_done: Any, flight: Flight | None
    ) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.new_seq_lens, self.is_current = new_seq_lens, is_current
        self.verify_done, self.flight = verify_done, flight

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        """Return what a batch's number of tokens is multiplied by: nothing."""
        return 1, 1

    def filter_batch(self, new_indices: Tensor, has_been_filtered: bool = True) -> None:
        """Do nothing: there is nothing for single requests here."""

    def merge_batch(self, other: NextDraft) -> None:
        """Take in the requests of another batch."""
        self.is_current = self.is_current and other.is_current
        self.verify_done = self.verify_done or other.verify_done

    def prepare_for_decode(self, batch: Any) -> None:
        """Reserve slots ahead: for the step in flight and for this one, as many as there may be.

        Their places in the table are known, so a step only looks them up.
        """
        self.main = torch.get_device_module(batch.device).current_stream()
        reqs, pool = batch.reqs, batch.req_to_token_pool
        have = np.array([req.kv_allocated_len for req in reqs])
        ahead = np.array([req.kv_committed_len for req in reqs]) + 2 * get_alloc_len_per_decode()
        # near the end of the context a line has no room for more, and no step needs it
        new = np.maximum(np.minimum(ahead, pool.req_to_token.shape[1]) - have, 0)
        for req, count in zip(reqs, new.tolist(), strict=True):
            req.kv_allocated_len += count
            req.kv_committed_len += 1  # as in plain decoding; `resolve` knows
            req.decode_batch_idx += 1
        if new.any():
            owners = np.repeat(np.arange(len(reqs)), new)
            places = np.arange(len(owners)) - (new.cumsum() - new)[owners]
            told = np.stack([owners, have[owners] + places])
            write_slots(batch, *to_device(told, batch.device))
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())


class OverlapWorker(OutriderWorker):
    """What SGLang's overlap scheduler calls instead of the target's worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.speculative_num_draft_tokens = self.server_args.speculative_num_draft_tokens
        # the scheduler looks for a draft model's cache here
        self.draft_worker = SimpleNamespace(draft_runner=self.model_runner)
        runner = self.model_runner
        lines = len(runner.req_to_token_pool.req_to_token)
        # each line's last token, written and read by the forward stream only
        self._last_tokens = torch.zeros(lines, dtype=torch.int64, device=runner.device)
        self._device = torch.get_device_module(runner.device)
        self._main: Any = None  # the scheduler's own stream
        self._flights: deque[Flight | Reading] = deque()
        # of requests that were just read: how long they were, and their first token
        self._first: dict[str, tuple[int, int, Any]] = {}
        # when the last step was read, and whether the next one waits for that
        self._landed = self._read_at = 0.0

    # -- what the scheduler calls

    def forward_batch_generation(self, plain: Any) -> GenerationBatchResult:
        """Launch one step."""
        if plain.forward_mode.is_decode():
            return self._launch(plain)
        return self._read_prompts(plain)

    def resolve(self, result: Any, batch: Any) -> list[list[int]]:
        """Return what a step emitted for each request of its batch; the scheduler appends it.

        batch: as it was launched
        """
        flight: Flight = result.next_draft_input.flight
        self._main = self._device.current_stream()
        while flight.outcomes is None:
            self._settle_next()
            self._meanwhile()
        outcomes = flight.outcomes
        told: list[list[int]] = [[] for _ in batch.reqs]
        accepted = [0] * len(batch.reqs)
        tokens, starts = outcomes.tokens.tolist(), outcomes.starts.tolist()
        counts = outcomes.num_accepted_drafts.tolist()
        for r, member in enumerate(flight.members.tolist()):
            told[member], accepted[member] = tokens[starts[r] : starts[r + 1]], counts[r]
        result.num_accepted_drafts = sum(accepted)
        result.num_accepted_drafts_per_req_cpu = accepted
        self._tell(flight, batch)
        if not self._flights:
            self._roster.dismiss(self._roster.ended())
        self._look_late()
        return told

    # -- prefill

    def _read_prompts(self, plain: Any) -> GenerationBatchResult:
        batch, self._step_ended = plain.outrider_batch, None
        self._roster.dismiss([req.rid for req in plain.reqs])  # who was retracted begins anew
        while self._flights and isinstance(first := self._flights[0], Reading):
            if not all(req.finished() for req in first.reqs):
                break
            self._flights.popleft()  # ended by its first token: no step will ask for it
        if plain.forward_mode.is_idle() or plain.is_prefill_only:
            result = self.target_worker.forward_batch_generation(plain)
        else:
            self._penalties.renew(batch)
            if batch.sampling_info.penalizer_orchestrator.is_required:
                info = batch.sampling_info.copy_for_forward()
                plain = dataclasses.replace(plain, sampling_info=info)
            result = self._run_prefill(plain)
            self._last_tokens[plain.req_pool_indices] = result.next_token_ids
            lengths = [len(req.origin_input_ids) + len(req.output_ids) for req in plain.reqs]
            self._flights.append(Reading(plain.reqs[:], lengths, result))
        result.next_draft_input = NextDraft(plain.seq_lens, True, None, None)
        return result

    # -- decode: the same four verbs, but what is settled is the step before

    def _launch(self, plain: Any) -> GenerationBatchResult:
        batch, draft = plain.outrider_batch, plain.spec_info
        if self._needs_nothing(batch, draft):
            return self._launch_plain(plain, StepClock(None))
        self._read_at, self._main = 0.0, draft.main
        while self._flights:
            self._settle_next()
            self._read_at = self._landed
        clock = StepClock(self._step_ended)
        company, requests = self._gather(batch, draft)
        plain.seq_lens_cpu, plain.seq_lens_sum = batch.seq_lens_cpu, int(company.lens.sum())
        self._penalties.catch_up(batch, requests)
        if self._drafters.wants_calibration:
            self._calibrate(batch, plain)
            clock.last = time.perf_counter()
            self._read_at = 0.0
        clock.lap("host")
        columns = self._roster.columns
        proposal: Proposal[Law] = Proposal.empty(len(company.requests))
        if columns.may_draft and company.requests[0].finish_reason is None:
            budget = self._budget(batch, company.requests, company.members)
            proposal = self._drafters.propose(plain, company.requests, budget)
        self._charge_draft(clock)
        is_whole = len(company.requests) == len(requests)
        is_plain = is_whole and proposal.num_rows == len(requests)
        if is_plain and draft.is_current and not columns.needs_text:
            return self._launch_plain(plain, clock)
        rows = StepRows.of(batch, plain, company, proposal, read_slots)
        flight = Flight(company.requests, company.members, columns, proposal, clock)
        if is_plain:
            batch.seq_lens_cpu = rows.forward.seq_lens_cpu
        lens = rows.forward.seq_lens if is_plain else plain.seq_lens
        return self._run(flight, rows, NextDraft(lens, is_plain, self._record(), flight))

    def _gather(self, batch: Any, draft: NextDraft) -> tuple[Company, Sequence[LiveRequest]]:
        """Return who has rows in the next step, and all requests of the batch.

        Nothing is in flight. Who has ended has no row: the scheduler does not know it yet. (If
        everyone has, all have one, and nobody sees what becomes of it.)
        """
        requests = self._roster.call(batch.reqs, self._first)
        for request in requests if self._first else ():
            length, token, _ = self._first.pop(request.req.rid, (-1, -1, None))
            if request.length == length:
                request.output.append(token)
        lens = np.array([request.length for request in requests]) - 1
        known = batch.seq_lens_cpu.numpy()
        assert not draft.is_current or (known == lens).all(), "host and device differ in lengths"
        batch.seq_lens_cpu = torch.from_numpy(lens).to(batch.seq_lens_cpu.dtype)
        members, kinds = np.arange(len(requests)), self._roster.columns.kinds
        alive = [r for r, request in enumerate(requests) if request.finish_reason is None]
        if not alive or len(alive) == len(requests):
            return Company(requests, members, lens, kinds), requests
        some = [requests[r] for r in alive]
        return Company(some, members[alive], lens[alive], [kinds[r] for r in alive]), requests

    def _needs_nothing(self, batch: Any, draft: NextDraft) -> bool:
        """Say whether a step can be launched without knowing what the last one emitted."""
        if not draft.is_current or self._drafters.wants_calibration:
            return False
        if self._roster.newcomers(batch.reqs):
            return False
        self._roster.call(batch.reqs)
        columns = self._roster.columns
        if columns.needs_text or columns.explain:
            return False
        return not columns.may_draft or (columns.adaptive and self._is_asleep())

    def _launch_plain(self, plain: Any, clock: StepClock) -> GenerationBatchResult:
        """Launch one token for each request: the device has all that it takes."""
        batch, requests = plain.outrider_batch, self._roster.call(plain.reqs)
        lens = plain.seq_lens
        new, new_cpu = lens + 1, plain.seq_lens_cpu + 1
        table = batch.req_to_token_pool.req_to_token
        forward = dataclasses.replace(
            plain,
            input_ids=self._last_tokens[plain.req_pool_indices],
            seq_lens=new,
            seq_lens_cpu=new_cpu,
            seq_lens_sum=plain.seq_lens_sum + len(plain.reqs),
            orig_seq_lens=new.to(plain.orig_seq_lens.dtype),
            out_cache_loc=table[plain.req_pool_indices, lens].to(torch.int64),
            spec_info=None,
        )
        batch.seq_lens_cpu = new_cpu
        done, columns = self._record(), self._roster.columns
        rows = StepRows(forward, kind_groups(columns.kinds, batch.device))
        nothing: Proposal[Law] = Proposal.empty(len(requests))
        flight = Flight(requests, np.arange(len(requests)), columns, nothing, clock)
        return self._run(flight, rows, NextDraft(new, True, done, flight))

    def _run(self, flight: Flight, rows: StepRows, draft: NextDraft) -> GenerationBatchResult:
        """Launch a step's pass. What could wait is done while the device works."""
        forward, control = rows.forward, self._drafters.control
        flight.clock.lap("host")
        if control is not None and self._read_at:
            # it looked for drafts: the device waited from the read to this launch
            control.waited(
                time.perf_counter() - self._read_at - flight.clock.parts["draft_forward"]
            )
            self._read_at = 0.0
        result = self.target_worker.forward_batch_generation(forward, is_verify=True)
        output, at = result.logits_output, forward.seq_lens - 1
        sampled = sample(self.model_runner, output, forward, at, rows.groups)
        emitted = self._ranks.of_rank_0(sampled)
        if draft.is_current:
            self._last_tokens[forward.req_pool_indices] = emitted
        flight.result = GenerationBatchResult(
            logits_output=output,
            next_token_ids=emitted,
            can_run_cuda_graph=result.can_run_cuda_graph,
            next_draft_input=draft,
        )
        self._flights.append(flight)
        self._meanwhile()
        return flight.result

    def _record(self) -> Any:
        """Return an event at this point of the stream."""
        event = self._device.Event()
        event.record()
        return event

    # -- what a step has emitted

    def _settle_next(self) -> None:
        """Read what the oldest step in flight emitted, decide, and tell the drafters."""
        flight = self._flights.popleft()
        if isinstance(flight, Reading):
            flight.result.copy_done.synchronize()
            self._landed = time.perf_counter()
            tokens = flight.result.next_token_ids.tolist()
            self._first = {rid: f for rid, f in self._first.items() if not f[2].finished()}
            for req, length, token in zip(flight.reqs, flight.lengths, tokens, strict=True):
                self._first[req.rid] = length, token, req
            return
        flight.drop_ended()
        if not flight.requests:
            flight.outcomes = Outcomes.of(())
            return
        clock = flight.clock
        if self._step_ended is not None:
            clock.begin(self._step_ended)
        clock.lap("scheduler")
        emitted = flight.emitted()
        clock.lap("forward")
        self._landed = clock.last
        requests, proposal = flight.requests, flight.proposal
        for request in requests:
            if len(request.output) < len(request.req.output_ids):  # its first token
                request.output = list(request.req.output_ids)
        keep = partial(self._kept, flight)
        flight.outcomes = outcomes = settle(requests, proposal, match(emitted, proposal), keep)
        clock.lap("verify")
        self._order_slots(flight)
        if self._metrics is not None or self._tracer is not None or flight.columns.explain:
            flight.drafters = self._drafters.who(requests, proposal)
        if flight.columns.may_draft:
            self._drafters.router.observe(outcomes)
        outcomes.apply()
        clock.lap("host")
        self._step_ended = clock.last
        if self._later is not None:
            self._later()
        self._later = partial(self._count, clock, outcomes, proposal, list(flight.drafters))

    def _kept(
        self, flight: Flight, requests: Sequence[LiveRequest], tokens: Ints, counts: Ints
    ) -> tuple[Ints, Sequence[FinishReason | None]]:
        """Return how many tokens the host will append, and why it will end a request there.

        Where something may end one, a copy of it is asked, token by token.
        """
        kept, ids, ends = counts.copy(), tokens.tolist(), counts.cumsum().tolist()
        reasons: list[FinishReason | None] = [None] * len(requests)
        may_end = self._may_end(flight.columns, flight.members, requests, ids, counts)
        for r in np.flatnonzero(may_end).tolist():
            mine = ids[ends[r] - counts[r] : ends[r]]
            kept[r], reasons[r] = _would_keep(requests[r].req, mine)
        return kept, reasons

    def _order_slots(self, flight: Flight) -> None:
        """Put a tree's path into the order of its tokens: in the table, nothing is copied.

        What is not on the path goes behind it. Who has left the batch has no line any more.
        """
        if flight.proposal.is_chain:
            return
        outcomes, sizes = flight.outcomes, flight.proposal.num_drafts + 1
        assert outcomes is not None
        lines, bases, sources, places = [], [], [], []
        for r, request in enumerate(flight.requests):
            path = outcomes.rows[outcomes.starts[r] : outcomes.starts[r + 1]]
            gone = request.req.finished() or request.req.is_retracted
            if gone or (path == np.arange(len(path))).all():
                continue
            rest = np.setdiff1d(np.arange(sizes[r]), path)
            sources.append(np.concatenate([path, rest]))
            places.append(np.arange(sizes[r]))
            lines.append(np.full(sizes[r], request.req.req_pool_idx))
            bases.append(np.full(sizes[r], request.length - 1))
        if not lines:
            return
        base = np.concatenate(bases)
        told = np.stack(
            [np.concatenate(lines), base + np.concatenate(sources), base + np.concatenate(places)]
        )
        is_cpu = torch.device(self.model_runner.device).type == "cpu"
        # the scheduler's own stream reads the table next, when a request ends
        with nullcontext() if is_cpu else self._device.stream(self._main):
            line, source, place = to_device(told, self.model_runner.device)
            table = self.model_runner.req_to_token_pool
            table.write((line, place), table.req_to_token[line, source])
        if not is_cpu:
            self._device.current_stream().wait_stream(self._main)

    def _tell(self, flight: Flight, batch: Any) -> None:
        """Tell the host's requests what was accepted; give them logprobs and hidden states."""
        outcomes, output = flight.outcomes, flight.result.logits_output
        assert outcomes is not None
        reqs = [request.req for request in flight.requests]
        gone = [req.finished() or req.is_retracted for req in reqs]
        for r, (req, left) in enumerate(zip(reqs, gone, strict=True)):
            if not left:
                req.kv_committed_len += int(outcomes.num_tokens[r]) - 1
                drafts, accepted = outcomes.num_drafts[r], outcomes.num_accepted_drafts[r]
                count_accepted(req, int(drafts), int(accepted))
        if flight.columns.explain:
            self._explain(outcomes, flight.proposal, flight.drafters)
        if flight.columns.wants_output:
            _attach_hidden(flight, output, gone)
            if batch.return_logprob:
                _order_logprobs(flight, output, len(batch.reqs))
        output.hidden_states = None  # the host would add one row of them again

    # -- asleep: control looks for drafts while the device works, and launches do not wait for it

    def _is_asleep(self) -> bool:
        control = self._drafters.control
        return control is not None and self._ranks.alone and control.is_asleep

    def _look_late(self) -> None:
        """Look for the drafts that the step in flight goes without, and learn their worth."""
        if not self._is_asleep() or not self._flights:
            return
        flight = self._flights[-1]
        if not isinstance(flight, Flight) or flight.proposal.num_rows > len(flight.requests):
            return
        flight.drop_ended()
        if len(self._flights) > 1 or not flight.requests or not flight.columns.may_draft:
            return
        budget, _ = self._share(flight.columns, flight.requests, flight.members)
        self._drafters.look(flight.requests, budget)


def _would_keep(req: Any, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
    """Return how many of these tokens plain decoding would append, and why it would end there.

    A copy of the request is asked, in the order of the host's own decode. Its grammar is the real
    one, which is put back.
    """
    twin, kept, accepted = copy.copy(req), 0, 0
    twin.output_ids = [*req.output_ids]
    try:
        for token in tokens:
            kept += 1
            twin.output_ids.append(token)
            twin.check_finished()
            if twin.finished() or kept == len(tokens):
                break
            if req.grammar is not None:
                req.grammar.accept_token(token)
                accepted += 1
                if req.grammar.is_terminated():
                    break  # plain decoding needs one more step to see it
    except ValueError:
        pass  # the host will meet the same, and end the request
    finally:
        if accepted:
            req.grammar.rollback(accepted)
    if not twin.finished():
        return kept, None
    is_length = isinstance(twin.finished_reason, FINISH_LENGTH)
    return kept, FinishReason.LENGTH if is_length else FinishReason.STOP


def _attach_hidden(flight: Flight, output: Any, gone: Sequence[bool]) -> None:
    """Give requests the hidden states of the rows that were kept."""
    if output.hidden_states is None or flight.outcomes is None:
        return
    rows, starts = flight.kept_rows().tolist(), flight.outcomes.starts.tolist()
    for r, (request, left) in enumerate(zip(flight.requests, gone, strict=True)):
        if request.req.return_hidden_states and not left:
            mine = output.hidden_states[rows[starts[r] : starts[r + 1]]]
            request.req.hidden_states += mine.tolist()


_LISTS: dict[str, Callable[[], Any]] = {
    "next_token_top_logprobs_val": lambda: torch.empty(0),
    "next_token_top_logprobs_idx": lambda: torch.empty(0, dtype=torch.int64),
    "next_token_token_ids_logprobs_val": lambda: torch.empty(0),
    "next_token_token_ids_logprobs_idx": list,
}
"""What a row may have beside its token's logprob, and what stands for none."""


def _order_logprobs(flight: Flight, output: Any, batch_size: int) -> None:
    """Put the logprobs of the rows that were kept where the host looks for them: [B, most]."""
    outcomes = flight.outcomes
    assert outcomes is not None
    most = int(outcomes.num_tokens.max(initial=1))
    places = np.arange(len(outcomes.tokens)) - outcomes.starts[outcomes.owners]
    members = flight.members[outcomes.owners]
    rows = flight.kept_rows()
    values = output.next_token_logprobs.new_zeros(batch_size, most)
    values[members, places] = output.next_token_logprobs[rows]
    output.next_token_logprobs = values
    for name, nothing in _LISTS.items():
        if (found := getattr(output, name)) is not None:
            ordered = [nothing() for _ in range(batch_size * most)]
            for row, at in zip(rows.tolist(), (members * most + places).tolist(), strict=True):
                ordered[at] = found[row]
            setattr(output, name, ordered)
