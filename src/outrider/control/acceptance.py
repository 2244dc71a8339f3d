"""How likely a draft is to be accepted, learnt from what became of the drafts before it.

A drafter says how sure it is of each draft (its own probability, the share of a vote); nothing says
that it is right to be. Two things are learnt, both by decayed counts:

* *calibration*, for each drafter: how often drafts of such a confidence are accepted, given that
  all before them were. Shared by all requests, so a new request starts with what is known;
* *a factor*, for each request and drafter: how many of its drafts were accepted, over how many
  calibration expected. Some texts are easier than others.

Only drafts up to and including the first rejected one say something. They need not have been
verified: what a drafter *would* have said is scored by what was emitted anyway.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from operator import mul

BUCKETS = 10
"""Confidence is told apart in so many equal steps."""

PRIOR = 0.5
"""What is expected of a draft of which nothing is known, whatever its confidence..."""

PRIOR_WEIGHT = 4.0
"""...as if so many drafts had been seen."""

POOL_MEMORY = 2000.0
REQUEST_MEMORY = 30.0
"""Drafts after which an observation counts half as much, in a bucket and for a request."""

LEAST, MOST = 0.02, 0.98


class _Count:
    """Accepted drafts and expected ones, older ones counting less."""

    def __init__(self, hits: float, tries: float, memory: float) -> None:
        self.hits, self.tries = hits, tries
        self._keep = 0.5 ** (1.0 / memory)

    def add(self, hit: bool, weight: float = 1.0) -> None:
        self.hits = self.hits * self._keep + hit
        self.tries = self.tries * self._keep + weight


class Acceptance:
    """Chances of drafts, by drafter, confidence and request."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, int], _Count] = {}
        self._factors: dict[tuple[str, Hashable], _Count] = {}

    def chances(self, drafter: str, request: Hashable, confidences: Sequence[float]) -> list[float]:
        """Return the chance of each draft of a chain, given that those before it are accepted."""
        factor = self._factor(drafter, request)
        ratio = factor.hits / factor.tries
        return [
            min(MOST, max(LEAST, ratio * self._calibrated(drafter, confidence)))
            for confidence in confidences
        ]

    def survival(
        self, drafter: str, request: Hashable, confidences: Sequence[float]
    ) -> list[float]:
        """Return the chance of each draft of a chain that it and all before it are accepted."""
        return list(accumulate(self.chances(drafter, request, confidences), mul))

    def observe(
        self, drafter: str, request: Hashable, confidences: Sequence[float], accepted: int
    ) -> None:
        """Learn that the first `accepted` drafts of a chain were right, and the next was not."""
        factor = self._factor(drafter, request)
        for i, confidence in enumerate(confidences[: accepted + 1]):
            hit = i < accepted
            factor.add(hit, self._calibrated(drafter, confidence))
            self._bucket(drafter, confidence).add(hit)

    def forget(self, request: Hashable) -> None:
        """Drop what is known of a request that has ended."""
        for key in [key for key in self._factors if key[1] == request]:
            del self._factors[key]

    def _calibrated(self, drafter: str, confidence: float) -> float:
        count = self._bucket(drafter, confidence)
        return count.hits / count.tries

    def _bucket(self, drafter: str, confidence: float) -> _Count:
        step = min(BUCKETS - 1, max(0, int(confidence * BUCKETS)))
        key = (drafter, step)
        if key not in self._buckets:
            self._buckets[key] = _Count(PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT, POOL_MEMORY)
        return self._buckets[key]

    def _factor(self, drafter: str, request: Hashable) -> _Count:
        key = (drafter, request)
        if key not in self._factors:
            self._factors[key] = _Count(PRIOR_WEIGHT, PRIOR_WEIGHT, REQUEST_MEMORY)
        return self._factors[key]
