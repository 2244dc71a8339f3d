"""How likely a draft is to be accepted, learnt from what became of the drafts before it.

A drafter says how sure it is of each draft (its own probability, the share of a vote); nothing says
that it is right to be. Two things are learnt:

* *calibration*, for each drafter, by decayed counts: how often drafts of such a confidence are
  accepted, given that all above them were. Shared by all requests, so a new request starts with
  what is known;
* *a shift*, for each request and drafter: by how much its log-odds lie above or below calibration.
  Some texts are easier than others, and an easy one makes unsure drafts likely rather than sure
  ones certain. It is found by a Newton step for each draft, so it comes with its own precision:
  the less is known of a request, the higher its optimistic estimate.

Only drafts whose parent is part of the text say something. They need not have been verified: what
a drafter *would* have said is scored by what was emitted anyway.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from outrider.core import Bools, Floats, Ints

EDGES = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
"""Where confidence is told apart: finer near 1, where a long chain is worth it or not."""

PRIOR_WEIGHT = 4.0
"""At first confidence is half believed (`prior`), as if so many drafts had been seen."""

POOL_MEMORY = 2000.0
REQUEST_MEMORY = 30.0
"""Drafts after which an observation counts half as much, in a bucket and for a request."""

UNKNOWN = 1.0
"""Precision of a new request's shift: texts differ by about 1 in log-odds."""

REST = 32.0
"""Steps without a draft after which half of what is known of a request is forgotten, and optimistic
estimates are higher by 1, in log-odds: in the end everything is tried again that could pay."""

LEAST, MOST = 0.02, 0.98


def prior(bucket: int) -> float:
    """Return what is expected of drafts of such a confidence before any was seen."""
    low, high = (0.0, *EDGES)[bucket], (*EDGES, 1.0)[bucket]
    return float(0.25 + 0.5 * (low + high) / 2)


class Chances:
    """The chances of one drafter's drafts: by how sure it is, and for each request.

    Requests are rows: see `Acceptance.rows`.
    """

    _keep_pool = 0.5 ** (1.0 / POOL_MEMORY)
    _keep = 0.5 ** (1.0 / REQUEST_MEMORY)

    def __init__(self) -> None:
        priors = np.array([prior(bucket) for bucket in range(len(EDGES) + 1)])
        # of each bucket, accepted drafts and tried ones, older ones counting less
        self._hits, self._tries = priors * PRIOR_WEIGHT, np.full(len(priors), PRIOR_WEIGHT)
        self._share = priors
        # of each request, its shift, and the shift's precision beyond UNKNOWN
        self._shift, self._learnt = np.zeros(0), np.zeros(0)

    def of(self, rows: Ints, confidences: Floats) -> Floats:
        """Return the chance of each draft, given that all above it are accepted."""
        self._reach(rows)
        share = self._share[np.searchsorted(EDGES, confidences, "right")]
        return _limit(_shifted(share, self._shift[rows]))

    def optimistic(self, rows: Ints, confidences: Floats, idle: Ints) -> Floats:
        """Return the same, higher by half a standard deviation, and more the longer it rests.

        idle: steps since the drafter was last tried
        """
        self._reach(rows)
        bucket, keep = np.searchsorted(EDGES, confidences, "right"), 0.5 ** (idle / REST)
        share = self._share[bucket]
        known = UNKNOWN + self._learnt[rows] * keep
        pool_known = self._tries[bucket] * share * (1.0 - share)
        more = 0.5 * np.sqrt(1.0 / known + 1.0 / pool_known) + idle / REST
        return _limit(_shifted(share, self._shift[rows] * keep + more))

    def observe(self, rows: Ints, confidences: Floats, hits: Bools) -> None:
        """Learn which drafts were right, all above them being right.

        rows: no request more than once
        """
        self._reach(rows)
        bucket = np.searchsorted(EDGES, confidences, "right")
        chance = _shifted(self._share[bucket], self._shift[rows])
        self._learnt[rows] = self._learnt[rows] * self._keep + chance * (1.0 - chance)
        self._shift[rows] += (hits - chance) / (UNKNOWN + self._learnt[rows])
        tries = np.bincount(bucket, minlength=len(self._tries))
        keep = self._keep_pool**tries
        self._tries = self._tries * keep + tries
        self._hits = self._hits * keep + np.bincount(bucket, hits, len(self._tries))
        self._share = _limit(self._hits / self._tries)

    def forget(self, row: int) -> None:
        """Forget a request's shift."""
        if row < len(self._shift):
            self._shift[row] = self._learnt[row] = 0.0

    def _reach(self, rows: Ints) -> None:
        missing = int(rows.max(initial=-1)) + 1 - len(self._shift)
        if missing > 0:
            more = np.zeros(missing + len(self._shift))
            self._shift = np.concatenate([self._shift, more])
            self._learnt = np.concatenate([self._learnt, more])


def _shifted(share: Floats, shift: Floats) -> Floats:
    """Return chances whose log-odds are higher by this."""
    found: Floats = share / (share + (1.0 - share) * np.exp(-shift))
    return found


def _limit(chances: Floats) -> Floats:
    return np.minimum(MOST, np.maximum(LEAST, chances))


class Acceptance:
    """Chances of drafts, by drafter, confidence and request."""

    def __init__(self) -> None:
        self._drafters: dict[str, Chances] = {}
        self._rows: dict[Hashable, int] = {}
        self._free: list[int] = []

    def chances(self, drafter: str) -> Chances:
        """Return what is known of a drafter's drafts."""
        if drafter not in self._drafters:
            self._drafters[drafter] = Chances()
        return self._drafters[drafter]

    def rows(self, requests: Sequence[Hashable]) -> Ints:
        """Return the row of each request; a new one gets one."""
        rows = self._rows
        try:
            return np.fromiter((rows[request] for request in requests), np.int64, len(requests))
        except KeyError:
            for request in requests:
                if request not in rows:
                    rows[request] = self._free.pop() if self._free else len(rows)
            return self.rows(requests)

    def forget(self, request: Hashable) -> None:
        """Drop what is known of a request that has ended."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._free.append(row)
            for chances in self._drafters.values():
                chances.forget(row)
