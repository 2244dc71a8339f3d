"""How likely a draft is to be accepted, learnt from what became of the drafts before it.

A drafter says how sure it is of each draft (its own probability, the share of a vote); nothing says
that it is right to be. Two things are learnt:

* *calibration*, for each drafter, by decayed counts: how often drafts of such a confidence are
  accepted, given that all above them were. Shared by all requests, so a new request starts with
  what is known;
* *a shift*, for each request and drafter: by how much its log-odds lie above or below calibration.
  Some texts are easier than others, and an easy one makes unsure drafts likely rather than sure
  ones certain. It is found by a Newton step for each draft, so it comes with its own precision:
  what little is known of a new request leaves room for hope.

Only drafts whose parent is part of the text say something. They need not have been verified: what
a drafter *would* have said is scored by what was emitted anyway.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
"""Where confidence is told apart: finer near 1, where a long chain is worth it or not."""

PRIOR_WEIGHT = 4.0
"""At first confidence is half believed (`prior`), as if so many drafts had been seen."""

POOL_MEMORY = 2000.0
REQUEST_MEMORY = 30.0
"""Drafts after which an observation counts half as much, in a bucket and for a request."""

UNKNOWN = 1.0
"""Precision of a new request's shift: texts differ by about 1 in log-odds."""

REST = 32.0
"""Steps without a draft after which half of what is known of a request is forgotten, and hopes are
higher by 1, in log-odds: in the end everything is tried again that could be worth it."""

LEAST, MOST = 0.02, 0.98


def prior(bucket: int) -> float:
    """Return what is expected of drafts of such a confidence before any was seen."""
    low, high = (0.0, *EDGES)[bucket], (*EDGES, 1.0)[bucket]
    return 0.25 + 0.5 * (low + high) / 2


class _Count:
    """Accepted drafts and tried ones, older ones counting less."""

    __slots__ = ("hits", "tries")

    _keep = 0.5 ** (1.0 / POOL_MEMORY)

    def __init__(self, hits: float, tries: float) -> None:
        self.hits, self.tries = hits, tries

    @property
    def share(self) -> float:
        return _limit(self.hits / self.tries)

    def add(self, hit: bool) -> None:
        self.hits = self.hits * self._keep + hit
        self.tries = self.tries * self._keep + 1.0


class Chances:
    """The chances of one drafter's drafts for one request."""

    __slots__ = ("_buckets", "_learnt", "_shift")

    _keep = 0.5 ** (1.0 / REQUEST_MEMORY)

    def __init__(self, buckets: list[_Count]) -> None:
        self._buckets = buckets
        self._shift = 0.0
        self._learnt = 0.0  # precision of the shift, beyond UNKNOWN

    def of(self, confidence: float) -> float:
        """Return the chance of a draft, given that all above it are accepted."""
        return _limit(self._chance(self._bucket(confidence), self._shift))

    def hope(self, confidence: float, idle: int = 0) -> float:
        """Return the same for one who hopes: by half a standard deviation, and more by and by.

        idle: steps since the drafter was last tried
        """
        bucket, keep = self._bucket(confidence), 0.5 ** (idle / REST)
        known = UNKNOWN + self._learnt * keep
        pool_known = bucket.tries * bucket.share * (1.0 - bucket.share)
        hope = 0.5 * math.sqrt(1.0 / known + 1.0 / pool_known) + idle / REST
        return _limit(self._chance(bucket, self._shift * keep + hope))

    def observe(self, confidence: float, hit: bool) -> None:
        """Learn that a draft was right or not, all above it being right."""
        bucket = self._bucket(confidence)
        chance = self._chance(bucket, self._shift)
        self._learnt = self._learnt * self._keep + chance * (1.0 - chance)
        self._shift += (hit - chance) / (UNKNOWN + self._learnt)
        bucket.add(hit)

    def _bucket(self, confidence: float) -> _Count:
        return self._buckets[bisect_right(EDGES, confidence)]

    @staticmethod
    def _chance(bucket: _Count, shift: float) -> float:
        pooled = bucket.share
        return pooled / (pooled + (1.0 - pooled) * math.exp(-shift))


def _limit(chance: float) -> float:
    return min(MOST, max(LEAST, chance))


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
                    _Count(prior(bucket) * PRIOR_WEIGHT, PRIOR_WEIGHT)
                    for bucket in range(len(EDGES) + 1)
                ]
            known[drafter] = Chances(self._buckets[drafter])
        return known[drafter]

    def forget(self, request: Hashable) -> None:
        """Drop what is known of a request that has ended."""
        self._requests.pop(request, None)
