"""What a step can verify: the offers of all drafters, joined into one tree per request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from outrider.core import (
    Budget,
    Draft,
    Floats,
    Ints,
    Proposal,
    chain,
    likeliest,
    survival,
    unite,
)


@dataclass(frozen=True, eq=False)
class Offer:
    """What one drafter proposed in a step.

    name: of the drafter
    chances: [M] probability of each draft, given that its parent is accepted
    """

    name: str
    drafts: Proposal
    chances: Floats


@dataclass(frozen=True, eq=False)
class Plan:
    """All drafts that a step can verify.

    tree: the drafts, one tree per request
    sources: [M] index of the offer that proposed each draft first
    survival: [M] probability that a draft and all drafts above it are accepted
    """

    tree: Proposal
    sources: Ints
    survival: Floats


def join(offers: Sequence[Offer], budget: Budget) -> Plan:
    """Return the plan made of these offers.

    A draft that several offers contain appears once. If the host cannot verify trees, each request
    gets the best chain that was offered.
    """
    if not offers:
        batch = len(budget.max_drafts)
        return Plan(Proposal.empty(batch), np.empty(0, np.int64), np.empty(0))
    if len(offers) == 1:
        (offer,) = offers
        sources = np.zeros(len(offer.chances), np.int64)
        return Plan(offer.drafts, sources, _survival(offer))
    return _join_several(offers, budget)


def _survival(offer: Offer) -> Floats:
    """Return the probability of each draft that it and all drafts above it are accepted."""
    drafts, chances = offer.drafts, offer.chances
    if drafts.is_chain:
        if drafts.batch_size == 1:
            return chances.cumprod()
        table = np.ones((drafts.batch_size, drafts.max_depth))
        table[drafts.owners, drafts.places] = chances
        found: Floats = table.cumprod(1)[drafts.owners, drafts.places]
        return found
    # for some hundred drafts a loop takes less time than array operations for each depth
    alive = [1.0] * (len(chances) + 1)  # the last entry is the root's
    above = drafts.above.tolist()
    for node, chance in enumerate(chances.tolist()):
        alive[node] = chance * alive[above[node]]
    return np.array(alive[:-1])


def _join_several(offers: Sequence[Offer], budget: Budget) -> Plan:
    drafts = [offer.drafts.drafts() for offer in offers]
    spans = [np.split(offer.chances, offer.drafts.starts[1:-1]) for offer in offers]
    trees: list[Draft] = []
    sources: list[int] = []
    alive: list[float] = []
    for r, most in enumerate(budget.max_drafts.tolist()):
        options = [
            _Option(i, drafts[i][r], spans[i][r].tolist())
            for i in range(len(offers))
            if drafts[i][r].tokens
        ]
        tree, mine, chances = _tree(options, budget.trees)
        survivals = survival(tree.parents, chances)
        if len(survivals) > most:
            nodes = likeliest(survivals, most)
            tree = tree.keep(nodes)
            survivals, mine = [survivals[node] for node in nodes], [mine[node] for node in nodes]
        trees.append(tree)
        sources += mine
        alive += survivals
    return Plan(Proposal.of(trees), np.array(sources, np.int64), np.array(alive))


@dataclass(frozen=True, eq=False)
class _Option:
    """What one offer has for one request.

    source: index of the offer
    chances: of each draft, given that its parent is accepted
    """

    source: int
    draft: Draft
    chances: list[float]

    @property
    def expected(self) -> float:
        """Expected number of accepted drafts, if the draft is a chain."""
        return float(sum(accumulate(self.chances, mul)))


def _tree(options: Sequence[_Option], trees: bool) -> tuple[Draft, list[int], list[float]]:
    """Return one tree for a request, the source of each draft, and the chance of each."""
    if not options:
        return chain(()), [], []
    if not trees or len(options) == 1:
        best = max(options, key=lambda option: option.expected)  # of equals the first
        return best.draft, [best.source] * len(best.chances), best.chances
    tree, places = unite([option.draft for option in options])
    found, sources = [0.0] * len(tree.tokens), [-1] * len(tree.tokens)
    taken: defaultdict[int, float] = defaultdict(float)  # chances of a node's children so far
    for option, mine in zip(options, places, strict=True):
        before = taken.copy()
        for node, chance in zip(mine, option.chances, strict=True):
            if sources[node] < 0:
                # other offers have drafts for the same place, and only one draft can be right
                parent = tree.parents[node]
                found[node] = chance * (1.0 - min(1.0, before[parent]))
                sources[node] = option.source
                taken[parent] += found[node]
            else:
                found[node] = max(found[node], chance)
    return tree, sources, found
