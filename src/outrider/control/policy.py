"""Which drafts should be verified: those that make the most tokens a second, none included.

A draft is worth its survival: the chance that it and all drafts above it are accepted. Survival
falls from a parent to its child, so taking drafts in the order of their survival takes every chain
and every tree from its root. With B requests and the m best drafts a step emits B + (sum of their
survivals) tokens and takes T(B + m) seconds. T is a staircase, so all m are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Choice:
    """Which drafts of each request to verify, and what is expected of it.

    nodes: [B] of each request, the drafts to verify, in their order
    tokens, seconds: of the step
    """

    nodes: tuple[tuple[int, ...], ...]
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def choose(
    survival: Sequence[Sequence[float]], seconds: NDArray[np.float64], margin: float = 0.0
) -> Choice:
    """Return the drafts with the highest goodput.

    The same on every rank that is given the same numbers: of equal survivals the earlier draft,
    then the earlier request goes first, and of equal goodputs the fewest rows.

    survival: for each request, of each of its drafts; none above its parent's, which comes first
    seconds: [at least B + 1] of a step with so many rows; there will be no more rows than it has
    margin: by which share drafting must beat plain decoding
    """
    batch = len(survival)
    counts = [len(chain) for chain in survival]
    chances = np.fromiter((chance for chain in survival for chance in chain), np.float64)
    owners = np.repeat(np.arange(batch), counts)
    places = np.fromiter((i for count in counts for i in range(count)), np.int64, sum(counts))
    order = np.lexsort((owners, places, -chances))[: len(seconds) - batch - 1]
    tokens = batch + np.concatenate([[0.0], chances[order].cumsum()])
    goodput = tokens / np.maximum(seconds[batch : batch + len(tokens)], 1e-12)
    best = int(goodput.argmax())
    if goodput[best] <= goodput[0] * (1 + margin):
        best = 0
    nodes: list[list[int]] = [[] for _ in survival]
    for i in order[:best].tolist():
        nodes[owners[i]].append(int(places[i]))
    return Choice(
        tuple(tuple(sorted(mine)) for mine in nodes),
        float(tokens[best]),
        float(seconds[batch + best]),
    )
