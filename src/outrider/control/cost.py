"""How long a step takes, learnt from this machine's own steps.

Time against rows is a staircase: flat while memory is the limit, then steps where a kernel or a
graph takes the next larger tile. So nothing is fitted but a height at each number of rows that was
seen (from 32 on, at each of a few; with captured graphs, at each graph's size), and never down:
more rows never take less time. Between two of them the step is taken to be in the middle: that is
hope, and hope is tried, so that a step which lies elsewhere is found by halving. Behind the last
one it goes on as steeply as from the first to the last.

Noise is one-sided and now and then large. An observation moves its estimate by a fraction of its
logarithm's distance, and by no more than CLIP: an outlier is felt a little, a new regime is
followed within some twenty steps.

Attention adds what the contexts of all requests take to read: a slope, learnt where steps of the
same number of rows differ in context.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

KNOTS: tuple[int, ...] = (
    *range(1, 33),
    *(36, 40, 44, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
)
RATE = 0.1
"""How much of its distance an estimate moves, once it has seen 1 / RATE observations."""

HOPE = 0.05
"""By how much what was seen once is hoped to be better than it looked, in logarithms. It shrinks
with the root of what was seen, so that one unlucky step does not rule a number of rows out."""

CLIP = 0.3
"""The furthest distance that is believed at once, in logarithms: a third more, or less."""

FEW_TOKENS = 2.0**26
"""Contexts that differ by less than this (squared, in all) say little of the slope: 8,192 tokens,
once. A machine that is slower for some seconds must not be taken for a long context."""


class Curve:
    """Seconds against a number of rows, never falling.

    knots: the numbers of rows that are told apart; others count as the next larger one
    """

    def __init__(self, knots: Sequence[int] = KNOTS) -> None:
        self._knots = tuple(sorted(knots))
        self._logs: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._table: NDArray[np.float64] | None = None  # worked out when first asked for

    @property
    def is_known(self) -> bool:
        """Whether anything has been observed."""
        return bool(self._logs)

    def knot(self, rows: int) -> int:
        """Return the number of rows that these count as."""
        return self._knots[min(bisect_left(self._knots, rows), len(self._knots) - 1)]

    def has_seen(self, rows: int) -> bool:
        """Whether a step of about so many rows has been observed."""
        return self.knot(rows) in self._logs

    def observe(self, rows: int, seconds: float) -> None:
        """Learn how long so many rows took."""
        self._table = None
        knot = self.knot(rows)
        value, seen = math.log(max(seconds, 1e-9)), self._seen.get(knot, 0)
        if not seen:
            self._logs[knot] = value
        else:
            # early observations average; what startles is believed by and by
            distance = max(-CLIP, min(CLIP, value - self._logs[knot]))
            self._logs[knot] += distance * max(RATE, 1 / (seen + 1))
        self._seen[knot] = seen + 1

    def seconds(self, rows: int) -> float:
        """Return how long so many rows should take; 0 if nothing was ever observed."""
        return float(self.table(rows)[rows])

    def table(self, rows: int) -> NDArray[np.float64]:
        """Return how long 0, 1, ... up to so many rows should take: [rows + 1]."""
        if self._table is None:
            self._table = self._fill()
        if len(self._table) <= rows:  # more rows than ever seen
            last, first = len(self._table) - 1, min(self._logs, default=0)
            slope = (self._table[-1] - self._table[0]) / max(1, last - first)
            return np.append(self._table, self._table[-1] + slope * np.arange(1, rows + 1 - last))
        return self._table[: rows + 1]

    def _fill(self) -> NDArray[np.float64]:
        """Return the staircase up to the last knot that was seen."""
        points = self._rising() or [(0, 0.0)]
        table = np.empty(points[-1][0] + 1)
        table[: points[0][0] + 1] = points[0][1]
        for (left, low), (right, high) in pairwise(points):
            for knot in self._knots[bisect_left(self._knots, left) + 1 :]:
                if knot > right:
                    break
                before = self._knots[bisect_left(self._knots, knot) - 1]
                table[before + 1 : knot + 1] = high if 2 * knot > left + right else low
        return table

    def _rising(self) -> list[tuple[int, float]]:
        """Return the heights, neighbours that fall pooled into one (weighted by observations)."""
        pools: list[list[float]] = []  # [sum of weighted seconds, weight, number of knots]
        knots = sorted(self._logs)
        for knot in knots:
            seen = self._seen[knot]
            weight = float(min(seen, 20))
            pools.append([math.exp(self._logs[knot] - HOPE / math.sqrt(seen)) * weight, weight, 1])
            while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
                seconds, weight, count = pools.pop()
                pools[-1] = [pools[-1][0] + seconds, pools[-1][1] + weight, pools[-1][2] + count]
        heights = [total / weight for total, weight, count in pools for _ in range(int(count))]
        return list(zip(knots, heights, strict=True))


class Slope:
    """Seconds for each token of context, from steps of the same number of rows."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # of context and seconds, by knot
        self._product = self._square = 0.0
        self.value = 0.0

    def observe(self, knot: int, context: int, seconds: float) -> None:
        """Learn how long a step took over so many tokens of context."""
        mean, usual = self._means.get(knot, (float(context), seconds))
        more, longer = context - mean, max(-CLIP * usual, min(CLIP * usual, seconds - usual))
        self._means[knot] = (mean + RATE * more, usual + RATE * longer)
        self._product = 0.99 * self._product + more * longer
        self._square = 0.99 * self._square + more * more
        self.value = max(0.0, self._product / (self._square + FEW_TOKENS))


class StepCost:
    """The time of a step: a pass of the target with all around it, and passes of a draft model.

    verify: a pass of the target, by rows, over no context
    slope:  what each token of the requests' contexts adds
    draft:  a pass of the draft model, by the tokens that it reads
    """

    def __init__(self, knots: Sequence[int] = KNOTS) -> None:
        self.verify, self.draft, self.slope = Curve(knots), Curve(knots), Slope()

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Learn how long a pass of the target took.

        context: tokens of all requests together
        """
        self.slope.observe(self.verify.knot(rows), context, seconds)
        self.verify.observe(rows, max(0.1 * seconds, seconds - self.slope.value * context))

    def observe_drafting(self, passes: int, requests: int, unread: int, seconds: float) -> None:
        """Learn how long passes of the draft model took, of which the first read what was new."""
        first, more = self.draft.seconds(unread), self.draft.seconds(requests)
        expected = first + (passes - 1) * more
        share = seconds / expected if expected else 0.0
        self.draft.observe(unread, first * share or seconds / passes)
        if passes > 1:
            self.draft.observe(requests, more * share or seconds / passes)

    def table(self, rows: int, context: int = 0) -> NDArray[np.float64]:
        """Return the time of a step of 0, 1, ... up to so many rows, without drafting."""
        return self.verify.table(rows) + self.slope.value * context

    def drafting(self, passes: int, requests: int, unread: int) -> float:
        """Return the time of so many passes of the draft model, one after the other.

        requests: that draft; unread: tokens of theirs that it has not read, the last ones included
        """
        return self.draft.seconds(unread) + (passes - 1) * self.draft.seconds(requests)
