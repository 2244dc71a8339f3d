"""A running average for measured times: robust to outliers, quick to follow a lasting change.

Step times have one-sided noise with large outliers. Each observation therefore moves the average by
a fraction of its distance, and the distance is clipped. If several observations in a row are
clipped in the same direction, the average is wrong, and each further one moves it twice as far.
"""

from __future__ import annotations

RATE = 0.1
"""Fraction of the distance by which one observation moves the average."""

PATIENCE = 3
"""Clipped observations in a row that may still be outliers. After them the moves double."""


class Estimate:
    """A running average that outliers move little and a lasting change moves fast.

    value: the average
    seen: number of observations; 0 if the value is assumed
    """

    def __init__(self, value: float, seen: int = 1) -> None:
        self.value, self.seen = value, seen
        self._clipped = 0  # clipped observations in a row; negative if they were below

    @property
    def is_wrong(self) -> bool:
        """Whether the last observations were all clipped, in the same direction."""
        return abs(self._clipped) > PATIENCE

    def observe(self, value: float, clip: float, rate: float = RATE) -> float:
        """Move the average towards an observation. Return the clipped distance.

        clip: the largest distance that a single observation may count for
        """
        distance = value - self.value
        side = (distance > clip) - (distance < -clip)
        self._clipped = self._clipped + side if side * self._clipped > 0 else side
        pace = 2.0 ** max(0, min(abs(self._clipped) - PATIENCE, 32))
        limit = clip * pace
        self.value += min(0.5, rate * pace) * max(-limit, min(limit, distance))
        self.seen += 1
        return max(-clip, min(clip, distance))
