"""Which drafts to verify: those with the highest goodput (tokens per second), or none.

The *survival* of a draft is the probability that it and all drafts above it are accepted. Survival
never rises from a parent to its child. Taking drafts by falling survival therefore takes every
chain and every tree from its root. With B requests and the m best drafts, a step emits
B + (sum of their survivals) tokens and takes T(B + m) seconds. T is a staircase, so every m is
compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.core import Floats, Ints, Proposal

NO_INDICES: Ints = np.empty(0, np.int64)
"""No drafts, or no requests."""


@dataclass(frozen=True, eq=False)
class Choice:
    """Which drafts of a batch to verify, and what the step is expected to do.

    nodes: [m] indices of the drafts in the proposal, in rising order
    tokens: expected tokens of the step
    seconds: expected time of the step
    """

    nodes: Ints
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def choose(proposal: Proposal, survival: Floats, seconds: Floats, margin: float = 0.0) -> Choice:
    """Return the drafts with the highest goodput.

    The result is the same on every rank that is given the same numbers. Of equal survivals the
    earlier place goes first, then the earlier request. Of equal goodputs the fewest rows win.

    survival: [M] of each draft; never above its parent's
    seconds: [at least B + 1] time of a step with so many rows; its length limits the rows
    margin: share by which drafting must beat plain decoding
    """
    batch = proposal.batch_size
    if not len(survival):
        return Choice(NO_INDICES, float(batch), float(seconds[batch]))
    order = np.lexsort((proposal.owners, proposal.places, -survival))[: len(seconds) - batch - 1]
    tokens, goodput = goodputs(survival[order], batch, seconds)
    best = int(goodput.argmax())
    if goodput[best] <= goodput[0] * (1 + margin):
        best = 0
    nodes = order[:best]
    nodes.sort()
    return Choice(nodes, float(tokens[best]), float(seconds[batch + best]))


def best_goodput(survival: Floats, batch: int, seconds: Floats) -> Any:
    """Return the highest goodput that drafts of these survivals can reach, [...].

    survival: [..., M]; seconds: [..., at least B + 1], as of `choose`
    """
    falling = -np.sort(-survival)[..., : seconds.shape[-1] - batch - 1]
    best: Any = goodputs(falling, batch, seconds)[1].max(-1)
    return best


def goodputs(falling: Floats, batch: int, seconds: Floats) -> tuple[Floats, Floats]:
    """Return the tokens, and the tokens per second, of a step with 0, 1, ... of these drafts."""
    tokens = np.empty((*falling.shape[:-1], falling.shape[-1] + 1))
    tokens[..., 0] = batch
    np.add(falling.cumsum(-1), batch, out=tokens[..., 1:])
    return tokens, tokens / np.maximum(seconds[..., batch : batch + tokens.shape[-1]], 1e-12)
