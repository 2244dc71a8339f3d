"""One number of drafts for the whole batch, moved by acceptance alone: something to compare with.

The rule is that of SGLang's `--speculative-adaptive` (read in 0.5.11, adaptive_spec_params.py), so
its numbers are SGLang's: tiers 1, 3, 7; average by 0.2; warm-up 10; every 5 steps; -0.5 and -0.25.
Later versions keep tiers for each range of batch sizes, 0 among them. Time is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.core import Budget, Drafter, Law, Outcome, Proposal, Request

RATE = 0.2
"""How far the average moves to what a step's requests had accepted in the mean."""

WARM_UP, INTERVAL = 10, 5
"""Steps before the first decision, and from one to the next."""

SHORT = 0.5
"""Above a tier of K drafts go those who have more than K - SHORT of them accepted..."""

HYSTERESIS = 0.25
"""...and back to it those who have this much fewer."""


class TieredDrafter:
    """Cuts what another drafter may draft to the tier that is in force.

    model: who drafts
    tiers: numbers of drafts to choose from; the middle one is the first
    """

    name = "tiers"

    def __init__(self, model: Drafter, tiers: Sequence[int] = (1, 3, 7)) -> None:
        if not tiers or min(tiers) < 1:
            raise ValueError("tiers are numbers of drafts, at least one of them, all above 0")
        self._model, self._tiers = model, sorted(set(tiers))
        self._at = len(self._tiers) // 2
        self._average = self.drafts - 1.0  # neither outgrown nor too much
        self._steps = 0

    @property
    def drafts(self) -> int:
        """The number of drafts in force."""
        return self._tiers[self._at]

    def start(self, requests: Sequence[Request]) -> None:
        """Introduce the requests."""
        self._model.start(requests)

    def stop(self, requests: Sequence[Request]) -> None:
        """Let the drafter forget them."""
        self._model.stop(requests)

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal[Law]:
        """Return so many drafts for each request."""
        most = np.minimum(self.drafts, budget.max_drafts)
        return self._model.propose(requests, replace(budget, max_drafts=most))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn how many were accepted; now and then, move."""
        self._model.observe(outcomes)
        # a request's last step is cut short by its end, and says nothing of its drafts
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
        """Go down, else up, as far as the average says. It may be several tiers at once."""
        before, tiers = self._at, self._tiers
        while self._at and self._average <= tiers[self._at - 1] - SHORT - HYSTERESIS:
            self._at -= 1
        if self._at < before:
            return
        while self._at < len(tiers) - 1 and self._average > tiers[self._at] - SHORT:
            self._at += 1
