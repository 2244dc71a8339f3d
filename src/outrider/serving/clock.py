"""A step's time, part by part."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable


class StepClock:
    """Splits a step's time into parts. On a GPU, a part is charged for what it waits for.

    since: when the step before ended, if nothing else came between: the scheduler's share
    parts: seconds, by part
    now: returns seconds, from any origin
    laps: the parts one after the other: part, begin, end
    """

    def __init__(self, since: float | None, now: Callable[[], float] = time.perf_counter) -> None:
        self.parts: defaultdict[str, float] = defaultdict(float)
        self.laps: list[tuple[str, float, float]] = []
        self._now = now
        self.last = now() if since is None else since

    def begin(self, moment: float | None) -> None:
        """Begin anew at this moment, unless the step began later: steps must not overlap."""
        if moment is not None and self.last < moment:
            self.parts.clear()
            self.laps.clear()
            self.last = moment

    def skip(self) -> None:
        """Leave the time since the last lap out."""
        self.last = self._now()

    def lap(self, part: str, draft_passes: float = 0.0) -> None:
        """Charge the time since the last lap to this part, draft passes to a part of their own."""
        now = self._now()
        if draft_passes:
            self.parts["draft_forward"] += draft_passes
        self.parts[part] += now - self.last - draft_passes
        self.laps.append((part, self.last, now))
        self.last = now
