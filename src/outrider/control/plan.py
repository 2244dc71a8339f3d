"""What a step can verify: the offers of all drafters, joined into one tree per request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from outrider.control.acceptance import DrafterChances
from outrider.core import ROOT, Budget, Floats, Ints, Proposal, likeliest, survival


@dataclass(frozen=True, eq=False)
class Offer:
    """What one drafter proposed in a step.

    name: of the drafter
    chances: [M] probability of each draft, given that its parent is accepted
    """

    name: str
    drafts: Proposal
    chances: Floats

    @staticmethod
    def of(name: str, drafts: Proposal, known: DrafterChances, batch_rows: Ints) -> Offer:
        """Return the offer made of a drafter's proposal, with the chance of each draft.

        known: of the drafter
        batch_rows: [B] of the requests: see `Acceptance.rows`
        """
        rows, sure = batch_rows[drafts.owners], drafts.confidences
        chances = known.first.of(rows, sure)
        if not drafts.is_chain:
            beside = drafts.ranks.nonzero()[0]
            chances[beside] = known.sibling.of(rows[beside], sure[beside])
        return Offer(name, drafts, chances)


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

    def names(self, nodes: Ints, offers: Sequence[Offer]) -> list[str]:
        """Return the drafter of each request: that of its first draft; "" without drafts.

        nodes: the drafts that count, in rising order
        offers: that the plan was made of
        """
        names = [""] * self.tree.batch_size
        owners, first = np.unique(self.tree.owners[nodes], return_index=True)
        for r, source in zip(owners.tolist(), self.sources[nodes[first]].tolist(), strict=True):
            names[r] = offers[source].name
        return names


def join(offers: Sequence[Offer], budget: Budget) -> Plan:
    """Return the plan made of these offers.

    A draft that several offers contain appears once. If the engine cannot verify trees, each
    request gets the best chain that was offered.
    """
    sources = [source for source, offer in enumerate(offers) if len(offer.chances)]
    if not sources:
        batch = len(budget.max_drafts)
        return Plan(Proposal.empty(batch), np.empty(0, np.int64), np.empty(0))
    if len(sources) > 1:
        return _join_several([_by_request(source, offers[source]) for source in sources], budget)
    offer = offers[sources[0]]
    return Plan(offer.drafts, np.full(len(offer.chances), sources[0], np.int64), _survival(offer))


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


def _join_several(offers: Sequence[Sequence[_Drafts]], budget: Budget) -> Plan:
    """Return the plan made of these offers, each given as the drafts of each request."""
    tokens, parents, sure = list[int](), list[int](), list[float]()
    sources, alive, counts = list[int](), list[float](), list[int]()
    for most, *parts in zip(budget.max_drafts.tolist(), *offers, strict=True):
        tree = _tree([part for part in parts if part.tokens], budget.trees)
        survivals = survival(tree.parents, tree.chances)
        if len(survivals) > most:
            nodes = likeliest(survivals, most)
            tree, survivals = tree.keep(nodes), [survivals[node] for node in nodes]
        tokens += tree.tokens
        parents += tree.parents
        sure += tree.sure
        sources += tree.sources
        alive += survivals
        counts.append(len(survivals))
    ids, lengths, above, origin = (
        np.array(column, np.int64) for column in (tokens, counts, parents, sources)
    )
    joined = Proposal.found(ids, lengths, above, np.array(sure), trees=budget.trees)
    return Plan(joined, origin, np.array(alive))


class _Drafts(NamedTuple):
    """Drafts of one request: each one's token, parent, confidence, chance and source."""

    tokens: list[int]
    parents: list[int]
    sure: list[float]
    chances: list[float]
    sources: list[int]

    def keep(self, nodes: Sequence[int]) -> _Drafts:
        """Return these drafts alone, in this order; each one's parent must be among them."""
        place = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        columns: tuple[list[Any], ...] = self
        kept = _Drafts(*([column[node] for node in nodes] for column in columns))
        return kept._replace(parents=[place[parent] for parent in kept.parents])


def _by_request(source: int, offer: Offer) -> list[_Drafts]:
    """Return what an offer has for each request."""
    drafts = offer.drafts
    columns = drafts.tokens, drafts.parents, drafts.confidences, offer.chances
    lists: list[list[Any]] = [column.tolist() for column in columns]
    lists.append([source] * len(offer.chances))
    starts = drafts.starts.tolist()
    return [_Drafts(*(column[a:b] for column in lists)) for a, b in pairwise(starts)]


def _tree(parts: Sequence[_Drafts], trees: bool) -> _Drafts:
    """Return one tree for a request: of the first part, and of others what is not in it yet."""
    if len(parts) == 1:
        return parts[0]
    if not trees and parts:
        # by the expected number of accepted drafts; of equals the first
        return max(parts, key=lambda part: sum(accumulate(part.chances, mul)))
    tree = _Drafts([], [], [], [], [])
    known: dict[tuple[int, int], int] = {}
    taken: defaultdict[int, float] = defaultdict(float)  # chances of a node's children so far
    for part in parts:
        before, mine = taken.copy(), list[int]()
        for token, parent, sure, chance, source in zip(*part, strict=True):
            above = ROOT if parent == ROOT else mine[parent]
            node = known.setdefault((above, token), len(tree.tokens))
            if node == len(tree.tokens):
                # other parts have drafts for the same place, and only one draft can be right
                left = chance * (1.0 - min(1.0, before[above]))
                taken[above] += left
                tree.tokens.append(token)
                tree.parents.append(above)
                tree.sure.append(sure)
                tree.chances.append(left)
                tree.sources.append(source)
            else:
                tree.sure[node] = max(tree.sure[node], sure)
                tree.chances[node] = max(tree.chances[node], chance)
            mine.append(node)
    return tree
