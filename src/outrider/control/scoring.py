"""Learning from a step: which drafts would the emitted tokens have accepted?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from outrider.control.acceptance import DrafterChances
from outrider.control.plan import Offer
from outrider.core import Bools, Ints, Outcomes


def score(offer: Offer, chances: DrafterChances, rows: Ints, outcomes: Outcomes) -> None:
    """Compare an offer with the emitted tokens, and update the chances of its drafter.

    Drafts that were not verified count too. Each depth is learned after the one above it, because
    a draft says something only if its parent is right.

    rows: [B] of the requests: see `Acceptance.rows`
    """
    drafts = offer.drafts
    owned, sure = rows[drafts.owners], drafts.confidences
    for nodes, hits in levels(offer, outcomes):
        first, first_hits = nodes, hits
        if not drafts.is_chain:
            ranks = drafts.ranks[nodes]
            for rank in range(1, int(ranks.max()) + 1):
                those = nodes[ranks == rank]
                chances.sibling.observe(owned[those], sure[those], hits[ranks == rank])
            first, first_hits = nodes[ranks == 0], hits[ranks == 0]
        chances.first.observe(owned[first], sure[first], first_hits)
        if chances.prior is not None:
            chances.prior.observe(owned[first], np.ones(len(first)), first_hits)


def levels(offer: Offer, outcomes: Outcomes) -> Iterator[tuple[Ints, Bools]]:
    """Yield the drafts of each depth whose parents are right, and which of them are right."""
    drafts, depths = offer.drafts, offer.drafts.depths
    # a request that ended may have ended inside its accepted drafts: it says nothing
    goes_on = np.array([reason is None for reason in outcomes.finish_reasons])
    # beyond the emitted tokens it is not known whether a draft is right
    is_known = depths <= np.where(goes_on, outcomes.num_tokens, 0)[drafts.owners]
    if not is_known.any():
        return
    places = outcomes.starts[drafts.owners] + depths - 1
    emitted = outcomes.tokens[np.minimum(places, len(outcomes.tokens) - 1)]
    is_same = drafts.tokens.numpy() == emitted
    is_right = np.zeros(len(is_same) + 1, np.bool_)
    is_right[-1] = True  # the entry of the root
    order, ends = depths.argsort(kind="stable"), np.bincount(depths).cumsum().tolist()
    for start, end in pairwise(ends):
        level = order[start:end]
        nodes = level[is_known[level] & is_right[drafts.above[level]]]
        if not len(nodes):
            return
        hits = is_same[nodes]
        is_right[nodes] = hits
        yield nodes, hits
