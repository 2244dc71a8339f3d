"""Whether the device should make the drafts, and how many for each request.

The engine may be able to look drafts up on the device, or to let a head draft there, and to launch
such a step before the outcome of the step before it is known. This costs no wait. But the number of
drafts of each request must be chosen before the CPU can know whether they are good. Survival is
therefore estimated from recent acceptance: the chance of a draft depends on its request and depth.

A depth stands for a confidence: `Chances` learns a probability for each, and a shift for each
request. A head's chances are learned from all that it drafts, on the device or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.control.acceptance import Acceptance, Chances
from outrider.control.cost import StepCost
from outrider.control.curve import Curve
from outrider.control.decision import DeviceDrafts
from outrider.control.model_choice import DEPTHS as PASSES
from outrider.control.model_choice import ModelChoice
from outrider.control.plan import Offer
from outrider.control.policy import goodputs
from outrider.control.scoring import levels
from outrider.control.step import Situation, Step
from outrider.core import Bools, Floats, Ints, Outcomes, Request

NAME = "device"
"""The lookup."""

MAX_DRAFTS = 16
"""The most drafts of a request. The chance of a deep one is learned late."""

MAX_BATCH = 32
"""The largest batch. In larger ones a row costs time, and control seldom scores unused drafts."""

DEPTHS = np.array([0.05, 0.15, 0.25, 0.35, 0.45, 0.45, 0.55, 0.55, *[0.65] * 4, *[0.75] * 4])
"""What stands for the confidence of a draft at depth 1, 2, ..."""

STAY_SHARE, SWITCH_SHARE = 0.1, 0.002
"""The CPU's drafts must promise more than the device's by STAY_SHARE, to be used instead: what they
promise at one moment is not what they reach. The device's must promise more by the margin, and by
SWITCH_SHARE for each request: going back and forth costs waits."""

RETRY_AFTER, TRIAL_STEPS, IDLE_PER_STEP = 64, 8, 4
"""After RETRY_AFTER decisions without the device's drafts, it is tried again if they may be better
than they were: IDLE_PER_STEP decisions count as one step. It then drafts for TRIAL_STEPS at
least."""

PLAIN_CHECK_EVERY, SMALL_GAIN = 256, 1.2
"""If the device's drafts gain less than SMALL_GAIN, a plain step is made after PLAIN_CHECK_EVERY
decisions. Beside a head, its lookup counts for at most SMALL_GAIN times what the CPU's lookup finds
now."""

MIN_DRAFTS_SEEN = 64
"""Drafts of a depth that must have been seen to know how likely a head's are."""

MIN_PASS_SHARE = 0.01
"""The least share of a step that a head's passes take, whatever was measured."""

RATE = 0.05
"""Weight of a step in moving averages."""


@dataclass(eq=False)
class Arm:
    """One way to draft on the device.

    name: NAME, or that of a head
    chances: of its drafts
    head: what is known of it in steps that wait for its drafts; None for the lookup
    passes: the time of a pass of the head in such a step, by requests
    reached: goodput of steps that wait for the head's drafts, on average
    """

    name: str
    chances: Chances
    head: ModelChoice | None = None
    passes: Curve = field(default_factory=Curve)
    reached: float = 0.0

    def seconds(self, depth: int, batch: int) -> float:
        """Return how long it takes to draft so deep. A lookup takes no time."""
        if self.head is None:
            return 0.0
        if self.passes.has_seen(batch):
            return depth * self.passes.seconds(batch)
        return self.head.cost.seconds(depth, batch, 2 * batch)

    def observe(self, outcomes: Outcomes, rows: Ints) -> None:
        """Learn from a step in which it drafted. rows: [B] of the requests, see `Acceptance`"""
        goes_on = np.array([reason is None for reason in outcomes.finish_reasons])
        accepted, widths = outcomes.num_accepted_drafts, outcomes.num_drafts
        for depth in range(1, min(MAX_DRAFTS, int(widths.max())) + 1):
            tried = np.flatnonzero(goes_on & (widths >= depth) & (accepted >= depth - 1))
            if not len(tried):
                return
            self.learn(rows[tried], depth, accepted[tried] >= depth)

    def observe_offer(self, offer: Offer, rows: Ints, outcomes: Outcomes) -> None:
        """Learn from drafts of the CPU, which are much like those of the device."""
        drafts = offer.drafts
        for depth, (nodes, hits) in enumerate(levels(offer, outcomes), start=1):
            first = drafts.ranks[nodes] == 0
            self.learn(rows[drafts.owners[nodes[first]]], depth, hits[first])
            if depth == MAX_DRAFTS:
                break
        if self.head is None:  # a head that drafted nothing was not asked
            without = np.setdiff1d(np.arange(len(rows)), drafts.owners)
            self.learn(rows[without], 1, np.zeros(len(without), np.bool_))

    def learn_reached(self, goodput: float) -> None:
        """Learn from a step that waited for the head's drafts."""
        self.reached += RATE * (goodput - self.reached) if self.reached else goodput

    def learn(self, rows: Ints, depth: int, hits: Bools) -> None:
        """Learn which drafts at a depth were right, of those whose parents were."""
        self.chances.observe(rows, np.full(len(rows), DEPTHS[depth - 1]), hits)


class DeviceChoice:
    """Decides whether the device drafts, and how.

    drafter: the one that drafts there, while the device makes drafts
    widths: how many drafts each request gets, by id; empty while the device makes none
    goodput: tokens per second that are expected of them
    """

    def __init__(
        self, acceptance: Acceptance, cost: StepCost, margin: float, is_allowed: bool = True
    ) -> None:
        self.arms = {NAME: Arm(NAME, acceptance.add(NAME).first)}
        self._acceptance, self._cost, self._margin = acceptance, cost, margin
        self._is_allowed, self.drafter = is_allowed, NAME
        self.widths: dict[int, int] = {}
        self.goodput = 0.0
        self._idle = self._steps = 0  # decisions since the device last drafted, and since it does
        self._pace = 1.0  # how much longer its steps take than expected
        self._others = 0.0  # goodput of the CPU's drafts, on average

    def add(self, head: ModelChoice) -> None:
        """Let a head draft on the device too."""
        chances = self._acceptance.add(f"{head.name} on the device").first
        self.arms[head.name] = Arm(head.name, chances, head)

    @property
    def active(self) -> str:
        """The drafter that drafts on the device; "" if none does."""
        return self.drafter if self.widths else ""

    def drafts(self, requests: Sequence[Request]) -> DeviceDrafts | None:
        """Return what the device drafts for these requests; None if it is nothing."""
        if not self.widths:
            return None
        num_drafts = np.array([self.widths.get(request.id, 0) for request in requests], np.int64)
        return DeviceDrafts(self.drafter, num_drafts) if num_drafts.any() else None

    def stop(self) -> None:
        """Let the device draft no more."""
        self.widths = {}

    def choose(self, now: Situation, others: float) -> bool:
        """Choose whether the device drafts in the next steps, and how. Return whether it does.

        others: goodput that drafts of the CPU would have reached in this one
        """
        batch, on_device = len(now.requests), now.feasible.on_device
        if not self._is_allowed or NAME not in on_device or batch > MAX_BATCH:
            self.stop()
            return False
        if self.drafter not in on_device:
            self.stop()  # after a fault, or because it has fallen behind
        plain, weight = now.plain_goodput, 1 - (1 - RATE) ** (batch**0.5)
        self._others += weight * (others - self._others)
        if not self.widths:
            self._steps, self._idle = 0, self._idle + 1
            # all texts of a batch are copied to the device before its first step
            more = 1 + self._margin + SWITCH_SHARE * batch
            return self._decide(now, others, more * plain, more)
        self._steps, self._idle = self._steps + 1, 0
        if self._steps >= PLAIN_CHECK_EVERY and self.goodput < SMALL_GAIN * plain:
            self.stop()  # for a step: the time of plain ones must be recent
            return False
        is_new = any(request.id not in self.widths for request in now.requests)
        if self._steps * (1 + batch // 16) < TRIAL_STEPS and not is_new:
            return True
        return self._decide(now, others, plain, 1 - STAY_SHARE)

    def learn_time(self, step: Step, depth: int) -> None:
        """Learn how long a step took in which the device drafted so deep, launched early."""
        table = self._cost.early_table(step.rows, step.context, step.requests)
        expected, arm = float(table[-1]), self.arms.get(step.on_device)
        if not expected or arm is None:
            return
        if arm.head is None:
            ratio = min(max(step.seconds / expected, 0.5), 2.0)
            self._pace += RATE * (ratio - self._pace)
        else:
            more = max(step.seconds - expected, MIN_PASS_SHARE * step.seconds)
            arm.passes.observe(step.requests, more / depth)

    def _survival(self, arm: Arm, now: Situation) -> Floats:
        """Return the chance that each request's drafts are accepted up to each depth, [B, K]."""
        most = np.minimum(now.budget.max_drafts, MAX_DRAFTS)
        batch, deepest = len(most), int(most.max(initial=0))
        rows, sure = np.repeat(now.rows, deepest), np.tile(DEPTHS[:deepest], batch)
        chances = arm.chances.of(rows, sure)
        # a head is tried in steps that wait for it: there its tries are paid for
        if self._idle > RETRY_AFTER and arm.head is None:
            chances = arm.chances.optimistic(
                rows, sure, np.full(len(rows), self._idle / IDLE_PER_STEP)
            )
        chances = chances.reshape(batch, deepest)
        if arm.head is not None:
            tries = arm.chances.tries(DEPTHS[:deepest])
            for depth in np.flatnonzero(tries < MIN_DRAFTS_SEEN).tolist():
                if depth:  # little is known: as likely as the one before it, until it is tried
                    chances[:, depth] = np.maximum(chances[:, depth], chances[:, depth - 1])
        survival = chances.cumprod(1)
        survival[np.arange(deepest) >= most[:, None]] = 0.0
        return survival

    def _decide(self, now: Situation, others: float, plain: float, share: float) -> bool:
        """Choose the drafter, and the widths of highest goodput. Return whether there is one.

        others: see `choose`
        plain: goodput that must be exceeded
        share: of what the CPU's drafts reach, that must be exceeded too
        """
        found: tuple[float, str, Ints] | None = None
        was = self.drafter if self.widths else ""
        for name, arm in self.arms.items():
            if name not in now.feasible.on_device:
                continue
            goodput, widths = self._best(arm, now)
            least = max(plain, share * self._others)
            if arm.head is not None:
                # where there is nothing to look up, what lookups reach elsewhere does not matter
                least = max(plain, share * min(self._others, others))
                least = least if name == was else max(least, arm.reached)
            elif len(now.feasible.on_device) > 1:
                # what is copied ends all at once: the CPU's lookup sees that first
                goodput = min(goodput, SMALL_GAIN * others)
            if was and name != was:
                least = max(least, self.goodput * (1 + self._margin))
            if goodput > least and (found is None or goodput > found[0]):
                found = goodput, name, widths
        if found is None:
            self.stop()
            return False
        self.goodput, self.drafter, widths = found
        ids = [request.id for request in now.requests]
        self.widths = dict(zip(ids, widths.tolist(), strict=True))
        return True

    def _best(self, arm: Arm, now: Situation) -> tuple[float, Ints]:
        """Return the highest goodput of a way to draft, and its widths."""
        survival = self._survival(arm, now)
        batch, deepest = survival.shape
        most_rows = min(len(now.seconds) - 1, batch + survival.size)
        table = self._cost.early_table(most_rows, now.context, batch)
        if arm.head is None:
            table[batch + 1 :] *= self._pace
        best, widths = 0.0, np.zeros(batch, np.int64)
        for depth in PASSES[deepest >= PASSES].tolist() if arm.head else [deepest]:
            drafts = survival[:, :depth].ravel()
            order = np.argsort(-drafts, kind="stable")[: most_rows - batch]
            order = order[drafts[order] > 0]
            seconds = table + arm.seconds(depth, batch)
            seconds[batch] = table[batch]  # without drafts there are no passes
            goodput = goodputs(drafts[order], batch, seconds)[1]
            taken = int(goodput.argmax())
            if taken and goodput[taken] > best:
                best = float(goodput[taken])
                widths = np.bincount(order[:taken] // depth, minlength=batch)
        return best, widths
