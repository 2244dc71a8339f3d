"""Whether the device should make the drafts, and how many for each request.

A host may be able to look drafts up on the device, and to launch such a step before the step before
it is known. This costs no wait. But how many drafts a request gets must be said before anybody
knows whether there are good ones. So what counts is how many of its drafts were accepted in its
last steps: the chance of a draft depends on its request and its depth.

A depth stands for a confidence: `Chances` learns a probability for each, and a shift for each
request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.control.acceptance import Acceptance
from outrider.control.cost import StepCost
from outrider.control.model_choice import Situation
from outrider.control.plan import Offer
from outrider.control.policy import goodputs
from outrider.control.scoring import levels
from outrider.core import Bools, Floats, Ints, Outcomes, Request

NAME = "device"

MOST = 16
"""The most drafts of a request. The chance of a deep one is learned late."""

LARGEST = 32
"""The largest batch. In larger ones a row costs time, and control looks seldom."""

DEPTHS = np.array([0.05, 0.15, 0.25, 0.35, 0.45, 0.45, 0.55, 0.55, *[0.65] * 4, *[0.75] * 4])
"""What stands for the confidence of a draft at depth 1, 2, ..."""

STAY, SWITCH = 0.1, 0.002
"""The host's drafts must promise so much more, to be used instead: what they promise at one moment
is not what they reach. The device's must promise more by the margin, and by SWITCH for each
request: going back and forth costs waits."""

TRY, TRIAL, SLOWLY = 64, 8, 4
"""After TRY looks without the device's drafts, it is tried again if they may be better than they
were: so many looks count for one. It then drafts for TRIAL steps at least."""

CHECK, CLOSE = 256, 1.2
"""If the device's drafts gain less than CLOSE, a plain step is made after so many looks."""

RATE = 0.05
"""Weight of a step in moving averages."""


class DeviceChoice:
    """Decides whether the device drafts.

    is_possible: whether the host says that it could in the next step
    widths: how many drafts each request gets, by id; empty while the device makes none
    goodput: tokens per second that are expected of them
    """

    def __init__(self, acceptance: Acceptance, cost: StepCost, margin: float) -> None:
        self._chances = acceptance.add(NAME).first
        self._acceptance, self._cost, self._margin = acceptance, cost, margin
        self.is_possible = False
        self.widths: dict[int, int] = {}
        self.goodput = 0.0
        self._idle = self._steps = 0  # looks since the device last drafted, and since it does
        self._pace = 1.0  # how much longer its steps take than expected
        self._others = 0.0  # goodput of the host's drafts, on average

    def of(self, requests: Sequence[Request]) -> Ints:
        """Return how many drafts the device makes for each of these requests."""
        widths = self.widths
        return np.array([widths.get(request.id, 0) for request in requests], np.int64)

    def stop(self) -> None:
        """Let the device draft no more."""
        self.widths = {}

    def is_best(self, now: Situation, context: int, others: float) -> bool:
        """Say whether the device should draft in the next steps.

        others: goodput that the host's own drafts would have reached in this one
        """
        batch = len(now.requests)
        if not self.is_possible or batch > LARGEST:
            self.stop()
            return False
        plain, weight = batch / float(now.seconds[batch]), 1 - (1 - RATE) ** (batch**0.5)
        self._others += weight * (others - self._others)
        bar = max(plain, self._others)
        if not self.widths:
            # all of a large batch is told the device before its first step
            bar *= 1 + self._margin + SWITCH * batch
            self._steps, self._idle = 0, self._idle + 1
            return self._decide(now, context, bar)
        self._steps, self._idle = self._steps + 1, 0
        if self._steps >= CHECK and self.goodput < CLOSE * plain:
            self.stop()  # for a step: the time of plain ones must be recent
            return False
        if self._steps * (1 + batch // 16) < TRIAL:
            return True
        return self._decide(now, context, max(plain, (1 - STAY) * bar))

    def learn_time(self, rows: int, context: int, batch: int, seconds: float) -> None:
        """Learn how long a step took in which the device drafted, launched ahead."""
        expected = float(self._cost.ahead_table(rows, context, batch)[-1])
        if expected:
            ratio = min(max(seconds / expected, 0.5), 2.0)
            self._pace += RATE * (ratio - self._pace)

    def learn(self, outcomes: Outcomes) -> None:
        """Learn from a step in which the device drafted."""
        request = self._acceptance.rows([request.id for request in outcomes.requests])
        goes_on = np.array([reason is None for reason in outcomes.finish_reasons])
        accepted, widths = outcomes.num_accepted_drafts, outcomes.num_drafts
        for depth in range(1, min(MOST, int(widths.max())) + 1):
            tried = np.flatnonzero(goes_on & (widths >= depth) & (accepted >= depth - 1))
            if not len(tried):
                return
            self._observe(request[tried], depth, accepted[tried] >= depth)

    def learn_from(self, offer: Offer, rows: Ints, outcomes: Outcomes) -> None:
        """Learn from a lookup of the host's, of which the device's would not have been far.

        rows: [B] of the requests: see `Acceptance.rows`
        """
        if len(rows) > LARGEST:
            return
        drafts = offer.drafts
        for depth, (nodes, hits) in enumerate(levels(offer, outcomes), start=1):
            first = drafts.ranks[nodes] == 0
            self._observe(rows[drafts.owners[nodes[first]]], depth, hits[first])
            if depth == MOST:
                break
        without = np.setdiff1d(np.arange(len(rows)), drafts.owners)
        self._observe(rows[without], 1, np.zeros(len(without), np.bool_))

    def _observe(self, rows: Ints, depth: int, hits: Bools) -> None:
        self._chances.observe(rows, np.full(len(rows), DEPTHS[depth - 1]), hits)

    def _survival(self, now: Situation) -> Floats:
        """Return the chance that each request's drafts are accepted up to each depth, [B, K]."""
        most = np.minimum(now.budget.max_drafts, MOST)
        batch, deepest = len(most), int(most.max(initial=0))
        rows, sure = np.repeat(now.rows, deepest), np.tile(DEPTHS[:deepest], batch)
        chances = self._chances.of(rows, sure)
        if self._idle > TRY:
            chances = self._chances.optimistic(rows, sure, np.full(len(rows), self._idle / SLOWLY))
        survival = chances.reshape(batch, deepest).cumprod(1)
        survival[np.arange(deepest) >= most[:, None]] = 0.0
        return survival

    def _decide(self, now: Situation, context: int, bar: float) -> bool:
        """Choose the widths of highest goodput. Return whether it is above the bar."""
        survival = self._survival(now)
        batch, drafts = survival.shape[0], survival.ravel()
        if not drafts.any():
            self.stop()
            return False
        order = np.argsort(-drafts, kind="stable")[: len(now.seconds) - batch - 1]
        order = order[drafts[order] > 0]
        table = self._cost.ahead_table(batch + len(order), context, batch)
        table[batch + 1 :] *= self._pace
        goodput = goodputs(drafts[order], batch, table)[1]
        best = int(goodput.argmax())
        if not best or goodput[best] <= bar:
            self.stop()
            return False
        widths = np.bincount(order[:best] // survival.shape[1], minlength=batch).tolist()
        ids = [request.id for request in now.requests]
        self.goodput = float(goodput[best])
        self.widths = dict(zip(ids, widths, strict=True))
        return True
