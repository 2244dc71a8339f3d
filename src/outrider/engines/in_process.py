"""An engine in this process: what the served step asks of it, over any device that runs passes.

The device computes a pass when it is launched; when the result can be read is for the device to
say. It has a text of its own for each request, which is ahead of what the CPU knows: so steps are
launched before the last one is settled, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.control.decision import CpuDrafts, Decision
from outrider.core import (
    FinishReason,
    Ints,
    Outcomes,
    Proposal,
    Request,
    match,
    settle,
)
from outrider.core.settle import kept_tokens
from outrider.serving.device import DeviceRows, owners_and_places
from outrider.serving.device_drafters import DeviceDrafters
from outrider.serving.values import Batch, Knows, Launched, Members, ServedRequest, Settled, Traits


@dataclass(eq=False)
class InProcessRequest(Request):
    """A request of this engine: what a client asks for, and what it has been given.

    drafter: the one that drafts for it
    max_drafts: the most drafts in a step
    row: its row in the engine's tables, while it runs
    on_device: the same request with all that the device has emitted
    """

    drafter: str = "none"
    max_drafts: int = 0
    row: int = -1
    on_device: Request = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.forget_device()

    def forget_device(self) -> None:
        """Let the device begin at what the client has been given."""
        self.on_device = Request(
            self.id, self.prompt, self.sampling, self.seed, output=list(self.output)
        )

    @property
    def rid(self) -> str:
        """Its id, as the served step calls it."""
        return str(self.id)

    @property
    def origin_input_ids(self) -> Sequence[int]:
        """The prompt."""
        return self.prompt

    @property
    def output_ids(self) -> Sequence[int]:
        """The tokens that the client has been given."""
        return self.output

    def finished(self) -> bool:
        """Say whether it has ended."""
        return self.finish_reason is not None


def describe(req: InProcessRequest, number: int) -> ServedRequest:
    """Return the state of a request, given a number that no other request has."""
    sampling, max_drafts = req.sampling, 0 if req.drafter == "none" else req.max_drafts
    return ServedRequest(
        id=number,
        prompt=req.prompt,
        sampling=sampling,
        seed=req.seed,
        eos_token_ids=req.eos_token_ids,
        detokenize=req.detokenize,
        output=list(req.output),
        finish_reason=req.finish_reason,
        req=req,
        traits=Traits(
            max_tokens=sampling.max_tokens,
            may_end_early=bool(sampling.stop_strings) or sampling.ends is not None,
            stop_ids=req.eos_token_ids | frozenset(sampling.stop_token_ids),
        ),
        drafter=req.drafter if max_drafts else "none",
        max_drafts=max_drafts,
    )


class Device(Protocol):
    """Runs the passes of a target, one after the other.

    vocab_size: token ids lie below
    """

    vocab_size: int

    def prefill(self, reqs: Sequence[InProcessRequest]) -> tuple[Tensor, float]:
        """Read prompts. Return the token after each, [B], and when it can be read."""
        ...

    def decode(
        self, reqs: Sequence[InProcessRequest], proposal: Proposal, informed: bool
    ) -> tuple[Tensor, float]:
        """Run a decode pass over the last tokens that the device has, and drafts.

        Return what is emitted after each row, [N], and when it can be read.

        informed: whether the CPU laid the rows out when it knew the last outcome
        """
        ...

    def commit(self, outcomes: Outcomes) -> None:
        """Keep what a pass has cached for the rows that were kept, and nothing else of it."""
        ...

    def release(self, reqs: Sequence[InProcessRequest]) -> None:
        """Forget requests that have ended."""
        ...

    def wait(self, ready: float) -> None:
        """Return when the result of a pass can be read."""
        ...

    def note_read(self, num_requests: int) -> None:
        """Note that the CPU has read the result of a step, and now settles it."""
        ...


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a step.

    reqs: that have rows
    proposal: their drafts, of the CPU or the device
    knows: which side knows the lengths and last tokens after the step
    lens: [R] how many tokens of each are cached after it, if the CPU knows
    informed: whether the CPU laid them out when it knew the last outcome
    drafts: of the device, if it makes them
    """

    reqs: Sequence[InProcessRequest]
    proposal: Proposal
    knows: Knows
    lens: Ints
    informed: bool
    drafts: DeviceRows | None


@dataclass(frozen=True, eq=False)
class Ticket:
    """A pass that was launched.

    tokens: what the CPU fetches
    ready: when it can be read
    knows: see `Rows`
    accepted: [R] how many drafts of each request the device has accepted, if it made them
    """

    tokens: Tensor
    ready: float
    knows: Knows = Knows.BOTH
    accepted: Ints | None = None


@dataclass(frozen=True, eq=False)
class OwnBatch:
    """What the engine needs to know of a batch. informed: whether nothing is in flight"""

    reqs: Sequence[InProcessRequest]
    informed: bool = False


class InProcessEngine:
    """Runs a target in this process: see `values.Engine`.

    device: runs its passes
    drafters: that draft on the device
    max_requests: that may run at once, each with a row in the tables
    """

    def __init__(self, device: Device, drafters: DeviceDrafters, max_requests: int) -> None:
        self._device, self._drafters = device, drafters
        # how many tokens of each are cached, as the device knows it
        self._lens = torch.zeros(max_requests, dtype=torch.int64)
        self._free = list(range(max_requests - 1, -1, -1))

    # -- what the scheduler calls

    @property
    def num_free(self) -> int:
        """How many more requests may run."""
        return len(self._free)

    def prefill(self, reqs: Sequence[InProcessRequest]) -> Ticket:
        """Launch the pass that reads the prompts of new requests."""
        for req in reqs:
            req.row = self._free.pop()
            self._lens[req.row] = req.length
        tokens, ready = self._device.prefill(reqs)
        index = torch.tensor([req.row for req in reqs])
        nothing = np.empty(0, np.int64)
        self._drafters.enter(reqs, index, self._lens[index], tokens, nothing)
        self._advance([req.on_device for req in reqs], Proposal.empty(len(reqs)), tokens)
        return Ticket(tokens, ready)

    def batch(
        self,
        reqs: Sequence[InProcessRequest],
        knows: Knows,
        longest: Ints,
        device_drafter: str,
    ) -> Batch:
        """Return the decode batch of these requests.

        knows, longest, device_drafter: see `Batch`
        """
        index = torch.tensor([req.row for req in reqs])
        return Batch(
            reqs=reqs,
            knows=knows,
            longest=longest,
            index=index,
            lens=self._lens[index],
            own=OwnBatch(reqs),
            device_drafter=device_drafter,
        )

    def release(self, reqs: Sequence[InProcessRequest]) -> None:
        """Forget requests that have ended."""
        self._device.release(reqs)
        self._free += [req.row for req in reqs]

    # -- what the served step calls

    def prepare(self, batch: Batch, requests: Sequence[ServedRequest]) -> Batch:
        """Return the batch with lengths that the CPU knows."""
        lens = np.array([request.length for request in requests], np.int64) - 1
        return replace(batch, longest=lens, own=replace(batch.own, informed=True))

    def choose_pass(self, batch: Batch, members: Members, decision: CpuDrafts) -> CpuDrafts:
        """Return the decision as it is: there is one kind of pass."""
        return decision

    def lay_out(
        self, batch: Batch, members: Members, decision: Decision, drafts: DeviceRows | None
    ) -> Rows:
        """Return the rows of a step."""
        own: OwnBatch = batch.own
        reqs = [own.reqs[place] for place in members.places.tolist()]
        proposal: Proposal = Proposal.empty(len(reqs))
        knows = Knows.BOTH
        if drafts is not None:
            proposal, knows = chains_of(drafts), Knows.DEVICE
        elif isinstance(decision, CpuDrafts):
            proposal, knows = decision.proposal, Knows.CPU
        if not members.is_whole:
            knows = Knows.CPU
        return Rows(reqs, proposal, knows, members.lens + 1, own.informed, drafts)

    def run(self, rows: Rows) -> Ticket:
        """Run the pass of a step. Its result is there when the device says."""
        tokens, ready = self._device.decode(rows.reqs, rows.proposal, rows.informed)
        on_device = [req.on_device for req in rows.reqs]
        cached = np.array([request.length for request in on_device], np.int64) - 1
        self._advance(on_device, rows.proposal, tokens)
        lens, accepted = torch.from_numpy(rows.lens), None
        index = torch.tensor([req.row for req in rows.reqs])
        if rows.knows is Knows.BOTH:
            self._drafters.append(index, lens, tokens)
        if rows.drafts is not None:
            lens, tokens = self._drafters.advance(rows.drafts, tokens)
            accepted = lens.numpy() - cached - 1
        self._lens[index] = lens
        return Ticket(tokens, ready, rows.knows, accepted)

    def _advance(self, on_device: Sequence[Request], proposal: Proposal, tokens: Tensor) -> None:
        """Extend the device's own texts by what a pass has emitted."""
        outcomes = settle(on_device, proposal, match(tokens, proposal), _keep_all)
        self._device.commit(outcomes)
        outcomes.apply()

    def emitted(self, ticket: Ticket) -> Tensor:
        """Wait for a step. Return what it emitted after each row."""
        self._device.wait(ticket.ready)
        return ticket.tokens

    def first_tokens(self, ticket: Ticket) -> Sequence[int]:
        """Wait for a prefill. Return the token that it emitted for each request."""
        self._device.wait(ticket.ready)
        tokens: list[int] = ticket.tokens.tolist()
        return tokens

    def keep(
        self,
        launched: Launched,
        running: Ints,
        requests: Sequence[ServedRequest],
        tokens: Ints,
        counts: Ints,
    ) -> tuple[Ints, Sequence[FinishReason | None]]:
        """Return how many of its tokens each request keeps, and why it ends there."""
        places = launched.members.places[running]
        may_end = launched.columns.may_end(places, requests, tokens.tolist(), counts)
        kept, reasons, ends = counts.copy(), _no_reasons(len(requests)), counts.cumsum()
        for r in np.flatnonzero(may_end).tolist():
            own = tokens[ends[r] - counts[r] : ends[r]]
            (kept[r],), (reasons[r],) = kept_tokens([requests[r]], own, counts[r : r + 1])
        return kept, reasons

    def place(self, settled: Settled) -> None:
        """Check that the device has accepted what the CPU did. Nothing is left to be moved."""
        self._device.note_read(len(settled.running))
        ticket: Ticket = settled.launched.ticket
        if ticket.accepted is None:
            return
        outcomes, accepted = settled.outcomes, ticket.accepted[settled.running]
        goes_on = np.array([reason is None for reason in outcomes.finish_reasons], np.bool_)
        same = accepted == outcomes.num_accepted_drafts
        assert same[goes_on].all(), "the device and the CPU differ in what was accepted"


def chains_of(drafts: DeviceRows) -> Proposal:
    """Return the drafts of the device as the CPU would have proposed them."""
    num_drafts = drafts.layout.shape.num_drafts
    owners, places = owners_and_places(num_drafts)
    tokens = drafts.drafts.numpy()[owners, places]
    return Proposal.found(tokens, num_drafts, places - 1, np.ones(len(places)), trees=False)


def _keep_all(
    requests: Sequence[Any], tokens: Ints, counts: Ints
) -> tuple[Ints, Sequence[FinishReason | None]]:
    """Keep all tokens: the device does not know where requests end."""
    return counts, _no_reasons(len(requests))


def _no_reasons(count: int) -> list[FinishReason | None]:
    return [None] * count
