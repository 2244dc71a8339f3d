"""The slowdown guard: turns drafts off while speculation is measured to be slower than plain steps.

The policy plans with estimates, and estimates can be wrong. The slowdown guard uses measured totals
only: the time of recent speculative steps, and the time that plain steps would have taken for the
same tokens. The time of plain steps is measured on the same machine.
"""

from __future__ import annotations

WINDOW = 32.0
"""Half-life of a step in the totals, in steps."""

MIN_STEPS = 16
"""Speculative steps before the guard compares the totals."""

SLACK = 0.02
"""Share by which speculation may be slower before the guard trips. It allows for noise."""

REST_STEPS, MAX_REST_STEPS = 16, 1024
"""Steps without drafts after the first trip, and the most. Each further trip doubles the number."""


class SlowdownGuard:
    """Turns speculation off when it is slower than plain decoding, and on again after a rest.

    trips: how many times speculation was turned off so far
    """

    def __init__(self) -> None:
        self.trips = 0
        self._left, self._next = 0, REST_STEPS
        self._clear()

    def _clear(self) -> None:
        self._spent = self._plain = 0.0
        self._steps = 0

    @property
    def is_tripped(self) -> bool:
        """Whether the next step must be plain."""
        return self._left > 0

    def observe(self, speculated: bool, seconds: float, plain_seconds: float) -> None:
        """Add one step to the totals, and trip if speculation is slower.

        speculated: whether the step had drafts
        seconds: time of the step
        plain_seconds: time that plain steps would have taken to emit the same tokens
        """
        if self._left:
            self._left -= 1
            return
        if not speculated:
            return
        keep = 0.5 ** (1 / WINDOW)
        self._spent = keep * self._spent + seconds
        self._plain = keep * self._plain + plain_seconds
        self._steps += 1
        if self._steps < MIN_STEPS:
            return
        if self._spent > (1 + SLACK) * self._plain:
            self.trips += 1
            self._left, self._next = self._next, min(2 * self._next, MAX_REST_STEPS)
            self._clear()
        elif self._steps == 4 * MIN_STEPS:
            self._next = REST_STEPS  # speculation has been faster for a while: forget earlier trips
