"""The values that cross between the served step, its engine, and the drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.control.decision import CpuDrafts, Decision, DeviceDrafts
from outrider.core import Bools, FinishReason, Ints, Outcomes, Proposal, Request
from outrider.serving.clock import StepClock
from outrider.serving.device import DeviceRows, unpack
from outrider.serving.profile import ADAPTIVE


class Knows(Enum):
    """Which side knows the length and the last token of each request of a batch.

    After a plain step that is both, after drafts of the CPU the CPU, once the step is settled, and
    after drafts of the device the device.
    """

    BOTH = "both"
    CPU = "cpu"
    DEVICE = "device"


@dataclass(frozen=True)
class Traits:
    """What every step asks of a request. It never changes.

    max_tokens: the most tokens to emit
    kind: how it is sampled; requests of one kind are sampled together
    may_end_early: whether more than its tokens may end it: stop strings, a grammar, reasoning
    stop_ids: tokens that may end it
    needs_text: whether what is sampled depends on what it has emitted
    wants_output: whether it wants logprobs or hidden states
    """

    max_tokens: int
    kind: str = ""
    may_end_early: bool = False
    stop_ids: frozenset[int] = frozenset()
    needs_text: bool = False
    wants_output: bool = False


@dataclass
class ServedRequest(Request):
    """A request that is being decoded: what drafters see of it, and what a step asks of it.

    req: the engine's own request
    drafter: the one that drafts for it
    max_drafts: the most drafts in a step
    explain: whether it asks what each step did
    tenant: whose texts it may share: those with its name, as in the engine's prefix cache
    """

    req: Any = None
    traits: Traits = Traits(0)
    drafter: str = "none"
    max_drafts: int = 0
    explain: bool = False
    tenant: str = ""


@dataclass(frozen=True, eq=False)
class Columns:
    """The traits of a batch's requests, one entry for each, or one for all.

    places: [B] of the requests: 0, 1, ...
    max_drafts, max_tokens, kinds, may_end_early: [B] see `ServedRequest` and `Traits`
    stop_ids: all tokens that may end one of them
    drafters: of the requests that may have drafts
    adaptive: whether control decides for all that may have drafts
    needs_text, wants_output, explain: whether this holds of one of them
    """

    places: Ints
    max_drafts: Ints
    max_tokens: Ints
    kinds: Sequence[str]
    may_end_early: Bools
    stop_ids: frozenset[int]
    drafters: frozenset[str]
    adaptive: bool
    needs_text: bool
    wants_output: bool
    explain: bool

    @staticmethod
    def of(requests: Sequence[ServedRequest]) -> Columns:
        """Return the columns of these requests."""
        traits = [request.traits for request in requests]
        drafters = frozenset(request.drafter for request in requests if request.max_drafts)
        return Columns(
            places=np.arange(len(requests)),
            max_drafts=np.array([request.max_drafts for request in requests], np.int64),
            max_tokens=np.array([each.max_tokens for each in traits], np.int64),
            kinds=[each.kind for each in traits],
            may_end_early=np.array([each.may_end_early for each in traits], np.bool_),
            stop_ids=frozenset[int]().union(*(each.stop_ids for each in traits)),
            drafters=drafters,
            adaptive=drafters <= {ADAPTIVE},
            needs_text=any(each.needs_text for each in traits),
            wants_output=any(each.wants_output for each in traits),
            explain=any(request.explain for request in requests),
        )

    @property
    def may_draft(self) -> bool:
        """Whether one of the requests may have drafts."""
        return bool(self.drafters)

    def may_end(
        self, places: Ints, requests: Sequence[ServedRequest], tokens: Sequence[int], counts: Ints
    ) -> Bools:
        """Return which of some requests may end at one of the tokens that follow, [R].

        places: [R] of these requests in the batch
        tokens, counts: all that follow, request by request, and how many of each
        """
        if not self.stop_ids.isdisjoint(tokens):
            return np.ones(len(requests), np.bool_)
        lengths = np.array([len(request.output) for request in requests]) + counts
        found: Bools = self.may_end_early[places] | (lengths >= self.max_tokens[places])
        return found


@dataclass(frozen=True, eq=False)
class Batch:
    """A decode batch of the engine's.

    reqs: the engine's requests. By SGLang's names, each has `rid`, which is unique among those that
        are running, `origin_input_ids`, the prompt, `output_ids`, the tokens that the engine has
        appended to it, and `finished()`.
    knows: which side knows their lengths and last tokens
    longest: [B] how many tokens of each are cached; at most, if only the device knows. The steps in
        flight count: see `InFlight.max_cached`
    device_drafter: the drafter of the device in the step before; "" if it drafted nothing
    room: [B] for how many tokens each has slots; None if each has slots for any step
    num_penalties: kinds of penalties that its requests have
    index, lens: [B] on the device: the requests' rows in the table of slots, and how many of their
        tokens are cached, if the device knows
    own: the engine's batch
    """

    reqs: Sequence[Any]
    knows: Knows
    longest: Ints
    index: Tensor
    lens: Tensor
    own: Any
    device_drafter: str = ""
    room: Ints | None = None
    num_penalties: int = 0


@dataclass(frozen=True, eq=False)
class Members:
    """The requests of a batch that have rows in a step.

    requests: [R] with all that they have emitted
    places: [R] their places in the batch
    lens: [R] how many of their tokens are cached; at most, if only the device knows
    columns: of all requests of the batch
    is_whole: whether these are all of the batch
    """

    requests: Sequence[ServedRequest]
    places: Ints
    lens: Ints
    columns: Columns
    is_whole: bool = True

    @staticmethod
    def whole(requests: Sequence[ServedRequest], lens: Ints, columns: Columns) -> Members:
        """Return all requests of a batch."""
        return Members(requests, columns.places, lens, columns)

    @staticmethod
    def running(requests: Sequence[ServedRequest], columns: Columns) -> Members:
        """Return the requests that have rows in the next step, of those of a batch.

        Finished requests, of which the engine does not know yet, get no row. If all have finished,
        each keeps one, and the results are discarded.
        """
        lens = np.array([request.length for request in requests], np.int64) - 1
        running = [r for r, request in enumerate(requests) if request.finish_reason is None]
        if not running or len(running) == len(requests):
            return Members.whole(requests, lens, columns)
        return Members.whole(requests, lens, columns).take(np.array(running, np.int64))

    def take(self, some: Ints) -> Members:
        """Return these of them."""
        if len(some) == len(self.requests):
            return self
        requests = [self.requests[r] for r in some.tolist()]
        return Members(requests, self.places[some], self.lens[some], self.columns, is_whole=False)


@dataclass(frozen=True, eq=False)
class PrefillLaunch:
    """A prefill that was launched.

    reqs: the engine's requests
    lengths: of them, before the token that it emits
    ticket: the engine's
    """

    reqs: Sequence[Any]
    lengths: Sequence[int]
    ticket: Any


@dataclass(frozen=True, eq=False)
class Launched:
    """A decode step that was launched.

    members: the requests that have rows in it
    decision: which drafts they have
    early: whether it was launched before the one before it was known
    ticket: the engine's
    clock: of this step
    foreseen: what a draft server had, by the request's id, if a request asks
    """

    members: Members
    decision: Decision
    early: bool
    ticket: Any
    clock: StepClock
    foreseen: Mapping[int, str] = field(default_factory=dict)

    @property
    def requests(self) -> Sequence[ServedRequest]:
        """The requests that have rows in it."""
        return self.members.requests

    @property
    def columns(self) -> Columns:
        """Of all requests of its batch."""
        return self.members.columns

    @property
    def device_drafter(self) -> str:
        """The drafter that drafts on the device; "" if none does."""
        return self.decision.drafter if isinstance(self.decision, DeviceDrafts) else ""

    @property
    def is_written(self) -> bool:
        """Whether the device appends to the texts what the step emits."""
        return self.members.is_whole and not isinstance(self.decision, CpuDrafts)

    def num_drafts(self) -> Ints:
        """Return how many drafts each request has, [R]."""
        match self.decision:
            case CpuDrafts(proposal):
                return proposal.num_drafts
            case DeviceDrafts(num_drafts=num_drafts):
                return num_drafts
        return np.zeros(len(self.requests), np.int64)

    def prepare(self) -> None:
        """Compute now, while the device works, what settling needs of the drafts' layout."""
        if isinstance(self.decision, CpuDrafts):
            proposal = self.decision.proposal
            _ = proposal.parent_rows, proposal.owners, proposal.starts

    def running(self) -> Ints:
        """Return which of its requests have not ended in a step before it."""
        reasons = (request.finish_reason is None for request in self.requests)
        return np.flatnonzero(np.fromiter(reasons, np.bool_, len(self.requests)))

    def read(self, fetched: Tensor, running: Ints) -> tuple[Tensor, Proposal, Ints | None]:
        """Return what was emitted after each row of the running requests, and their drafts.

        The last are the drafts that the device made, verified or not: see `Report`.

        fetched: on the CPU; as the engine's `emitted` describes it
        running: which of the step's requests
        """
        all_run = len(running) == len(self.requests)
        if isinstance(self.decision, DeviceDrafts):
            return unpack(fetched, self.decision.num_drafts, None if all_run else running)
        if isinstance(self.decision, CpuDrafts) and all_run:
            return fetched, self.decision.proposal, None
        assert not isinstance(self.decision, CpuDrafts), "finished requests have no drafts"
        tokens = fetched if all_run else fetched[torch.from_numpy(running)]
        return tokens, Proposal.empty(len(running)), None


@dataclass(frozen=True, eq=False)
class Settled:
    """A decode step whose outcome is known.

    running: which of the step's requests had not ended before it. What it emitted for the others is
        discarded.
    proposal, outcomes: of the running requests
    """

    launched: Launched
    running: Ints
    proposal: Proposal
    outcomes: Outcomes

    @staticmethod
    def discarded(launched: Launched) -> Settled:
        """Return the outcome of a step whose requests had all ended before it."""
        return Settled(launched, np.empty(0, np.int64), Proposal.empty(0), Outcomes.of(()))

    @property
    def members(self) -> Members:
        """The running requests."""
        return self.launched.members.take(self.running)

    def drafter_names(self) -> list[str]:
        """Return the drafter of each running request.

        Without drafts that is its usual one, or "none" if control decides it in each step.
        """
        decision, requests = self.launched.decision, self.members.requests
        if isinstance(decision, DeviceDrafts):
            return [decision.drafter if n else "none" for n in self.proposal.num_drafts.tolist()]
        names = decision.names if isinstance(decision, CpuDrafts) else [""] * len(requests)
        usual = ["none" if r.drafter == ADAPTIVE else r.drafter for r in requests]
        return [name or own for name, own in zip(names, usual, strict=True)]

    def kept_rows(self) -> Ints:
        """Return which rows of the result were kept, in the order of the outcomes' tokens."""
        rows: Ints = self.proposal.root_rows[self.outcomes.owners] + self.outcomes.rows
        all_run = len(self.running) == len(self.launched.requests)
        return rows if all_run else self.running[rows]


class Engine(Protocol):
    """What the served step asks of the engine that it runs in."""

    def prepare(self, batch: Batch, requests: Sequence[ServedRequest]) -> Batch:
        """Return the batch, now that nothing is in flight: `own`, `lens` and `room` as they are."""
        ...

    def choose_pass(self, batch: Batch, members: Members, decision: CpuDrafts) -> CpuDrafts:
        """Return the decision with what verifies its drafts: a padded pass or rows."""
        ...

    def lay_out(
        self, batch: Batch, members: Members, decision: Decision, drafts: DeviceRows | None
    ) -> Any:
        """Return the rows of a step.

        drafts: those of the device, if it makes them
        """
        ...

    def run(self, rows: Any) -> Any:
        """Launch the target's pass and the sampling of its rows. Does not wait.

        Returns a ticket: what the engine knows the step by.
        """
        ...

    def emitted(self, ticket: Any) -> Tensor:
        """Wait for a step. Return what it emitted after each row, on the CPU.

        After a step with drafts of the device, the drafts follow: see `device.unpack`.
        """
        ...

    def first_tokens(self, ticket: Any) -> Sequence[int]:
        """Wait for a prefill. Return the token that it emitted for each request.

        If this token ends a request, the engine ignores later steps with it: `keep` is not asked.
        """
        ...

    def keep(
        self,
        launched: Launched,
        running: Ints,
        requests: Sequence[ServedRequest],
        tokens: Ints,
        counts: Ints,
    ) -> tuple[Ints, Sequence[FinishReason | None]]:
        """Return how many of its tokens each request keeps, and why it ends there: see `Keep`.

        running: which of the step's requests these are
        """
        ...

    def place(self, settled: Settled) -> None:
        """Put the slots of a tree's path into the order of its tokens. Chains need nothing."""
        ...


Describe = Callable[[Any, int], ServedRequest]
"""Returns the state of an engine's request, given a number that no other request has."""
