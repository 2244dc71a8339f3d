"""Whether the draft model is worth its passes: for which requests, and how deep.

Two estimates of the model's acceptance are used. The *expected* one decides what a step promises.
The *optimistic* one decides for whom the model is tried besides: it is higher for requests that
little is known about, and it grows with each step in which the model is not called. If even 100 %
acceptance would not pay for the draft passes, the model is not called.

The model has an *account* of time, so that it cannot make decoding much slower, whatever the
estimates say. Time saved by the model is credited; time lost is debited, by what was measured. A
small share of the time of every step is credited too. While the account is overdrawn, the model is
not called; and it is called for the optimistic estimate's sake only while the account is nearly
full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from outrider.control.acceptance import Acceptance
from outrider.control.cost import DraftCost, StepCost
from outrider.control.policy import NO_INDICES, best_goodput
from outrider.control.step import NO_PASSES, Passes, Situation, Step
from outrider.core import Bools, Drafter, Floats, Ints, Proposal, Request

FREE_SHARE = 0.01
"""Share of all time that a model which never pays may cost: see `Account`."""

MAX_CREDIT = 8.0
"""The most that an account holds, and what a new one has, in plain steps. What single steps gain or
lose must be well below it."""

MAX_DEBT = 4.0
"""The most that an account can owe, in plain steps. Where the machine stands still for a moment, a
step takes long, and not because of the model: the model is not called for MAX_DEBT / FREE_SHARE
steps then, however long the moment was."""

TRY_CREDIT = 2.0
"""How much of the credit can be spent on tries, in plain steps."""

MIN_RECENT_SHARE, RECENT_MEMORY = 0.5, 0.95
"""A step with the model must promise at least MIN_RECENT_SHARE of the goodput of the recent steps.
(Where lookups have served well, they soon will again, and a long step with the model costs more
than it brings.) With each step, the weight of those before falls by the factor RECENT_MEMORY."""

DEPTHS = np.array([1, 2, 3, 4, 6, 8, 12, 16])
"""Numbers of draft passes that are compared."""


class PassingDrafter(Drafter, Protocol):
    """A drafter that runs passes of a model. The first pass reads the text that is new to it.

    It may have one more attribute, `drafts_per_pass`: how deep the drafts of one pass go, if it is
    more than one token.
    """

    def unread(self, request: Request) -> int:
        """Return how many tokens of a request the next pass will consume."""
        ...

    def ready(self, request: Request) -> bool:
        """Say whether the next pass can draft for a request. If not, it must catch up first."""
        ...

    def catch_up(self, requests: Sequence[Request]) -> int:
        """Read a part of the unread text of requests that are not ready. Return its tokens."""
        ...


@dataclass(frozen=True, eq=False)
class Call:
    """Whether the draft model is called in a step, and for which requests.

    goodput: that is expected of the step
    users: the requests that the model drafts for, as indices
    passes: what the model has done for the step so far
    """

    goodput: float
    users: Ints
    passes: Passes = NO_PASSES


class Account:
    """Time that the draft model saved or lost, in plain steps. It may spend no more than there is.

    balance: what is left
    """

    def __init__(self) -> None:
        self.balance = MAX_CREDIT
        self._plain = self._seconds = 0.0  # of recent steps: if they had been plain, and as it was

    @property
    def gain(self) -> float:
        """How many times as fast as plain decoding the recent steps were."""
        return self._plain / self._seconds if self._seconds else 1.0

    @property
    def is_overdrawn(self) -> bool:
        """Whether the model must not be called."""
        return self.balance < 0.0

    @property
    def allows_tries(self) -> bool:
        """Whether the model may be called though it is not expected to pay."""
        return self.balance > MAX_CREDIT - TRY_CREDIT

    def observe(self, step: Step, plain: float, takes_part: bool = True) -> None:
        """Credit the time that a step saved, or debit the time that it lost.

        plain: seconds of a plain step of its requests
        takes_part: whether the model had a part in it
        """
        without = step.passes.without if takes_part else 0.0
        saved = step.tokens / without - step.seconds if without else 0.0
        paid = (FREE_SHARE * step.seconds + saved) / plain if plain else 0.0
        self.balance = max(-MAX_DEBT, min(self.balance + paid, MAX_CREDIT))
        self._plain = RECENT_MEMORY * self._plain + step.tokens / step.requests * plain
        self._seconds = RECENT_MEMORY * self._seconds + step.seconds


class ModelChoice:
    """Decides when to call the draft model, and calls it.

    name: of the model
    cost: time of its passes
    account: of the time that it may cost
    margin: share by which a step with the model must beat one without
    """

    def __init__(
        self,
        model: PassingDrafter,
        acceptance: Acceptance,
        cost: StepCost,
        margin: float,
        clock: Callable[[], float],
    ) -> None:
        self._model, self._acceptance, self._step_cost = model, acceptance, cost
        self.cost = DraftCost(cost.row_buckets)
        self.name, self._margin, self._clock = model.name, margin, clock
        self._drafts_per_pass: int = getattr(model, "drafts_per_pass", 1)
        self._chances = acceptance.add(model.name, has_prior=True)
        assert self._chances.prior is not None
        self._prior = self._chances.prior
        self.account = Account()
        # steps since the model was last called: for each request, and for any
        self._idle: dict[int, int] = {}
        self._rest = 0
        self._woke = False  # control is awake for the model's sake
        # [B] chance of a draft in this step: see `estimate`
        self._expected = self._optimistic = np.empty(0)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._idle.pop(request.id, None)

    def estimate(self, now: Situation) -> None:
        """Estimate the model's acceptance in this step. Call it once in each, before all else.

        It counts the steps without the model.
        """
        batch = len(now.requests)
        self._expected = self._optimistic = self._prior.of(now.rows, np.ones(batch))
        self._rest += 1
        ids = [request.id for request in now.requests]
        idle = [self._idle.get(id_, self._rest - 1) + 1 for id_ in ids]
        self._idle.update(zip(ids, idle, strict=True))
        if self.account.allows_tries:
            self._optimistic = self._prior.optimistic(now.rows, np.ones(batch), np.array(idle))

    def bid(self, now: Situation, without: float) -> float:
        """Return the goodput that the model may reach; 0 if it should not be called.

        without: goodput without the model
        """
        goodput, users = self._may_use(now, without)
        return goodput if users.any() else 0.0

    def call(self, now: Situation, without: float) -> Call:
        """Decide which requests the model should draft for, if any.

        Requests that are not ready catch up, if the model may pay for them later.

        without: goodput without the model
        """
        woke, self._woke = self._woke, False
        if self.account.is_overdrawn:
            return Call(without, NO_INDICES)
        most = now.budget.max_drafts
        unread = np.array([self._model.unread(request) for request in now.requests])
        ready = np.array([self._model.ready(request) for request in now.requests])
        caught_up = 0
        if not ready.all():
            # catching up is done once and serves all later steps: it is not charged to this one
            wanted = self._may_use(now, without)[1]
            behind = [now.requests[r] for r in np.flatnonzero(wanted & ~ready).tolist()]
            caught_up = self._model.catch_up(behind)
            most = np.where(ready, most, 0)
        goodput, users = self._best(now, self._expected, without, most, unread)
        if self.account.allows_tries and not users.all():
            users = users | self._best(now, self._optimistic, goodput, most, unread)[1]
        passes = NO_PASSES
        if woke or caught_up or users.any():
            passes = Passes(self.name, without, caught_up)
        return Call(goodput, np.flatnonzero(users), passes)

    def wake(self, now: Situation) -> bool:
        """Wake control if the model may pay for the waits of a step with drafts.

        The next step is then compared with one without the model, used or not.

        now: its times include these waits
        """
        self._woke = bool(self._may_use(now, now.plain_goodput)[1].any())
        return self._woke

    def draft(self, now: Situation, call: Call) -> tuple[Proposal, Passes]:
        """Let the model draft, until a further pass is not worth its time.

        call: of this step; it has users
        """
        requests, budget, users = now.requests, now.budget, call.users
        self._rest = 0
        for r in users.tolist():
            self._idle[requests[r].id] = 0
        most = np.zeros(len(requests), np.int64)
        most[users] = budget.max_drafts[users]
        unread = sum(self._model.unread(requests[r]) for r in users.tolist())
        gain = self._min_gain(now, most, call)
        asked = replace(budget, max_drafts=most, min_gain=gain, chances=self._draft_chances)
        started = self._clock()
        proposal = self._model.propose(requests, asked)
        passes = replace(
            call.passes,
            count=max(1, self._passes(proposal.max_depth)),
            users=len(users),
            unread=unread,
            seconds=self._clock() - started,
        )
        return proposal, passes

    def learn(self, step: Step, plain: float) -> None:
        """Learn from a step: what drafting took, and what the model has saved or lost.

        plain: seconds of a plain step of its requests
        """
        passes, cpu = step.passes, self._step_cost.cpu
        takes_part = passes.model == self.name
        self.account.observe(step, plain, takes_part)
        if not takes_part or not passes.count or passes.caught_up:
            return
        seconds = passes.seconds
        if step.follows and cpu.has_seen(step.requests):
            # joining two offers and all else that a step without the model does not have
            seconds += max(0.0, step.cpu_seconds - cpu.seconds(step.requests))
        self.cost.observe(passes.count, passes.users, passes.unread, seconds)

    def _min_gain(self, now: Situation, most: Ints, call: Call) -> float:
        """Return the expected number of accepted drafts that justifies another draft pass.

        A pass takes its own time, and adds one row per user to the target's pass.

        most: [B] the most drafts of each request
        """
        batch, users = len(now.requests), len(call.users)
        rows, width = batch + int(most.sum()), now.feasible.padded_width
        table = self._step_cost.table(rows, now.context, batch, width)
        row = (table[-1] - table[batch + 1]) / most.sum()
        gain = call.goodput * float(self.cost.passes.seconds(users) + users * row)
        return min(gain, 0.99 * users)  # the first pass is always made

    def _passes(self, depth: int) -> int:
        """Return how many passes drafts of this depth take."""
        return -(-depth // self._drafts_per_pass)

    def _draft_chances(
        self, requests: Sequence[Request], confidences: Sequence[float]
    ) -> list[float]:
        """Return the chances of drafts, for the model to decide whether to go on.

        They are never above the model's own confidences: calibration comes from other texts, and
        may be too high for this one.
        """
        sure = np.array(confidences)
        rows = self._acceptance.rows([request.id for request in requests])
        found: list[float] = np.minimum(sure, self._chances.first.of(rows, sure)).tolist()
        return found

    def _may_use(self, now: Situation, without: float) -> tuple[float, Bools]:
        """Return the goodput that the model may reach, and its users, if no text is unread."""
        batch = len(now.requests)
        if self.account.is_overdrawn:
            return without, np.zeros(batch, np.bool_)
        ones = np.ones(batch, np.int64)
        return self._best(now, self._optimistic, without, now.budget.max_drafts, ones)

    def _best(
        self,
        now: Situation,
        chances: Floats,
        goodput: float,
        most: Ints,
        unread: Ints,
    ) -> tuple[float, Bools]:
        """Return the best goodput with the model and its users; no users if it does not pay.

        chances: [B] of each draft that the model would make for a request
        goodput: without the model, to be beaten by the margin
        most: [B] the most drafts
        unread: [B] tokens that the model must consume first
        """
        batch, owners, survival = len(chances), now.plan.tree.owners, now.plan.survival
        worth = np.bincount(owners, survival, batch)
        least = goodput * (1 + self._margin)
        least = max(least, MIN_RECENT_SHARE * self.account.gain * batch / float(now.seconds[batch]))
        depths = DEPTHS[most.max(initial=0) >= DEPTHS]
        places = np.arange(depths.max(initial=0))
        own = chances[:, None] ** (places + 1)
        own[places >= most[:, None]] = 0.0
        # [depths, B]: which requests would be drafted for, if chains had this depth
        users = worth < own.cumsum(1)[:, depths - 1].T
        depths, users = depths[users.any(1)], users[users.any(1)]
        if not len(depths):
            return goodput, np.zeros(batch, np.bool_)
        mine = (users[..., None] & (places < depths[:, None, None])) * own
        others = ~users[:, owners] * survival
        counts, new = users.sum(1).tolist(), (users * unread).sum(1).tolist()
        drafting = np.array(
            [
                self.cost.seconds(self._passes(depth), *of)
                for depth, *of in zip(depths.tolist(), counts, new, strict=True)
            ]
        )
        drafts = np.concatenate([mine.reshape(len(depths), -1), others], 1)
        promised = best_goodput(drafts, batch, now.seconds + drafting[:, None])
        best = int(promised.argmax())  # of equals the shallowest
        if promised[best] <= least:
            return goodput, np.zeros(batch, np.bool_)
        return float(promised[best]), users[best]
