"""Steps that were launched, and what a batch carries from one to the next."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from outrider.core import FinishReason, Ints, Outcomes, Proposal
from outrider.hosts.sglang.head_steps import HeadSteps
from outrider.hosts.sglang.host import host
from outrider.hosts.sglang.on_device import told_drafts
from outrider.hosts.sglang.profile import DEVICE
from outrider.hosts.sglang.request_table import Columns
from outrider.hosts.sglang.requests import LiveRequest
from outrider.hosts.sglang.reserve import Reserve
from outrider.hosts.sglang.rows import to_device
from outrider.hosts.sglang.tracing import StepClock


@dataclass(eq=False)
class Flight:
    """A decode step that was launched.

    requests: those that have rows in it
    members: [R] their places in the batch
    columns: of the whole batch
    proposal: their drafts
    rows: [N] which of the result's rows are theirs; None for all
    ahead: whether it was launched before the step before it was read
    widths: [B] how many drafts the device makes for each request of the batch. The host knows
        them, and the proposal, when it has read the step; `rows` are requests then.
    head: that makes them; None if they are looked up
    result: what SGLang was told
    clock: of this step
    outcomes: what it did, once that is known
    drafters: who drafted for each request, if somebody asks
    foreseen: what a draft server had, by the request's id, if somebody asks
    """

    requests: Sequence[LiveRequest]
    members: Ints
    columns: Columns
    proposal: Proposal
    clock: StepClock
    rows: Ints | None = None
    result: Any = None
    outcomes: Outcomes | None = None
    drafters: Sequence[str] = ()
    foreseen: Mapping[int, str] = field(default_factory=dict)
    ahead: bool = False
    widths: Ints | None = None
    head: HeadSteps | None = None

    @property
    def on_device(self) -> str:
        """The name of what drafts on the device; "" if there are no such drafts."""
        if self.widths is None:
            return ""
        return DEVICE if self.head is None else self.head.name

    def drop_ended(self) -> None:
        """Drop requests that ended before this step: what it emits for them is discarded."""
        alive = [r for r, q in enumerate(self.requests) if q.finish_reason is None]
        if len(alive) == len(self.requests):
            return
        is_plain = self.proposal.num_rows == len(self.requests)
        assert is_plain, "the host gives no drafts to who has ended"
        self.rows = np.array(alive, np.int64) if self.rows is None else self.rows[alive]
        self.requests = [self.requests[r] for r in alive]
        self.members, self.proposal = self.members[alive], Proposal.empty(len(alive))

    def num_drafts(self) -> Ints:
        """Return how many drafts each request has, [R]."""
        return self.proposal.num_drafts if self.widths is None else self.widths[self.members]

    def prepare(self) -> None:
        """Compute, while the device works, what `match` and `settle` need of the proposal."""
        if len(self.proposal.parents):
            _ = self.proposal.parent_rows, self.proposal.owners, self.proposal.starts

    def emitted(self) -> Tensor:
        """Return what the target emits after each row. Waits for the step."""
        self.result.copy_done.synchronize()
        tokens: Tensor = self.result.next_token_ids.cpu()
        if self.widths is not None:
            tokens, self.proposal = told_drafts(tokens, self.widths, self.rows)
            return tokens
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

    new_seq_lens, lens_cpu: [B] what is cached after the step, if it had no drafts
    is_current: whether host and device know each request's length, and the device its last token.
        After a step with drafts only one of them does.
    on_device: whether the device knows each request's text. The lengths here are the longest that
        there may be then.
    reserve: gives the batch its slots
    verify_done: when `new_seq_lens` can be read
    flight: the step
    room: [B] for how many tokens each request of the batch that was prepared last has slots; None
        if each has slots for any step
    future_indices: set by the scheduler; the values are in buffers of the worker's
    main: the scheduler's own stream
    """

    future_indices: Any = None
    main: Any = None
    room: Ints | None = None
    # what SGLang's own algorithms carry: it looks for these
    bonus_tokens: Any = None
    topk_p: Any = None
    topk_index: Any = None
    hidden_states: Any = None
    dsa_topk_indices: Any = None

    def __init__(
        self,
        reserve: Reserve,
        new_seq_lens: Tensor,
        lens_cpu: Tensor,
        is_current: bool = True,
        verify_done: Any = None,
        flight: Flight | None = None,
        on_device: bool = False,
    ) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.reserve = reserve
        self.on_device = on_device
        self.new_seq_lens, self.lens_cpu, self.is_current = new_seq_lens, lens_cpu, is_current
        self.verify_done, self.flight = verify_done, flight

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        """Return what a batch's number of tokens is multiplied by: nothing."""
        return 1, 1

    def filter_batch(self, new_indices: Tensor, *_: Any, **__: Any) -> None:
        """Do nothing: there is nothing for single requests here."""

    def merge_batch(self, other: NextDraft) -> None:
        """Take in the requests of another batch."""
        self.is_current = self.is_current and other.is_current
        self.on_device = self.on_device and other.on_device
        self.verify_done = self.verify_done or other.verify_done

    def prepare_for_decode(self, batch: Any) -> None:
        """Give the batch its slots, for the step in flight and for this one: see `reserve`."""
        self.main = torch.get_device_module(batch.device).current_stream()
        self.room = self.reserve.take(batch)
        for req in batch.reqs:
            req.decode_batch_idx += 1


def order_slots(flight: Flight, runner: Any, main: Any) -> None:
    """Put the slots of a tree's path into the order of its tokens: in the table, nothing is copied.

    What is not on the path goes behind it. A request that has left the batch has no row in the
    table.

    main: the scheduler's own stream, which reads the table next, when a request ends
    """
    outcomes, sizes = flight.outcomes, flight.proposal.num_drafts + 1
    assert outcomes is not None
    pool_indices, bases, sources, places = [], [], [], []
    for r, request in enumerate(flight.requests):
        path = outcomes.rows[outcomes.starts[r] : outcomes.starts[r + 1]]
        gone = request.req.finished() or request.req.is_retracted
        if gone or (path == np.arange(len(path))).all():
            continue
        rest = np.setdiff1d(np.arange(sizes[r]), path)
        sources.append(np.concatenate([path, rest]))
        places.append(np.arange(sizes[r]))
        pool_indices.append(np.full(sizes[r], host().cache_of(request.req).req_pool_idx))
        bases.append(np.full(sizes[r], request.length - 1))
    if not pool_indices:
        return
    base, table = np.concatenate(bases), runner.req_to_token_pool
    source, place = base + np.concatenate(sources), base + np.concatenate(places)
    told = np.stack([np.concatenate(pool_indices), source, place])
    device = torch.get_device_module(runner.device)
    is_cpu = torch.device(runner.device).type == "cpu"
    with nullcontext() if is_cpu else device.stream(main):
        pool_index, at, to = to_device(told, runner.device)
        table.write((pool_index, to), table.req_to_token[pool_index, at])
    if not is_cpu:
        device.current_stream().wait_stream(main)


def would_keep(req: Any, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
    """Return how many of these tokens plain decoding would append, and why it would end there.

    A copy of the request is asked, in the order of the host's own decode. Its grammar is the real
    one, which is put back.
    """
    twin, kept, accepted = copy.copy(req), 0, 0
    twin.output_ids = req.output_ids[:]
    try:
        for token in tokens:
            kept += 1
            twin.output_ids.append(token)
            host().check_end(twin)
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


def attach_hidden(flight: Flight, output: Any, gone: Sequence[bool]) -> None:
    """Give requests the hidden states of the rows that were kept."""
    if output.hidden_states is None or flight.outcomes is None:
        return
    rows, starts = flight.kept_rows().tolist(), flight.outcomes.starts.tolist()
    for r, (request, left) in enumerate(zip(flight.requests, gone, strict=True)):
        if request.req.return_hidden_states and not left:
            mine = output.hidden_states[rows[starts[r] : starts[r + 1]]].tolist()
            if request.req.return_hidden_states == "last":  # 0.5.23 has this
                request.req.hidden_states[:] = mine[-1:]
            else:
                request.req.hidden_states += mine


_LISTS: dict[str, Callable[[], Any]] = {
    "next_token_top_logprobs_val": lambda: torch.empty(0),
    "next_token_top_logprobs_idx": lambda: torch.empty(0, dtype=torch.int64),
    "next_token_token_ids_logprobs_val": lambda: torch.empty(0),
    "next_token_token_ids_logprobs_idx": list,
}
"""What a row may have beside its token's logprob, and what stands for none."""


def order_logprobs(flight: Flight, output: Any, batch_size: int) -> None:
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
