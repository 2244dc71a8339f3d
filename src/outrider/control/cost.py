"""How long a step takes, learnt from this machine's own steps.

Time against rows is a staircase: flat while memory is the limit, then steps where a kernel or a
graph takes the next larger tile. So nothing is fitted but a height at each number of rows that was
seen (from 32 on, at each of a few), and never down: more rows never take less time. Between two of
them the step is taken to be in the middle, and behind the last there is none. That is hope, and
hope is tried: a step that lies elsewhere is found by halving.

Noise is one-sided and now and then large. An observation moves its estimate by a fraction of its
logarithm's distance, and by no more than CLIP: an outlier is felt a little, a new regime is
followed within some twenty steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

KNOTS: tuple[int, ...] = (
    *range(1, 33),
    *(36, 40, 44, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
)
RATE = 0.1
"""How much of its distance an estimate moves, once it has seen 1 / RATE observations."""

HOPE = 0.1
"""By how much what was seen once is hoped to be better than it looked, in logarithms. It shrinks
with the root of what was seen, so that one unlucky step does not rule a number of rows out."""

CLIP = 0.3
"""The furthest distance that is believed at once, in logarithms: a third more, or less."""


def _knot(rows: int) -> int:
    return KNOTS[min(bisect_left(KNOTS, rows), len(KNOTS) - 1)]


class Curve:
    """Seconds against a number of rows, never falling."""

    def __init__(self) -> None:
        self._logs: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._points: list[tuple[int, float]] | None = None  # worked out when first asked for

    @property
    def is_known(self) -> bool:
        """Whether anything has been observed."""
        return bool(self._logs)

    def has_seen(self, rows: int) -> bool:
        """Whether a step of about so many rows has been observed."""
        return _knot(rows) in self._logs

    def observe(self, rows: int, seconds: float) -> None:
        """Learn how long so many rows took."""
        self._points = None
        knot = _knot(rows)
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
        if self._points is None:
            self._points = self._rising()
        points = self._points
        if not points:
            return 0.0
        knot = _knot(rows)
        if knot <= points[0][0]:
            return points[0][1]
        for (left, low), (right, high) in pairwise(points):
            if knot <= right:
                return high if 2 * knot > left + right else low
        # more rows than ever seen: hope for the best, and find out
        return points[-1][1]

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


class StepCost:
    """The time of a step: a pass of the target with all around it, and passes of a draft model.

    verify: a pass of the target, by rows
    draft:  one pass of the draft model, by requests
    """

    def __init__(self) -> None:
        self.verify, self.draft = Curve(), Curve()

    def seconds(self, rows: int, draft_passes: int = 0, drafting: int = 0) -> float:
        """Return the time of a step of so many rows.

        draft_passes: of the draft model, one after the other; drafting: requests in each
        """
        time = self.verify.seconds(rows)
        return time + draft_passes * self.draft.seconds(drafting) if draft_passes else time
