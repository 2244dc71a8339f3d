"""Which drafts should be verified: those that make the most tokens a second, none included.

A draft is worth its survival: the chance that it and all drafts above it are accepted. Survival
falls from a parent to its child, so taking drafts in the order of their survival takes every chain
and every tree from its root. With B requests and the m best drafts a step emits B + (sum of their
survivals) tokens and takes T(B + m) seconds. T is a staircase, so all m are tried.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.core import Floats, Ints, Law, Proposal


@dataclass(frozen=True, eq=False)
class Choice:
    """Which drafts of a batch to verify, and what is expected of it.

    nodes: [m] which of all drafts, in rising order
    tokens, seconds: of the step
    """

    nodes: Ints
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def choose(
    proposal: Proposal[Law], survival: Floats, seconds: Floats, margin: float = 0.0
) -> Choice:
    """Return the drafts with the highest goodput.

    The same on every rank that is given the same numbers: of equal survivals the earlier draft,
    then the earlier request goes first, and of equal goodputs the fewest rows.

    survival: [M] of each draft; none above its parent's
    seconds: [at least B + 1] of a step with so many rows; there will be no more rows than it has
    margin: by which share drafting must beat plain decoding
    """
    batch = proposal.batch_size
    order = np.lexsort((proposal.owners, proposal.places, -survival))[: len(seconds) - batch - 1]
    tokens, goodput = _goodputs(survival[order], batch, seconds)
    best = int(goodput.argmax())
    if goodput[best] <= goodput[0] * (1 + margin):
        best = 0
    return Choice(np.sort(order[:best]), float(tokens[best]), float(seconds[batch + best]))


def best_goodput(survival: Floats, batch: int, seconds: Floats) -> float:
    """Return the highest goodput that drafts of these survivals make possible."""
    falling = -np.sort(-survival)[: len(seconds) - batch - 1]
    return float(_goodputs(falling, batch, seconds)[1].max())


def _goodputs(falling: Floats, batch: int, seconds: Floats) -> tuple[Floats, Floats]:
    """Return the tokens, and the tokens a second, of a step with 0, 1, ... of these drafts."""
    tokens = np.full(len(falling) + 1, float(batch))
    tokens[1:] += falling.cumsum()
    return tokens, tokens / np.maximum(seconds[batch : batch + len(tokens)], 1e-12)
