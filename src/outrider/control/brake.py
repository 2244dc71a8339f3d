"""The last word on speculation: it stops where it was measured to be slower than plain decoding.

A policy that plans by estimates can be wrong in ways that it does not see. The brake looks at
nothing but the sum: the time that speculative steps took, against the time that plain steps, as
they were measured here, would have taken for the same tokens.
"""

from __future__ import annotations

WINDOW = 32.0
"""Steps after which a step counts half as much."""

ENOUGH = 16
"""Steps before the brake judges."""

SLACK = 0.02
"""By which share the sum may be worse: noise."""

REST, LONGEST_REST = 16, 1024
"""Steps without drafts; twice as many each time, if the next try fails too."""


class Brake:
    """Turns speculation off, and on again.

    pulled: how often it was turned off so far
    """

    def __init__(self) -> None:
        self.pulled = 0
        self._left, self._next = 0, REST
        self._clear()

    def _clear(self) -> None:
        self._spent = self._plain = 0.0
        self._steps = 0

    @property
    def is_on(self) -> bool:
        """Whether steps should go without drafts now."""
        return self._left > 0

    def observe(self, speculated: bool, seconds: float, plain_seconds: float) -> None:
        """Learn of a step.

        speculated: whether it had drafts
        seconds: that it took
        plain_seconds: that plain steps would have taken for the tokens it emitted
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
        if self._steps < ENOUGH:
            return
        if self._spent > (1 + SLACK) * self._plain:
            self.pulled += 1
            self._left, self._next = self._next, min(2 * self._next, LONGEST_REST)
            self._clear()
        elif self._steps == 4 * ENOUGH:
            self._next = REST  # it has been worth its while again
