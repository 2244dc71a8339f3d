"""How long a step takes, learnt from this machine's own steps.

Time against rows is a staircase: flat while memory is the limit, then steps where a kernel or a
graph takes the next larger tile. So nothing is fitted but a height for each *row bucket* that was
seen (single rows up to 32, then wider ones; with captured graphs, one for each graph), and never
down: more rows never take less time. Between two of them the step is taken to be in the middle:
that is optimistic, so it is tried, and a step which lies elsewhere is found by halving. Beyond the
last one the time grows as steeply as from the first to the last.

Rows beyond the largest captured graph run without a graph, which can take several times as long.
They have buckets of their own. Until one of them was seen, time is assumed to grow in proportion to
the rows; the step from graphs to no graph is at the largest graph, not in the middle.

Noise is one-sided and now and then large. An observation moves its estimate by a fraction of its
logarithm's distance, and by no more than CLIP, so an outlier moves it little. An estimate that was
clipped several times in a row in the same direction is wrong: each further one moves it twice as
far.

Attention adds what cached tokens take to read: a slope, learnt where steps of the same number of
rows differ in what they read. Some attention backends read a request's cache once for all of its
rows; others once for each row. A host may have a second pass for the latter, which reads it once
but has as many rows for every request (*padded*). Then a step with drafts costs what the cheaper of
the two passes costs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

KNOTS: tuple[int, ...] = (
    *range(1, 33),
    *(36, 40, 44, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
)
"""The row buckets without captured graphs. Larger ones go on like the last: four per doubling."""

RATE = 0.1
"""How much of its distance an estimate moves, once it has seen 1 / RATE observations."""

HOPE = 0.05
"""By how much what was seen once is hoped to be better than it looked, in logarithms. It shrinks
with the root of what was seen, so that one unlucky step does not rule a number of rows out."""

CLIP = 0.3
"""The furthest distance that is believed at once, in logarithms: a third more, or less."""

PATIENCE = 3
"""So many clipped observations in a row may be outliers. After them the steps double."""

FEW_TOKENS = 2.0**26
"""Contexts that differ by less than this (squared, in all) say little of the slope: 8,192 tokens,
once. A machine that is slower for some seconds must not be taken for a long context."""

SHORT = 2.0**15
"""Contexts of so many tokens in all add little to a step's time, even many times over."""


class Estimate:
    """A running average that outliers move little, and a lasting change moves fast.

    value: the average
    seen: how many observations are in it
    """

    def __init__(self, value: float) -> None:
        self.value, self.seen = value, 1
        self._clipped = 0  # observations in a row that were clipped; below zero: they were lower

    @property
    def is_wrong(self) -> bool:
        """Whether the last observations were all far away, on the same side."""
        return abs(self._clipped) > PATIENCE

    def observe(self, value: float, clip: float, rate: float = RATE) -> float:
        """Move towards an observation. Return its distance, clipped."""
        distance = value - self.value
        side = (distance > clip) - (distance < -clip)
        self._clipped = self._clipped + side if side * self._clipped > 0 else side
        pace = 2.0 ** max(0, min(abs(self._clipped) - PATIENCE, 32))
        limit = clip * pace
        self.value += min(0.5, rate * pace) * max(-limit, min(limit, distance))
        self.seen += 1
        return max(-clip, min(clip, distance))


class Curve:
    """Seconds against a number of rows, never falling.

    knots: the row buckets, each named by its largest number of rows: the sizes of the host's
        captured graphs, or KNOTS if it has none
    """

    def __init__(self, knots: Sequence[int] = KNOTS) -> None:
        self._knots = tuple(sorted(knots))
        self._largest_graph = 0 if self._knots == KNOTS else self._knots[-1]
        self._knots += tuple(knot for knot in KNOTS if knot > self._knots[-1])
        self._estimates: dict[int, Estimate] = {}  # of the logarithm of seconds
        self._table: NDArray[np.float64] | None = None  # worked out when first asked for
        self._slope = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything has been observed."""
        return bool(self._estimates)

    def knot(self, rows: int) -> int:
        """Return the row bucket of so many rows."""
        if rows <= self._knots[-1]:
            return self._knots[bisect_left(self._knots, rows)]
        width = 1 << max(0, (rows - 1).bit_length() - 3)
        return -(-rows // width) * width

    def has_seen(self, rows: int) -> bool:
        """Whether a step of about so many rows has been observed."""
        return self.knot(rows) in self._estimates

    def observe(self, rows: int, seconds: float) -> None:
        """Learn how long so many rows took."""
        self._table = None
        value, estimate = math.log(max(seconds, 1e-9)), self._estimates.get(self.knot(rows))
        if estimate is None:
            self._estimates[self.knot(rows)] = Estimate(value)
        else:  # early observations average
            estimate.observe(value, CLIP, max(RATE, 1 / (estimate.seen + 1)))

    def seconds(self, rows: int) -> float:
        """Return how long so many rows should take; 0 if nothing was ever observed."""
        known = self._known()
        if rows < len(known):
            return float(known[rows])
        return float(self._beyond(np.array([rows]))[0])

    def table(self, rows: int) -> NDArray[np.float64]:
        """Return how long 0, 1, ... up to so many rows should take: [rows + 1]."""
        known = self._known()
        if rows < len(known):
            return known[: rows + 1]
        return np.append(known, self._beyond(np.arange(len(known), rows + 1)))

    def _known(self) -> NDArray[np.float64]:
        if self._table is None:
            points = self._rising() or [(0, 0.0)]
            self._table = self._fill(points)
            self._slope = self._steepness(points)
        return self._table

    def _beyond(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return how long more rows than were ever seen should take."""
        last, graph = len(self._known()) - 1, self._largest_graph
        found: NDArray[np.float64] = self._known()[-1] + self._slope * (rows - last)
        if graph and last <= graph:
            # nothing was seen without a graph yet: in proportion to the largest graph, or more
            largest = self._known()[-1] + self._slope * (graph - last)
            without = np.maximum(found, largest * rows / graph)
            found = np.where(rows > graph, without, found)
        return found

    def _steepness(self, points: Sequence[tuple[int, float]]) -> float:
        """Return seconds per row: from the first point to the last, with and without graphs apart.

        One point without a graph has no slope; with graphs, a row costs the device the same.
        """
        without = [point for point in points if point[0] > self._largest_graph]
        graphs = [point for point in points if point[0] <= self._largest_graph]
        region = graphs if graphs and len(without) < 2 else without
        (first, low), (last, high) = region[0], region[-1]
        return (high - low) / max(1, last - first)

    def _fill(self, points: Sequence[tuple[int, float]]) -> NDArray[np.float64]:
        """Return the staircase up to the last row bucket that was seen."""
        table = np.empty(points[-1][0] + 1)
        table[: points[0][0] + 1] = points[0][1]
        for (left, low), (right, high) in pairwise(points):
            step = max(left, self._bucket_below((left + right) // 2))
            if left <= self._largest_graph < right:
                step = self._largest_graph
            table[left + 1 : step + 1] = low
            table[step + 1 : right + 1] = high
        return table

    def _bucket_below(self, rows: int) -> int:
        """Return the largest row bucket that is not larger than so many rows."""
        if rows < self._knots[-1]:
            return self._knots[max(0, bisect_right(self._knots, rows) - 1)]
        width = 1 << max(0, rows.bit_length() - 3)
        return max(self._knots[-1], rows // width * width)

    def _rising(self) -> list[tuple[int, float]]:
        """Return the heights, neighbours that fall pooled into one (weighted by observations)."""
        pools: list[list[float]] = []  # [sum of weighted seconds, weight, number of buckets]
        knots = sorted(self._estimates)
        for knot in knots:
            found = self._estimates[knot]
            weight = float(min(found.seen, 20))
            optimistic = math.exp(found.value - HOPE / math.sqrt(found.seen))
            pools.append([optimistic * weight, weight, 1])
            while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
                seconds, weight, count = pools.pop()
                pools[-1] = [pools[-1][0] + seconds, pools[-1][1] + weight, pools[-1][2] + count]
        heights = [total / weight for total, weight, count in pools for _ in range(int(count))]
        return list(zip(knots, heights, strict=True))


class Slope:
    """Seconds for each token of context, from steps of the same number of rows."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, Estimate]] = {}  # of context and seconds, by bucket
        self._product = self._square = 0.0
        self.value = 0.0

    def observe(self, knot: int, context: int, seconds: float) -> None:
        """Learn how long a step took over so many tokens of context."""
        mean, usual = self._means.get(knot, (float(context), Estimate(seconds)))
        # what is read many times over may take many times as long: that is no outlier
        times = (context + SHORT) / (mean + SHORT)
        times = max(times, 1 / times)
        more, longer = context - mean, usual.observe(seconds, CLIP * times * usual.value)
        self._means[knot] = mean + RATE * more, usual
        if usual.is_wrong:  # the difference says nothing of the context: begin again
            del self._means[knot]
            return
        self._product = 0.99 * self._product + more * longer
        self._square = 0.99 * self._square + more * more
        self.value = max(0.0, self._product / (self._square + FEW_TOKENS))


class StepCost:
    """The time of a step: a pass of the target with all around it, and passes of a draft model.

    verify: a pass of the target, by rows, over no context
    slope:  what each cached token that is read adds
    draft:  a pass of the draft model, by the tokens that it reads
    reads_each_row: whether a request's cache is read once for each of its rows
    width:  rows of each request in a padded pass; 0 if the host has none
    padded: such a pass, by all of its rows
    """

    def __init__(self, knots: Sequence[int] = KNOTS) -> None:
        self.verify, self.draft, self.slope = Curve(knots), Curve(knots), Slope()
        self.reads_each_row, self.width, self.padded = False, 0, Curve()

    def observe(
        self, rows: int, context: int, seconds: float, requests: int = 0, padded: bool = False
    ) -> None:
        """Learn how long a pass of the target took.

        context: tokens of all requests together
        requests: how many; by default one for each row
        """
        requests = requests or rows
        curve, read = self.verify, self._read(rows, context, requests)
        if padded:
            curve, rows, read = self.padded, requests * self.width, context
        else:
            self.slope.observe(curve.knot(rows), read, seconds)
        curve.observe(rows, max(0.1 * seconds, seconds - self.slope.value * read))

    def observe_drafting(self, passes: int, requests: int, unread: int, seconds: float) -> None:
        """Learn how long passes of the draft model took, of which the first read what was new."""
        first, more = self.draft.seconds(unread), self.draft.seconds(requests)
        expected = first + (passes - 1) * more
        share = seconds / expected if expected else 0.0
        self.draft.observe(unread, first * share or seconds / passes)
        if passes > 1:
            self.draft.observe(requests, more * share or seconds / passes)

    def table(self, rows: int, context: int = 0, requests: int = 0) -> NDArray[np.float64]:
        """Return the time of a step of 0, 1, ... up to so many rows, without drafting.

        context, requests: as in `observe`
        """
        if not self.reads_each_row or not requests:
            return self.verify.table(rows) + self.slope.value * context
        reads = np.maximum(np.arange(rows + 1) / requests, 1.0)
        found = self.verify.table(rows) + self.slope.value * context * reads
        if self.width:
            found[requests + 1 :] = found[requests + 1 :].clip(max=self._padded(context, requests))
        return found

    def prefers_padded(self, rows: int, context: int, requests: int) -> bool:
        """Say whether a padded pass would be faster than the usual one, of so many rows."""
        if not self.width or rows == requests:
            return False
        usual = self.verify.seconds(rows) + self.slope.value * self._read(rows, context, requests)
        return self._padded(context, requests) < usual

    def drafting(self, passes: int, requests: int, unread: int) -> float:
        """Return the time of so many passes of the draft model, one after the other.

        requests: that draft; unread: tokens of theirs that it has not read, the last ones included
        """
        return self.draft.seconds(unread) + (passes - 1) * self.draft.seconds(requests)

    def _read(self, rows: int, context: int, requests: int) -> int:
        """Return how many cached tokens a pass reads, if drafts are spread evenly."""
        return context * max(rows, requests) // requests if self.reads_each_row else context

    def _padded(self, context: int, requests: int) -> float:
        """Return the time of a padded pass. If none was seen, padding is hoped to be free."""
        rows = requests * self.width
        known = self.padded.has_seen(rows)
        seconds = self.padded.seconds(rows) if known else self.verify.seconds(requests)
        return seconds + self.slope.value * context
