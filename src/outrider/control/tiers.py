"""SGLang's own adaptive rule, for comparison: one number of drafts for the whole batch.

The rule and its constants are those of `--speculative-adaptive` in SGLang 0.5.11
(adaptive_spec_params.py). It uses acceptance only, not time. Later versions of SGLang keep tiers
for each range of batch sizes, and have a tier of 0 drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.core import Budget, Drafter, Outcome, Proposal, Request

RATE = 0.2
"""Weight of a step in the moving average of accepted drafts per request."""

WARM_UP, INTERVAL = 10, 5
"""Steps before the first decision, and between decisions."""

SHORT = 0.5
"""The rule leaves a tier of K drafts for the next one above K - SHORT accepted drafts."""

HYSTERESIS = 0.25
"""It returns to that tier only when the average is lower by this much."""


class TieredDrafter:
    """Limits the drafts of another drafter to the current tier.

    model: the drafter
    tiers: numbers of drafts to choose from; it starts with the middle one
    """

    name = "tiers"

    def __init__(self, model: Drafter, tiers: Sequence[int] = (1, 3, 7)) -> None:
        if not tiers or min(tiers) < 1:
            raise ValueError("tiers are numbers of drafts, at least one of them, all above 0")
        self._model, self._tiers = model, sorted(set(tiers))
        self._at = len(self._tiers) // 2
        self._average = self.drafts - 1.0  # far from both limits
        self._steps = 0

    @property
    def drafts(self) -> int:
        """The number of drafts of the current tier."""
        return self._tiers[self._at]

    def start(self, requests: Sequence[Request]) -> None:
        """Introduce the requests to the drafter."""
        self._model.start(requests)

    def stop(self, requests: Sequence[Request]) -> None:
        """Let the drafter forget the requests."""
        self._model.stop(requests)

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Return at most this tier's number of drafts for each request."""
        most = np.minimum(self.drafts, budget.max_drafts)
        return self._model.propose(requests, replace(budget, max_drafts=most))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn how many drafts were accepted. Every INTERVAL steps, change the tier if needed."""
        self._model.observe(outcomes)
        # the end of a request cuts its last step short: such a step says nothing about its drafts
        accepted = [
            o.num_accepted_drafts for o in outcomes if o.num_drafts and o.finish_reason is None
        ]
        if not accepted:
            return
        self._average += RATE * (sum(accepted) / len(accepted) - self._average)
        self._steps += 1
        if self._steps > WARM_UP and (self._steps - WARM_UP) % INTERVAL == 0:
            self._move()

    def _move(self) -> None:
        """Go down, or else up, by as many tiers as the average requires."""
        before, tiers = self._at, self._tiers
        while self._at and self._average <= tiers[self._at - 1] - SHORT - HYSTERESIS:
            self._at -= 1
        if self._at < before:
            return
        while self._at < len(tiers) - 1 and self._average > tiers[self._at] - SHORT:
            self._at += 1
