"""How many drafts each request should have verified: the most tokens a second, none included.

A draft slot (request r, depth j) is worth its survival: the chance that it and all drafts before
it are accepted. Survival falls along a chain, so taking slots in the order of their survival takes
every chain from its beginning. With n requests and the m best slots a step emits n + (sum of their
survivals) tokens and takes T(n, n + m) seconds. T is a staircase, so all m are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """How many drafts of each request to verify, and what is expected of it.

    counts: [B]
    tokens, seconds: of the step
    """

    counts: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def choose(
    survival: Sequence[Sequence[float]],
    seconds: Callable[[int], float],
    margin: float = 0.0,
    max_rows: int | None = None,
) -> Choice:
    """Return the counts of drafts with the highest goodput.

    The same on every rank that is given the same numbers: of equal survivals the earlier depth,
    then the earlier request goes first, and of equal goodputs the fewest rows.

    survival: for each request, of each of its drafts, not rising
    seconds: of a step with so many rows
    margin: by which share drafting must beat plain decoding
    max_rows: rows that a step may have
    """
    batch = len(survival)
    slots = [
        (-chance, depth, r)
        for r, chain in enumerate(survival)
        for depth, chance in enumerate(chain)
    ]
    slots.sort()
    if max_rows is not None:
        slots = slots[: max(0, max_rows - batch)]
    plain = Choice((0,) * batch, float(batch), seconds(batch))
    tokens, floor, taken = float(batch), plain.goodput * (1 + margin), 0
    for m, (negative, _, _) in enumerate(slots, 1):
        tokens -= negative
        goodput = tokens / seconds(batch + m)
        if goodput > floor:
            floor, taken = goodput, m
    if not taken:
        return plain
    counts = [0] * batch
    for _, _, r in slots[:taken]:
        counts[r] += 1
    expected = batch - sum(negative for negative, _, _ in slots[:taken])
    return Choice(tuple(counts), expected, seconds(batch + taken))
