"""How likely a draft is to be accepted, learnt from what became of the drafts before it.

A drafter says how sure it is of each draft (its own probability, the share of a vote); nothing says
that it is right to be. Two things are learnt, both by decayed counts:

* *calibration*, for each drafter: how often drafts of such a confidence are accepted, given that
  all above them were. Shared by all requests, so a new request starts with what is known;
* *a factor*, for each request and drafter: how many of its drafts were accepted, over how many
  calibration expected. Some texts are easier than others.

Only drafts whose parent is part of the text say something. They need not have been verified: what
a drafter *would* have said is scored by what was emitted anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
"""Where confidence is told apart: finer near 1, where a long chain is worth it or not."""

PRIOR_WEIGHT = 4.0
"""At first confidence is half believed (`prior`), as if so many drafts had been seen."""

POOL_MEMORY = 2000.0
REQUEST_MEMORY = 30.0
"""Drafts after which an observation counts half as much, in a bucket and for a request."""

LEAST, MOST = 0.02, 0.98


def prior(bucket: int) -> float:
    """Return what is expected of drafts of such a confidence before any was seen."""
    low, high = (0.0, *EDGES)[bucket], (*EDGES, 1.0)[bucket]
    return 0.25 + 0.5 * (low + high) / 2


class _Count:
    """Accepted drafts and expected ones, older ones counting less."""

    __slots__ = ("_keep", "hits", "tries")

    def __init__(self, hits: float, tries: float, memory: float) -> None:
        self.hits, self.tries = hits, tries
        self._keep = 0.5 ** (1.0 / memory)

    def add(self, hit: bool, weight: float = 1.0) -> None:
        self.hits = self.hits * self._keep + hit
        self.tries = self.tries * self._keep + weight


class Chances:
    """The chances of one drafter's drafts for one request."""

    __slots__ = ("_buckets", "_factor")

    def __init__(self, buckets: list[_Count]) -> None:
        self._buckets = buckets
        self._factor = _Count(PRIOR_WEIGHT, PRIOR_WEIGHT, REQUEST_MEMORY)

    def of(self, confidence: float) -> float:
        """Return the chance of a draft, given that all above it are accepted."""
        bucket, factor = self._bucket(confidence), self._factor
        return min(MOST, max(LEAST, factor.hits / factor.tries * bucket.hits / bucket.tries))

    def observe(self, confidence: float, hit: bool) -> None:
        """Learn that a draft was right or not, all above it being right."""
        bucket = self._bucket(confidence)
        self._factor.add(hit, bucket.hits / bucket.tries)
        bucket.add(hit)

    def _bucket(self, confidence: float) -> _Count:
        return self._buckets[bisect_right(EDGES, confidence)]


class Acceptance:
    """Chances of drafts, by drafter, confidence and request."""

    def __init__(self) -> None:
        self._buckets: dict[str, list[_Count]] = {}
        self._requests: dict[Hashable, dict[str, Chances]] = {}

    def chances(self, drafter: str, request: Hashable) -> Chances:
        """Return what is known of a drafter's drafts for a request."""
        known = self._requests.setdefault(request, {})
        if drafter not in known:
            if drafter not in self._buckets:
                self._buckets[drafter] = [
                    _Count(prior(bucket) * PRIOR_WEIGHT, PRIOR_WEIGHT, POOL_MEMORY)
                    for bucket in range(len(EDGES) + 1)
                ]
            known[drafter] = Chances(self._buckets[drafter])
        return known[drafter]

    def forget(self, request: Hashable) -> None:
        """Drop what is known of a request that has ended."""
        self._requests.pop(request, None)
