"""The time of a pass as a function of its rows, learned from the passes themselves.

The time is a staircase. It is flat while memory bandwidth is the limit, and it steps up where a
kernel or a captured graph takes the next larger tile. A curve therefore keeps one estimate for each
*row bucket* (a range of row counts) that it has seen, and never lets the time fall with the rows.

* Between two buckets the curve places the step in the middle. This is optimistic, so these row
  counts are tried, and repeated halving finds the real step.
* Beyond the last bucket the time grows with the average slope from the first bucket to the last.
* Rows beyond the largest captured graph run without a graph, which can take several times as long.
  They have buckets of their own. Until one of them is measured, time is assumed to grow in
  proportion to the rows. The step between the two regions is at the largest graph.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from outrider.control.estimate import RATE, Estimate

ROW_BUCKETS: tuple[int, ...] = (
    *range(1, 33),
    *(36, 40, 44, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
)
"""Row buckets of an engine without captured graphs. Larger ones continue with four per doubling."""

OPTIMISM = 0.05
"""How much faster than its average a bucket is assumed to be after one observation, in logarithms.
It shrinks with the square root of the observations. One slow step does not rule a bucket out."""

SEED_WEIGHT = 0.1
"""Weight of an assumed time beside observed ones, in observations."""

CLIP = 0.3
"""Largest distance that one observation counts for, in logarithms: about a third."""

MOST_KEPT = 8192
"""Row counts beyond the measured ones whose times are kept in the table."""


class RowBuckets:
    """Maps a number of rows to its row bucket.

    A bucket is named by its largest number of rows.

    sizes: the sizes of the engine's captured graphs, or ROW_BUCKETS if it has none
    largest_graph: rows of the largest captured graph; 0 without graphs
    """

    def __init__(self, sizes: Sequence[int] = ROW_BUCKETS) -> None:
        if not sizes or not all(isinstance(size, (int, np.integer)) and size > 0 for size in sizes):
            raise ValueError(f"row_buckets are numbers of rows, all above 0, not {list(sizes)!r}")
        found = tuple(sorted(sizes))
        self.largest_graph = 0 if found == ROW_BUCKETS else found[-1]
        self._sizes = found + tuple(size for size in ROW_BUCKETS if size > found[-1])

    def of(self, rows: int) -> int:
        """Return the bucket of so many rows."""
        if rows <= self._sizes[-1]:
            return self._sizes[bisect_left(self._sizes, rows)]
        width = 1 << max(0, (rows - 1).bit_length() - 3)
        return -(-rows // width) * width

    def below(self, rows: int) -> int:
        """Return the largest bucket that is not larger than so many rows."""
        if rows < self._sizes[-1]:
            return self._sizes[max(0, bisect_right(self._sizes, rows) - 1)]
        width = 1 << max(0, rows.bit_length() - 3)
        return max(self._sizes[-1], rows // width * width)


class Curve:
    """Seconds as a function of rows. It never falls.

    row_buckets: see `RowBuckets`
    optimism: see OPTIMISM
    row_bucket: returns the row bucket of so many rows
    """

    def __init__(
        self, row_buckets: Sequence[int] = ROW_BUCKETS, optimism: float = OPTIMISM
    ) -> None:
        self._buckets, self._optimism = RowBuckets(row_buckets), optimism
        self.row_bucket = self._buckets.of
        self._estimates: dict[int, Estimate] = {}  # by bucket; of the logarithm of seconds
        self._table: NDArray[np.float64] | None = None  # computed on first use
        self._last = 0  # the largest number of rows in the table that is not extrapolated
        self._slope = 0.0
        self._asked = 0  # the most rows that a caller has asked a table for

    @property
    def is_known(self) -> bool:
        """Whether anything was observed or assumed."""
        return bool(self._estimates)

    def has_seen(self, rows: int) -> bool:
        """Whether the bucket of so many rows has been observed."""
        return self.row_bucket(rows) in self._estimates

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one pass."""
        self._table = None
        bucket, value = self.row_bucket(rows), math.log(max(seconds, 1e-9))
        estimate = self._estimates.get(bucket)
        if estimate is None or not estimate.seen:  # a time that was assumed is replaced
            self._estimates[bucket] = Estimate(value)
        else:  # the first observations are averaged
            estimate.observe(value, CLIP, max(RATE, 1 / (estimate.seen + 1)))

    def seed(self, rows: int, seconds: float) -> None:
        """Assume a time until a pass of the bucket is observed."""
        self._table = None
        self._estimates[self.row_bucket(rows)] = Estimate(math.log(max(seconds, 1e-9)), seen=0)

    def refresh(self) -> None:
        """Work the table out now, not when it is asked for."""
        self._known()

    def seconds(self, rows: int) -> float:
        """Return the expected time of so many rows; 0 if nothing was ever observed."""
        known = self._known()
        if rows < len(known):
            return float(known[rows])
        return float(self._beyond(known, np.array([rows]))[0])

    def table(self, rows: int) -> NDArray[np.float64]:
        """Return the expected time of 0, 1, ... up to so many rows: [rows + 1].

        The array is shared: do not write to it.
        """
        if min(rows, MOST_KEPT) > self._asked:
            self._asked = min(rows, MOST_KEPT)
            self._table = None
        known = self._known()
        if rows < len(known):
            return known[: rows + 1]
        return np.append(known, self._beyond(known, np.arange(len(known), rows + 1)))

    def _known(self) -> NDArray[np.float64]:
        """Return the table as far as it is kept: what was seen, and what callers ask for."""
        if self._table is None:
            points = self._rising() or [(0, 0.0)]
            known = self._fill(points)
            self._last, self._slope = len(known) - 1, self._steepness(points)
            if self._last < self._asked:
                more = self._beyond(known, np.arange(len(known), self._asked + 1))
                known = np.concatenate([known, more])
            self._table = known
        return self._table

    def _beyond(self, known: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the expected time of more rows than were ever seen."""
        last, graph, highest = self._last, self._buckets.largest_graph, known[self._last]
        found: NDArray[np.float64] = highest + self._slope * (rows - last)
        if graph and last <= graph:
            # no step without a graph was seen: in proportion to the largest graph, or more
            largest = highest + self._slope * (graph - last)
            without = np.maximum(found, largest * rows / graph)
            found = np.where(rows > graph, without, found)
        return found

    def _steepness(self, points: Sequence[tuple[int, float]]) -> float:
        """Return seconds per row, from the first point to the last of one region.

        The regions are rows with a graph and rows without. A single point without a graph has no
        slope. The slope with graphs then stands in, because the device does the same work per row.
        """
        graph = self._buckets.largest_graph
        without = [point for point in points if point[0] > graph]
        graphs = [point for point in points if point[0] <= graph]
        region = graphs if graphs and len(without) < 2 else without
        (first, low), (last, high) = region[0], region[-1]
        return (high - low) / max(1, last - first)

    def _fill(self, points: Sequence[tuple[int, float]]) -> NDArray[np.float64]:
        """Return the staircase up to the last row bucket that was seen."""
        graph, ends = self._buckets.largest_graph, [0]
        for (left, _), (right, _) in pairwise(points):
            step = max(left, self._buckets.below((left + right) // 2))
            ends.append(graph + 1 if left <= graph < right else step + 1)
        ends.append(points[-1][0] + 1)
        return np.repeat([height for _, height in points], np.diff(ends))

    def _rising(self) -> list[tuple[int, float]]:
        """Return the height of each bucket that was seen, in rising order of both.

        Neighbours whose heights fall are pooled into their mean, weighted by observations.
        """
        pools: list[tuple[float, float, int]] = []  # sum of weighted seconds, weight, buckets
        buckets = sorted(self._estimates)
        for bucket in buckets:
            found = self._estimates[bucket]
            weight, count = float(min(max(found.seen, SEED_WEIGHT), 20)), 1
            bonus = self._optimism / math.sqrt(max(found.seen, 1))
            total = math.exp(found.value - bonus) * weight
            while pools and pools[-1][0] / pools[-1][1] > total / weight:
                seconds, pool_weight, pool_count = pools.pop()
                total, weight, count = seconds + total, pool_weight + weight, pool_count + count
            pools.append((total, weight, count))
        heights = [total / weight for total, weight, count in pools for _ in range(count)]
        return list(zip(buckets, heights, strict=True))
