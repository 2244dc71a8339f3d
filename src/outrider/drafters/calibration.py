"""How often the tokens that a draft model names are right: the first of them, the second, ..."""

from __future__ import annotations

import numpy as np

from outrider.core import Bools, Floats

BINS = 10
"""Ranges of confidence that are told apart."""

PRIOR, MEMORY = 8.0, 512.0
"""How many observations a chance counts for before the first one, and at most."""


class Calibration:
    """How often a child of a node was right, by its rank and by how sure the draft model was.

    Before anything is known: a greedy child is as likely as the draft model says. With shared coins
    a token that is drawn is right wherever the two models agree, however unlikely it was to be
    drawn: its chance falls with the rank only.

    ranks: how many children a node has
    """

    def __init__(self, ranks: int) -> None:
        drawn = np.repeat(0.8 * 0.2 ** np.arange(ranks)[:, None], BINS, 1)
        greedy = np.repeat((np.arange(BINS)[None] + 0.5) / BINS, ranks, 0)
        self._rates = np.stack([drawn, greedy])
        self._seen = np.full(self._rates.shape, PRIOR)

    def of(self, claimed: Floats, greedy: Bools) -> Floats:
        """Return the chance of each child, given that its parent was right.

        claimed: [N, ranks]; greedy: [N] -> [N, ranks]
        """
        bins = np.minimum(BINS - 1, (claimed * BINS).astype(np.int64))
        rates = self._rates[greedy.astype(np.int64)[:, None], np.arange(bins.shape[1]), bins]
        chances: Floats = rates.clip(1e-9, 1.0)
        return chances

    def observe(self, rank: int, claimed: float, greedy: bool, right: bool) -> None:
        """Learn whether a child was right; what is long ago fades."""
        place = int(greedy), rank, min(BINS - 1, int(claimed * BINS))
        self._seen[place] = seen = min(MEMORY, self._seen[place] + 1)
        self._rates[place] += (right - self._rates[place]) / seen
