"""The loop under SGLang's overlap scheduler (spec v2): a step is launched before the last is known.

SGLang launches step t + 1, then takes in what step t emitted, then schedules step t + 2, all while
the device works. So the worker does not append to SGLang's requests; it changes what they hold of
the KV pool, and counts. It reads what a step emitted once, where that is needed first, decides
(`settle`), and tells the scheduler when it asks (`resolve`). It is needed first by:

* A step that looks for drafts: it reads before its launch, and the device waits for what lies
  between: decide, look, lay the rows out. Everything else is off its path.
* A step without drafts after a step without drafts needs nothing: the device has each request's
  last token, and the host knows the lengths. It is launched as bare SGLang launches its own. The
  scheduler reads later, and what was emitted is learnt then.

Slots are reserved ahead, two steps' worth for each request while the pool has them (`reserve`), as
SGLang does for its own algorithms. The next step writes over the slots of rejected drafts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.utils.common import freeze_gc

from outrider.core import (
    Bools,
    Budget,
    FinishReason,
    Ints,
    Outcomes,
    Proposal,
    Unsupported,
    match,
    settle,
)
from outrider.hosts.sglang.attention import OutriderAttention
from outrider.hosts.sglang.calibration import calibrate
from outrider.hosts.sglang.draft_model import SglangDraftModel
from outrider.hosts.sglang.drafting import Drafters
from outrider.hosts.sglang.explain import step_record
from outrider.hosts.sglang.flights import (
    Flight,
    NextDraft,
    Reading,
    attach_hidden,
    order_logprobs,
    order_slots,
    would_keep,
)
from outrider.hosts.sglang.head_steps import HeadSteps
from outrider.hosts.sglang.heads import draft_kind, head_sources, load_heads
from outrider.hosts.sglang.hooks import is_prefill_only
from outrider.hosts.sglang.host import changed, host
from outrider.hosts.sglang.memory import max_rows, num_penalties
from outrider.hosts.sglang.metrics import Metrics
from outrider.hosts.sglang.on_device import DeviceStep, DeviceTexts
from outrider.hosts.sglang.penalties import Penalties
from outrider.hosts.sglang.processors import keep_params
from outrider.hosts.sglang.profile import ADAPTIVE, DEVICE, load_profile
from outrider.hosts.sglang.ranks import Ranks
from outrider.hosts.sglang.reported import accepted_drafts, count_step
from outrider.hosts.sglang.request_table import Columns, RequestTable
from outrider.hosts.sglang.requests import ActiveRequests, LiveRequest
from outrider.hosts.sglang.reserve import Reserve
from outrider.hosts.sglang.row_limits import backend_rows, share_rows
from outrider.hosts.sglang.rows import StepRows, kind_groups, to_device
from outrider.hosts.sglang.sampling import sample, sampling_kind
from outrider.hosts.sglang.settings import OWN, check_model, verify_pass
from outrider.hosts.sglang.slot_heads import SglangHead
from outrider.hosts.sglang.tracing import StepClock, Tracer
from outrider.hosts.sglang.verify_pass import VerifyPass
from outrider.kernels.sample_match import DeviceCoins

logger = logging.getLogger(__name__)

LOOK, SELDOM = 16, 4
"""Asleep, drafts are looked for in one step of 1 + B / LOOK: a look takes longer the larger the
batch, and the host has to be done before the device is. While a head drafts on the device, in one
of SELDOM + B / LOOK: there is more to launch, and what it is worth changes slowly."""


def _drafts_in(room: Ints, cached: Ints) -> Ints:
    """Return for how many drafts requests have slots, beside their next tokens in two steps.

    room: for how many tokens each has slots
    cached: how many of its tokens may be cached before the step
    """
    drafts: Ints = np.maximum(room - cached - 2, 0)
    return drafts


class OutriderWorker:
    """What SGLang's scheduler calls instead of the target's worker.

    Each version of SGLang has a class of its own for it, beside its contract.
    """

    def _load(self, target_worker: Any, server_args: Any) -> None:
        """Begin with the target's weights loaded, and nothing else."""
        check_model(target_worker)
        self.server_args = server_args
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
        """Make the drafters: the caches and the attention backend are there now.

        draft_worker: SGLang's worker of the draft model; None without one
        """
        args, runner = host().arguments(self.server_args), self.model_runner
        self.draft_model_worker = draft_worker
        self._logits = self.model_config.vocab_size, self.model_config.dtype.itemsize
        self._max_rows = min(backend_rows(runner), max_rows(*self._logits))
        # a tree's slots change places, and those of a page must not
        self._trees = isinstance(runner.attn_backend, OutriderAttention) and runner.page_size == 1
        profile, model = load_profile(), None
        if draft_worker is not None:
            model = SglangDraftModel(draft_worker, self._max_rows, self._ranks)
        names = profile.names(draft_kind(args))
        vocab_size, graphs = self.model_config.vocab_size, host().graph_sizes(runner)
        sources = head_sources(profile, args)
        try:
            heads = load_heads(sources, runner, self._ranks)
            self._drafters = Drafters.make(
                profile, names, vocab_size, model, self._ranks, graphs, heads
            )
        except Unsupported as error:
            raise SystemExit(f"outrider: {error}") from error
        self._heads = [head for head in heads.values() if head is not None]
        if profile.sanitize:
            self._drafters.wants_calibration = False  # its rows have slots of no text
        self._wants_states = bool(sources)
        self._requests = RequestTable(
            self._drafters, names, profile.drafter, args, profile.max_drafts
        )
        self._begin_verify(args, profile.verify_pass)
        self._texts: DeviceTexts | None = None
        self._head_steps: dict[str, HeadSteps] = {}
        self._penalties = Penalties()
        self._coins = DeviceCoins()
        # other backends plan a pass by lengths, which the host does not know then
        can = args.attention_backend in (OWN, "torch_native") and self._ranks.alone
        self._depths = {name: n for name, n in profile.depths().items() if name in heads}
        if can and {DEVICE, ADAPTIVE, *self._depths} & {*names}:
            table, lookup = runner.req_to_token_pool.req_to_token, self._drafters.lookup
            self._texts = DeviceTexts(table, **lookup)
            self._head_steps = {
                name: HeadSteps(name, head, table, vocab_size, self._coins)
                for name, head in heads.items()
                # it reads all that the target may emit, which the CPU has not checked
                if isinstance(head, SglangHead) and head.vocab_size >= vocab_size
            }
            self._drafters.add_to_device(self._head_steps)
        num_rows = len(runner.req_to_token_pool.req_to_token)
        # the last token by req_pool_index, written and read by the forward stream only
        self._last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=runner.device)
        self._device = torch.get_device_module(runner.device)
        self._main: Any = None  # the scheduler's own stream
        self._flights: deque[Flight | Reading] = deque()
        self._reserve = Reserve(self._most_cached)
        # of requests that were just read: how long they were, and their first token
        self._first: dict[str, tuple[int, int, Any]] = {}
        self._unlooked = 0  # steps since drafts were last looked for
        self._step_ended: float | None = None
        self._later: Callable[[], None] | None = None
        labels = {"model_name": args.served_model_name, "dp_rank": str(dp_rank or 0)}
        self._metrics: Metrics | None = None
        if args.enable_metrics and tp_rank == 0:
            control = self._drafters.control
            self._metrics = Metrics(labels, None if control is None else control.cost)
        self._tracer = Tracer(labels) if profile.tracing and tp_rank == 0 else None
        # a full collection would look at all that was loaded, which takes 100 ms and more
        freeze_gc("Outrider")

    def _begin_verify(self, args: Any, asked: str | None) -> None:
        """Choose how drafts are verified. asked: in the profile"""
        try:
            found = verify_pass(asked, args, self.model_runner.sliding_window_size)
        except Unsupported as error:
            raise SystemExit(f"outrider: {error}") from error
        self._verify: VerifyPass | None = None
        self._pass_is_chosen = found != "auto"
        control, width = self._drafters.control, args.speculative_num_draft_tokens
        if found == "target_verify" or (found == "auto" and control is not None):
            most = int(self.model_config.context_len)
            self._verify = VerifyPass(self._run_target, width, most)
        if control is not None:
            control.cost.reads_each_row = args.attention_backend != OWN
            control.cost.width = 0 if self._verify is None else width
            control.cost.launches_ahead = self._ranks.alone
        logger.info("drafts are verified by %s", found if self._verify is not None else "rows")

    # -- what the scheduler calls

    def _step(self, batch: Any, plain: Any) -> GenerationBatchResult:
        """Launch one step.

        batch, plain: the scheduler's own batch, and the same as its workers take it
        """
        if plain.forward_mode.is_decode():
            return self._launch(batch, plain)
        return self._read_prompts(batch, plain)

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
        host().count_accepted(result, accepted)
        self._tell(flight, batch)
        if not self._flights:
            self._requests.drop(self._requests.ended())
        self._look_late()
        return told

    # -- prefill

    def _read_prompts(self, batch: Any, plain: Any) -> GenerationBatchResult:
        self._step_ended = None
        self._requests.drop([req.rid for req in plain.reqs])  # who was retracted begins anew
        while self._flights and isinstance(first := self._flights[0], Reading):
            if not all(req.finished() for req in first.reqs):
                break
            self._flights.popleft()  # ended by its first token: no step will ask for it
        if plain.forward_mode.is_idle():
            result = self._run_target(plain, is_verify=False)
        else:
            self._penalties.renew(batch)
            if batch.sampling_info.penalizer_orchestrator.is_required:
                info = batch.sampling_info.copy_for_forward()
                plain = changed(plain, sampling_info=info)
            result = self._run_prefill(plain)
            self._last_tokens[plain.req_pool_indices] = result.next_token_ids
            lengths = [len(req.origin_input_ids) + len(req.output_ids) for req in plain.reqs]
            self._flights.append(Reading(plain.reqs[:], lengths, result))
        result.next_draft_input = NextDraft(self._reserve, plain.seq_lens, plain.seq_lens_cpu)
        return result

    def _run_prefill(self, plain: Any) -> GenerationBatchResult:
        """Read prompts, and sample the first token of each.

        If no request of the batch may emit a token, SGLang appends token 0, and a step that is
        launched before the scheduler has seen their end takes it for their last.
        """
        result = self._run_target(plain, is_verify=not plain.is_prefill_only)
        if not plain.is_prefill_only:
            last = plain.seq_lens - 1
            kinds = [sampling_kind(req.sampling_params) for req in plain.reqs]
            groups = kind_groups(kinds, last.device)
            sampled = sample(self.model_runner, result.logits_output, plain, last, groups)
            result.next_token_ids = self._ranks.of_rank_0(sampled)
        self._prefill_draft(plain)
        self._meanwhile()
        return result

    def _prefill_draft(self, plain: Any) -> None:
        """Let the draft model and heads read the prompts too, if they will draft for some."""
        if self._drafters.readers:
            options = [self._requests.options(req) for req in plain.reqs]
            self._drafters.prefill(plain, {asked.drafter for asked in options if asked.max_drafts})

    # -- decode: the same four verbs, but what is settled is the step before

    def _launch(self, batch: Any, plain: Any) -> GenerationBatchResult:
        draft = plain.spec_info
        if self._needs_nothing(batch, draft):
            return self._launch_plain(batch, plain, StepClock(None), ahead=True)
        plan = self._device_plan(batch, draft) if draft.on_device else None
        if plan is not None and draft.flight.head is plan[1]:  # another one has not read the texts
            launched = self._launch_on_device(batch, plain, *plan, StepClock(None))
            if launched is not None:
                return launched
        self._main = draft.main
        while self._flights:
            self._settle_next()
        clock = StepClock(self._step_ended)
        active, requests = self._gather(batch, draft)
        plain.seq_lens_cpu, plain.seq_lens_sum = batch.seq_lens_cpu, int(active.lens.sum())
        self._penalties.catch_up(batch, requests)
        if self._drafters.wants_calibration:
            calibrate(batch, plain, self._run_target, self._drafters, self._max_rows)
            clock.last = time.perf_counter()
        clock.lap("host")
        columns, is_whole = self._requests.columns, len(active.requests) == len(requests)
        proposal: Proposal = Proposal.empty(len(active.requests))
        plan = self._device_plan(batch, draft) if is_whole and not columns.adaptive else None
        if plan is not None and plan[1] is not None and not plan[1].is_ready(requests):
            plan = None  # the host lets it catch up
        is_alive = active.requests[0].finish_reason is None
        if asks := plan is None and columns.may_draft and is_alive:
            room = draft.room
            if room is not None:
                room = _drafts_in(room[active.members], active.lens)
            budget = self._budget(batch, active.requests, active.members, room)
            if is_whole:
                self._allow_device(columns, active.requests, int(active.lens.max()))
            else:
                self._drafters.allow_device(False)
            proposal = self._drafters.propose(plain, active.requests, budget)
            plan = self._device_plan(batch, draft) if is_whole and columns.adaptive else None
        self._charge_draft(clock)
        if plan is not None:
            launched = self._launch_on_device(batch, plain, *plan, clock, active)
            if launched is not None:
                return launched
        foreseen = self._drafters.found() if columns.explain and asks else {}
        is_plain = is_whole and proposal.num_rows == len(requests)
        if is_plain and draft.is_current and not columns.needs_text:
            return self._launch_plain(batch, plain, clock, foreseen=foreseen)
        rows = StepRows.of(batch, plain, active, proposal)
        flight = Flight(
            active.requests, active.members, columns, proposal, clock, foreseen=foreseen
        )
        lens = rows.forward if is_plain else plain
        following = NextDraft(
            self._reserve, lens.seq_lens, lens.seq_lens_cpu, is_plain, self._record(), flight
        )
        has_slots = draft.room is None  # for padding too
        if self._verify and has_slots and self._pads(batch, plain, active, proposal):
            launch = partial(self._verify.run, batch, plain, active, proposal)
            return self._run(flight, rows, following, launch)
        return self._run(flight, rows, following)

    def _gather(self, batch: Any, draft: NextDraft) -> tuple[ActiveRequests, Sequence[LiveRequest]]:
        """Return the requests that have rows in the next step, and all of the batch.

        Nothing is in flight. Finished requests, of which the scheduler does not know yet, get no
        row. If all have finished, each keeps one, and the results are discarded.
        """
        requests = self._requests.update(batch.reqs, self._first)
        self._requests.complete(requests, self._first)
        for request in requests if self._first else ():
            self._first.pop(request.req.rid, None)
        lens = np.array([request.length for request in requests]) - 1
        known = batch.seq_lens_cpu.numpy()
        assert not draft.is_current or (known == lens).all(), "host and device differ in lengths"
        batch.seq_lens_cpu = torch.from_numpy(lens).to(batch.seq_lens_cpu.dtype)
        members, kinds = np.arange(len(requests)), self._requests.columns.kinds
        alive = [r for r, request in enumerate(requests) if request.finish_reason is None]
        if not alive or len(alive) == len(requests):
            return ActiveRequests(requests, members, lens, kinds), requests
        some = [requests[r] for r in alive]
        return ActiveRequests(
            some, members[alive], lens[alive], [kinds[r] for r in alive]
        ), requests

    def _most_cached(self, reqs: Sequence[Any]) -> Ints:
        """Return how many tokens of each request may be cached after the steps in flight."""
        ahead = Counter[str]()
        for flight in self._flights:
            if isinstance(flight, Reading):
                continue  # the token after the prompt counts, known or not
            drafts = flight.num_drafts().tolist()
            for request, count in zip(flight.requests, drafts, strict=True):
                ahead[request.req.rid] += 1 + count
        return np.array([self._requests.most_tokens(req) - 1 + ahead[req.rid] for req in reqs])

    def _needs_nothing(self, batch: Any, draft: NextDraft) -> bool:
        """Say whether a step can be launched without knowing what the last one emitted."""
        if self._drafters.wants_calibration or not (draft.is_current or draft.on_device):
            return False
        if self._requests.differ(batch.reqs):
            self._requests.update(batch.reqs, self._first, *self._in_flight())
        if not draft.is_current:
            return False
        columns = self._requests.columns
        if columns.needs_text or columns.explain:
            return False
        return not columns.may_draft or (columns.adaptive and self._is_asleep())

    def _in_flight(self) -> tuple[set[str], set[str]]:
        """Return the ids of requests whose prompts are being read, and of those in other steps."""
        read, decoded = set[str](), set[str]()
        for flight in self._flights:
            if isinstance(flight, Reading):
                read.update(req.rid for req in flight.reqs)
            else:
                decoded.update(request.req.rid for request in flight.requests)
        return read, decoded

    def _launch_plain(
        self,
        batch: Any,
        plain: Any,
        clock: StepClock,
        ahead: bool = False,
        foreseen: Mapping[int, str] | None = None,
    ) -> GenerationBatchResult:
        """Launch one token for each request: the device has all that it takes."""
        requests, lens = self._requests.update(plain.reqs), plain.seq_lens
        new, new_cpu = lens + 1, plain.seq_lens_cpu + 1
        table = batch.req_to_token_pool.req_to_token
        forward = changed(
            plain,
            input_ids=self._last_tokens[plain.req_pool_indices],
            seq_lens=new,
            seq_lens_cpu=new_cpu,
            seq_lens_sum=int(new_cpu.sum()),
            orig_seq_lens=new.to(plain.orig_seq_lens.dtype),
            out_cache_loc=table[plain.req_pool_indices, lens].to(torch.int64),
            spec_info=None,
        )
        done, columns = self._record(), self._requests.columns
        rows = StepRows(forward, kind_groups(columns.kinds, batch.device))
        nothing: Proposal = Proposal.empty(len(requests))
        members = np.arange(len(requests))
        flight = Flight(
            requests, members, columns, nothing, clock, foreseen=foreseen or {}, ahead=ahead
        )
        return self._run(flight, rows, NextDraft(self._reserve, new, new_cpu, True, done, flight))

    # -- drafts on the device: see `on_device`

    def _may_use_device(self, columns: Columns, longest: int) -> bool:
        """Say whether the device can draft for a batch. longest: cached tokens of a request"""
        texts = self._texts
        if texts is None or columns.needs_text or columns.wants_output:
            return False
        # near the end of the context the host knows better how many drafts there may be
        fits = longest + int(columns.max_drafts.max()) + 2 <= texts.width
        return fits and len(columns.kinds) <= texts.most_requests

    def _allow_device(
        self, columns: Columns, requests: Sequence[LiveRequest], longest: int
    ) -> None:
        """Tell control whether the device can draft in the next step, and which heads."""
        may = columns.adaptive and self._may_use_device(columns, longest)
        steps = self._head_steps.items() if may else ()
        ready = frozenset(name for name, head in steps if head.is_ready(requests))
        self._drafters.allow_device(may, ready)

    def _device_plan(self, batch: Any, draft: NextDraft) -> tuple[Ints, HeadSteps | None] | None:
        """Return how many drafts the device makes for each request, and the head that does.

        None if it makes no drafts; no head if they are looked up.
        """
        columns, control = self._requests.columns, self._drafters.control
        if not self._may_use_device(columns, int(batch.seq_lens_cpu.max())):
            return None
        name = min(columns.drafters, default="none")
        if columns.adaptive and control is not None and control.device is not None:
            requests = self._requests.update(batch.reqs)
            name, widths = control.device.drafter, control.device.of(requests)
        elif len(columns.drafters) == 1 and name in (DEVICE, *self._depths):
            depth = self._depths.get(name, self._max_rows)
            limit = min(self._max_rows, max_rows(*self._logits, 0))
            widths = share_rows(np.minimum(columns.max_drafts, depth), limit)[0]
        else:
            return None
        if draft.room is not None:
            widths = np.minimum(widths, _drafts_in(draft.room, self._most_cached(batch.reqs)))
        head = self._head_steps.get(name)
        if not widths.any() or (head is None and name != DEVICE):
            return None
        return widths, head

    def _launch_on_device(
        self,
        batch: Any,
        plain: Any,
        widths: Ints,
        head: HeadSteps | None,
        clock: StepClock,
        active: ActiveRequests | None = None,
    ) -> GenerationBatchResult | None:
        """Launch a step with drafts that the device makes. After a fault there are no such.

        active: all requests, if nothing is in flight: the device is told their texts and lengths.
            Otherwise it has them.
        """
        assert self._texts is not None
        requests, columns = self._requests.update(plain.reqs), self._requests.columns
        try:
            if active is not None:
                self._texts.write(active.requests)
                lens = to_device(active.lens, plain.seq_lens.device)
                plain.seq_lens = lens.to(plain.seq_lens.dtype)
                if head is not None:
                    head.enter(active.requests, plain.req_pool_indices)
            step = self._texts.step(batch, plain, requests, columns.kinds, widths, head)
        except Exception as error:
            logger.warning("no more drafts on the device: %r", error)
            self._drafters.fallbacks["device"] += len(requests)
            if head is None:
                self._texts = None
            else:
                del self._head_steps[head.name]
            return None
        nothing: Proposal = Proposal.empty(len(requests))
        members = np.arange(len(requests))
        ahead = active is None
        flight = Flight(
            requests, members, columns, nothing, clock, ahead=ahead, widths=widths, head=head
        )
        longest = plain.seq_lens_cpu + torch.from_numpy(widths) + 1
        draft = NextDraft(self._reserve, step.lens, longest, False, None, flight, on_device=True)
        return self._run(flight, step.rows, draft, step=step)

    def _pads(self, batch: Any, plain: Any, active: ActiveRequests, proposal: Proposal) -> bool:
        """Say whether SGLang's own verify pass is launched, not rows; the same on all ranks."""
        verify, control, columns = self._verify, self._drafters.control, self._requests.columns
        assert verify is not None
        found = proposal.num_rows > len(active.requests) and not columns.wants_output
        found = found and verify.can_run(active, proposal)
        if found and not self._pass_is_chosen:
            wanted = control is not None and columns.adaptive and control.padded
            found = self._ranks.any(wanted)
            if found and not verify.is_checked and not self._agrees(verify, batch, plain, active):
                found = False
        if control is not None:
            control.padded = found
        return found

    def _agrees(self, verify: VerifyPass, batch: Any, plain: Any, active: ActiveRequests) -> bool:
        """Check SGLang's own verify pass before it is first used. If it fails, it never will be."""
        fault = "its logits are not those of decode rows"
        try:
            agrees = verify.agrees(batch, plain, active)
        except Exception as error:
            agrees, fault = False, repr(error)
        if not self._ranks.any(not agrees):
            return True
        logger.warning("TARGET_VERIFY is not used, drafts are verified by rows: %s", fault)
        self._verify = None
        if self._drafters.control is not None:
            self._drafters.control.cost.width = 0
        return False

    def _run(
        self,
        flight: Flight,
        rows: StepRows,
        draft: NextDraft,
        launch: Callable[[], GenerationBatchResult] | None = None,
        step: DeviceStep | None = None,
    ) -> GenerationBatchResult:
        """Launch a step's pass. What could wait is done while the device works.

        launch: how, if not as a decode batch of the rows
        step: the same, if the device made its drafts
        """
        forward = rows.forward
        flight.clock.lap("host")
        grammars = forward.sampling_info.grammars
        result = self._run_target(forward) if launch is None else launch()
        forward.sampling_info.grammars = grammars  # a host may have put each request's own there
        output, at = result.logits_output, forward.seq_lens - 1
        sampled = sample(self.model_runner, output, forward, at, rows.groups)
        keep_params(forward.sampling_info)
        emitted = self._ranks.of_rank_0(sampled)
        if draft.is_current:
            self._last_tokens[forward.req_pool_indices] = emitted
        if step is not None:
            assert self._texts is not None
            draft.new_seq_lens, emitted = self._texts.advance(step, emitted)
            draft.verify_done = self._record()
        flight.result = GenerationBatchResult(
            logits_output=output,
            next_token_ids=emitted,
            can_run_cuda_graph=result.can_run_cuda_graph,
            next_draft_input=draft,
        )
        self._flights.append(flight)
        flight.prepare()
        self._meanwhile()
        return flight.result

    def _run_target(self, batch: Any, is_verify: bool = True) -> GenerationBatchResult:
        """Run the target over a batch as its workers take it, and tell the heads its states.

        is_verify: whether the sampling is left to us
        """
        found: GenerationBatchResult = host().run_target(
            self.target_worker, batch, is_verify=is_verify, states=self._wants_states
        )
        if self._wants_states and found.logits_output is not None:
            for head in self._heads:
                head.tell(batch, found.logits_output.hidden_states)
            found.logits_output.hidden_states = None  # nobody else wants these
        return found

    def _record(self) -> Any:
        """Return an event at this point of the stream."""
        event = self._device.Event()
        event.record()
        return event

    # -- what a step has emitted

    def _settle_next(self) -> Flight | None:
        """Read what the oldest step in flight emitted, decide, and tell the drafters.

        Returns the step; None if it was a prefill.
        """
        flight = self._flights.popleft()
        if isinstance(flight, Reading):
            flight.result.copy_done.synchronize()
            tokens = flight.result.next_token_ids.tolist()
            self._first = {rid: f for rid, f in self._first.items() if not f[2].finished()}
            for req, length, token in zip(flight.reqs, flight.lengths, tokens, strict=True):
                self._first[req.rid] = length, token, req
            return None
        flight.drop_ended()
        if not flight.requests:
            flight.outcomes = Outcomes.of(())
            return flight
        clock = flight.clock
        if self._step_ended is not None:
            clock.begin(self._step_ended)
        clock.lap("scheduler")
        emitted = flight.emitted()
        clock.lap("forward")
        requests, proposal = flight.requests, flight.proposal  # it may be known only now
        self._requests.complete(requests)
        keep = partial(self._kept, flight)
        flight.outcomes = outcomes = settle(requests, proposal, match(emitted, proposal), keep)
        clock.lap("verify")
        if not proposal.is_chain:
            order_slots(flight, self.model_runner, self._main)
        if self._metrics is not None or self._tracer is not None or flight.columns.explain:
            if flight.widths is None:
                flight.drafters = self._drafters.who(requests, proposal)
            else:
                who = flight.on_device
                flight.drafters = [who if n else "none" for n in proposal.num_drafts]
        if flight.head is not None:
            flight.head.has_read(requests)
        if flight.widths is not None:
            self._drafters.drafted_on_device(flight.on_device)
        if flight.columns.may_draft:
            self._drafters.router.observe(outcomes)
        outcomes.apply()
        for request in requests if flight.widths is not None else ():
            request.on_device = request.length
        clock.lap("host")
        self._step_ended = clock.last
        if self._later is not None:
            self._later()
        self._later = partial(self._count, flight)
        return flight

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
            kept[r], reasons[r] = would_keep(requests[r].req, mine)
        return kept, reasons

    def _tell(self, flight: Flight, batch: Any) -> None:
        """Tell the host's requests what was accepted; give them logprobs and hidden states."""
        outcomes, output = flight.outcomes, flight.result.logits_output
        assert outcomes is not None
        reqs, here = [request.req for request in flight.requests], host()
        gone = [req.finished() or req.is_retracted for req in reqs]
        for r, (req, left) in enumerate(zip(reqs, gone, strict=True)):
            if not left:
                here.cache_of(req).kv_committed_len += int(outcomes.num_tokens[r])
                drafts, accepted = outcomes.num_drafts[r], outcomes.num_accepted_drafts[r]
                count_step(req, int(drafts), int(accepted))
        if flight.columns.explain:
            self._explain(flight)
        if flight.columns.wants_output:
            attach_hidden(flight, output, gone)
            if batch.return_logprob:
                order_logprobs(flight, output, len(batch.reqs))
        output.hidden_states = None  # the host would add one row of them again

    # -- asleep: control looks for drafts while the device works, and launches do not wait for it

    def _is_asleep(self) -> bool:
        control = self._drafters.control
        return control is not None and control.is_asleep

    def _look_late(self) -> None:
        """Look for drafts of the host's, which the step in flight goes without: are they better?"""
        flight = self._flights[-1] if self._flights else None
        if not isinstance(flight, Flight) or not flight.ahead:
            return
        if flight.widths is None and not self._is_asleep():
            return
        flight.drop_ended()
        if len(self._flights) > 1 or not flight.requests or not flight.columns.adaptive:
            return
        self._unlooked += 1
        every = 1 if flight.head is None else SELDOM
        if (self._unlooked - every + 1) * LOOK <= len(flight.requests):
            return
        self._unlooked = 0
        budget, _ = self._share(flight.columns, flight.requests, flight.members)
        # the step in flight adds to these, and the next one
        longest = max(request.length for request in flight.requests) + int(budget.max_drafts.max())
        self._allow_device(flight.columns, flight.requests, longest)
        self._drafters.look(flight.requests, budget)

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
        self,
        batch: Any,
        requests: Sequence[LiveRequest],
        members: Ints,
        room: Ints | None = None,
    ) -> Budget:
        """Return how many drafts each request may have.

        members: their places in the batch
        room: for how many each has slots; None if for as many as any may have
        """
        penalties = num_penalties(batch.sampling_info.penalizer_orchestrator)
        budget, cut = self._share(self._requests.columns, requests, members, penalties, room)
        self._drafters.fallbacks.update(cut)
        return budget

    def _share(
        self,
        columns: Columns,
        requests: Sequence[LiveRequest],
        members: Ints,
        penalties: int = 0,
        room: Ints | None = None,
    ) -> tuple[Budget, Counter[str]]:
        """Return how many drafts each request may have, and how many have fewer than wanted: why.

        The last token needs no draft beside it: a request that may emit n more drafts n - 1.

        penalties: kinds of them that the batch has; each takes memory for every row
        room: see `_budget`
        """
        emitted = np.array([len(request.output) for request in requests])
        left = columns.max_tokens[members] - emitted - 1
        wanted = np.maximum(np.minimum(columns.max_drafts[members], left), 0)
        fitting = wanted if room is None else np.minimum(wanted, room)
        limit = min(self._max_rows, max_rows(*self._logits, penalties))
        drafts, cut = share_rows(fitting, limit)
        cuts = +Counter(rows=cut, slots=int((fitting < wanted).sum()))
        return Budget(drafts, "match", self._coins, trees=self._trees), cuts

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

    def _count(self, flight: Flight) -> None:
        """Tell the counters and the traces of a step that is over."""
        clock, proposal, drafters = flight.clock, flight.proposal, list(flight.drafters)
        outcomes = flight.outcomes
        assert outcomes is not None
        if self._metrics is not None:
            self._metrics.record(outcomes, proposal, drafters, flight.widths is not None)
            self._metrics.totals("fallbacks", self._drafters.totals())
            self._metrics.totals("foreseen", self._drafters.foreseen())
            self._metrics.times(clock.parts, outcomes)
        if self._tracer is not None:
            self._tracer.step(clock, outcomes, proposal, drafters)

    def _explain(self, flight: Flight) -> None:
        """Note what the step did to each request that asks, and tell it when it ends."""
        assert flight.outcomes is not None
        drafts = flight.proposal.drafts()
        for outcome, draft, name in zip(flight.outcomes, drafts, flight.drafters, strict=True):
            request: Any = outcome.request
            if request.explain:
                req = request.req  # it keeps the notes: it may be retracted, and come again
                req.outrider_steps = getattr(req, "outrider_steps", [])
                found = flight.foreseen.get(request.id)
                req.outrider_steps.append(step_record(outcome, draft, name, found))
                if outcome.finish_reason is not None or req.finished():
                    accepted_drafts(req).steps = req.outrider_steps
