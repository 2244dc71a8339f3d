"""The offers of several drafters, joined into one tree per request."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.plan import Offer, join
from outrider.core import ROOT, Budget, Draft, KeyedCoins, PointMass, Proposal, chain

FEW = 3  # requests


@st.composite
def offers(draw):
    """What some drafters have for the requests, with chances that are easy to multiply."""
    found = []
    for name in "abc"[: draw(st.integers(0, 3))]:
        trees = []
        for _ in range(FEW):
            nodes: list[tuple[int, int]] = []
            for _ in range(draw(st.integers(0, 5))):
                node = draw(st.integers(ROOT, len(nodes) - 1)), draw(st.integers(0, 3))
                nodes += [] if node in nodes else [node]
            sure = tuple(draw(st.sampled_from((0.25, 0.5, 1.0))) for _ in nodes)
            parents, tokens = (tuple(node[i] for node in nodes) for i in (0, 1))
            trees.append(Draft(tokens, parents, PointMass(), sure))
        proposal = Proposal.of(trees)
        found.append(Offer(name, proposal, proposal.confidences / 2))
    return found


def of_one_request(*drafts):
    """An offer of each of these, of which everything is believed."""
    return [Offer(f"{i}", Proposal.of([d]), np.array(d.sure)) for i, d in enumerate(drafts)]


def budget(*most, trees=True):
    return Budget(most, "match", KeyedCoins(), trees=trees)


def paths(proposal):
    """The texts that lead to each draft, with the request that each is for."""
    rows = proposal.draft_rows.tolist()
    return [(proposal.owners[i], proposal.paths()[row]) for i, row in enumerate(rows)]


@given(offers())
def test_a_joined_tree_has_each_path_once(offers):
    plan = join(offers, budget(*[99] * FEW))
    offered = [paths(offer.drafts) for offer in offers]
    assert Counter(paths(plan.tree)) == Counter({path for mine in offered for path in mine})
    columns = paths(plan.tree), plan.sources, plan.tree.confidences
    for path, source, sure in zip(*columns, strict=True):
        assert source == next(i for i, mine in enumerate(offered) if path in mine)
        said = [
            offer.drafts.confidences[i]
            for offer, mine in zip(offers, offered, strict=True)
            for i, other in enumerate(mine)
            if other == path
        ]
        assert sure == max(said)
    above = np.append(plan.survival, 1.0)[plan.tree.above]
    assert (plan.survival <= above).all()


@given(offers(), st.integers(0, 4))
def test_the_likeliest_stay_where_there_is_no_room(offers, most):
    whole, cut = join(offers, budget(*[99] * FEW)), join(offers, budget(*[most] * FEW))
    if sum(len(offer.chances) > 0 for offer in offers) < 2:
        return  # one offer has kept to the budget itself
    survivals = dict(zip(paths(whole.tree), whole.survival.tolist(), strict=True))
    for request in range(FEW):
        all_of_it = sorted((s for (r, _), s in survivals.items() if r == request), reverse=True)
        kept = cut.survival[cut.tree.owners == request].tolist()
        assert sorted(kept, reverse=True) == all_of_it[:most]
    for path, survival in zip(paths(cut.tree), cut.survival.tolist(), strict=True):
        assert survivals[path] == survival


def test_only_one_of_two_drafts_for_a_place_can_be_right():
    first, second = chain([1, 2], confidences=(0.8, 0.5)), chain([3], confidences=(0.5,))
    plan = join(of_one_request(first, second), budget(9))
    assert plan.tree.tokens.tolist() == [1, 2, 3]
    assert plan.tree.parents.tolist() == [ROOT, 0, ROOT]
    assert plan.survival.tolist() == pytest.approx([0.8, 0.4, 0.5 * (1 - 0.8)])
    assert plan.sources.tolist() == [0, 0, 1]


def test_without_trees_the_best_chain_stays():
    long, sure = chain([1, 2, 3], confidences=(0.5, 0.5, 0.5)), chain([4], confidences=(0.9,))
    plan = join(of_one_request(long, sure), budget(9, trees=False))
    assert (plan.tree.tokens.tolist(), plan.sources.tolist()) == ([4], [1])  # 0.9 > 0.875
    assert plan.tree.is_chain


def test_an_offer_without_drafts_changes_nothing():
    empty, drafts = Proposal.empty(1), Proposal.of([chain([1, 2], confidences=(0.5, 0.5))])
    plan = join([Offer("a", empty, np.empty(0)), Offer("b", drafts, np.full(2, 0.5))], budget(9))
    assert plan.tree is drafts
    assert plan.sources.tolist() == [1, 1]
    assert plan.survival.tolist() == [0.5, 0.25]
