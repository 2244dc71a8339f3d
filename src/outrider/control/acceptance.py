"""The probability that a draft is accepted, learned from the outcomes of earlier drafts.

A drafter reports a confidence with each draft (its own probability, or the share of a vote). The
confidence need not be calibrated. Two corrections are learned:

* *calibration*, per drafter, by decayed counts: how often drafts of such a confidence were accepted
  if their parents were. All requests share it, so a new request starts with what is known;
* *a shift*, per request and drafter: how far the log-odds of its drafts lie above or below
  calibration. Some texts are easier than others. An easy text makes uncertain drafts likely; it
  does not make likely drafts certain. Each draft moves the shift by one Newton step. The precision
  of the shift is known too: the fewer drafts a request has had, the higher its optimistic estimate.

A draft counts only if its parent is part of the text. It need not have been verified: drafts that
were proposed and not used are compared with what was emitted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.core import Bools, Floats, Ints

EDGES = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
"""Edges of the confidence buckets. They are finer near 1, where the length of a chain depends on
them."""

PRIOR_WEIGHT = 4.0
"""Weight of the prior of a confidence bucket, in drafts: see `prior`."""

POOL_MEMORY = 2000.0
REQUEST_MEMORY = 30.0
"""Half-life of an observation, in drafts: in a confidence bucket, and in the shift of a request."""

UNKNOWN = 1.0
"""Precision of a new request's shift: texts differ by about 1 in log-odds."""

REST = 32.0
"""Steps without a draft after which half of what is known about a request is forgotten, and the
optimistic estimate is higher by 1 in log-odds. So every drafter that could pay is tried again."""

MIN_CHANCE, MAX_CHANCE = 0.02, 0.98


def prior(bucket: int) -> float:
    """Return the expected acceptance rate of a confidence bucket before any draft was seen."""
    low, high = (0.0, *EDGES)[bucket], (*EDGES, 1.0)[bucket]
    return float(0.25 + 0.5 * (low + high) / 2)


class Chances:
    """The acceptance probability of one kind of drafts, by confidence and request.

    Requests are given as rows: see `Acceptance.rows`.

    capacity: number of rows
    priors: of other buckets than those of confidences, which are then given by number
    """

    _keep_pool = 0.5 ** (1.0 / POOL_MEMORY)
    _keep = 0.5 ** (1.0 / REQUEST_MEMORY)

    def __init__(self, capacity: int = 0, priors: Floats | None = None) -> None:
        if priors is None:
            priors = np.array([prior(bucket) for bucket in range(len(EDGES) + 1)])
        # by bucket: accepted drafts and all drafts, decayed, and their ratio
        self._hits, self._tries = priors * PRIOR_WEIGHT, np.full(len(priors), PRIOR_WEIGHT)
        self._share = priors
        # by row: the shift, and its precision beyond UNKNOWN
        self._shift, self._learnt = np.zeros(capacity), np.zeros(capacity)

    def of(self, rows: Ints, confidences: Floats) -> Floats:
        """Return the probability of each draft, given that its parent is accepted."""
        return self.of_buckets(rows, EDGES.searchsorted(confidences, "right"))

    def of_buckets(self, rows: Ints, buckets: Ints) -> Floats:
        """Return the same by bucket. rows, buckets: arrays that broadcast"""
        return _limit(_shifted(self._share[buckets], self._shift[rows]))

    def optimistic(self, rows: Ints, confidences: Floats, idle: Ints) -> Floats:
        """Return the optimistic estimate of the same: half a standard deviation higher, and more
        with each step in which the drafter was not called.

        idle: steps since the drafter was last called
        """
        bucket, keep = EDGES.searchsorted(confidences, "right"), 0.5 ** (idle / REST)
        share = self._share[bucket]
        known = UNKNOWN + self._learnt[rows] * keep
        pool_known = self._tries[bucket] * share * (1.0 - share)
        more = 0.5 * np.sqrt(1.0 / known + 1.0 / pool_known) + idle / REST
        return _limit(_shifted(share, self._shift[rows] * keep + more))

    def observe(self, rows: Ints, confidences: Floats, hits: Bools) -> None:
        """Learn which drafts were right. Their parents were right. rows: of their requests"""
        self.observe_buckets(rows, EDGES.searchsorted(confidences, "right"), hits)

    def observe_buckets(self, rows: Ints, buckets: Ints, hits: Bools) -> None:
        """Learn the same by bucket, of all drafts of a step at once."""
        chance = _shifted(self._share[buckets], self._shift[rows])
        capacity = len(self._shift)
        seen = np.bincount(rows, minlength=capacity)
        known = np.bincount(rows, chance * (1.0 - chance), capacity)
        surprise = np.bincount(rows, hits - chance, capacity)
        learnt = self._learnt * self._keep**seen + known
        self._learnt = learnt
        self._shift += surprise / (UNKNOWN + learnt)
        size = len(self._tries)
        tries = np.bincount(buckets, minlength=size)
        keep = self._keep_pool**tries
        self._tries = self._tries * keep + tries
        self._hits = self._hits * keep + np.bincount(buckets, hits, size)
        self._share = _limit(self._hits / self._tries)

    def grow(self, capacity: int) -> None:
        """Make room for so many rows."""
        more = np.zeros(capacity - len(self._shift))
        self._shift = np.concatenate([self._shift, more])
        self._learnt = np.concatenate([self._learnt, more])

    def forget(self, row: int) -> None:
        """Reset the shift of a row."""
        self._shift[row] = self._learnt[row] = 0.0


def _shifted(share: Floats, shift: Floats) -> Floats:
    """Return probabilities whose log-odds are higher by the shift."""
    found: Floats = share / (share + (1.0 - share) * np.exp(-shift))
    return found


def _limit(chances: Floats) -> Floats:
    return np.minimum(MAX_CHANCE, np.maximum(MIN_CHANCE, chances))


@dataclass(frozen=True, eq=False)
class DrafterChances:
    """The acceptance probabilities of one drafter, by kind of draft.

    first: of the drafter's first choice after a parent
    sibling: of its second and later choices after the same parent
    prior: of its first choice before the drafter is called, when no confidence is known. It decides
        whether a draft model is called. None for a free drafter: that is always called.
    """

    first: Chances
    sibling: Chances
    prior: Chances | None


class Acceptance:
    """Acceptance probabilities by drafter, and the rows of requests in them."""

    def __init__(self) -> None:
        self._drafters: dict[str, DrafterChances] = {}
        self._all: list[Chances] = []  # of all drafters
        self._rows: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._capacity = 0

    def add_buckets(self, priors: Floats) -> Chances:
        """Return chances by buckets of the caller's. priors: of the buckets"""
        self._all.append(Chances(self._capacity, priors))
        return self._all[-1]

    def add(self, name: str, has_prior: bool = False) -> DrafterChances:
        """Return the chances of a new drafter. Nothing is known about its drafts yet.

        has_prior: for a draft model, which is called only if it is expected to pay
        """
        first, sibling, prior = (Chances(self._capacity) for _ in range(3))
        self._all += [first, sibling, prior] if has_prior else [first, sibling]
        self._drafters[name] = DrafterChances(first, sibling, prior if has_prior else None)
        return self._drafters[name]

    def __getitem__(self, name: str) -> DrafterChances:
        """Return what is known about the drafts of a drafter."""
        return self._drafters[name]

    def rows(self, requests: Sequence[Hashable]) -> Ints:
        """Return the row of each request. A new request gets a row."""
        rows = self._rows
        try:
            return np.array([rows[request] for request in requests], np.int64)
        except KeyError:
            for request in requests:
                if request not in rows:
                    rows[request] = self._free.pop() if self._free else len(rows)
            if len(rows) > self._capacity:
                self._capacity = max(len(rows), 2 * self._capacity)  # so that this is seldom needed
                for chances in self._all:
                    chances.grow(self._capacity)
            return self.rows(requests)

    def forget(self, request: Hashable) -> int | None:
        """Forget a request that has ended. Return the row that it had, if it had one."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._free.append(row)
            for chances in self._all:
                chances.forget(row)
        return row
