"""The choice of drafts against every other choice."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control.policy import best_goodput, choose
from outrider.core import ROOT, Draft, PointMass, Proposal

CHAINS = st.lists(
    st.lists(st.floats(0.05, 0.95), max_size=4).map(
        lambda chances: [c for i, c in enumerate(sorted(chances, reverse=True))]
    ),
    min_size=1,
    max_size=4,
)
STAIRS = st.lists(st.floats(0.0, 0.8), min_size=20, max_size=20)


def times(seconds, rows=20):
    return np.array([float(seconds(n)) for n in range(rows + 1)])


def pick(trees, seconds, margin=0.0):
    """The choice among drafts of these survivals, and of each request those that were taken."""
    drafts = [Draft((7,) * len(tree), (ROOT,) * len(tree), PointMass()) for tree in trees]
    proposal = Proposal.of(drafts)
    found = choose(proposal, np.array([c for tree in trees for c in tree]), seconds, margin)
    assert (np.diff(found.nodes) > 0).all()
    taken = [
        proposal.places[found.nodes[proposal.owners[found.nodes] == r]] for r in range(len(trees))
    ]
    return found, [places.tolist() for places in taken]


def choose_chains(chains, seconds, margin=0.0):
    """The choice, and how many drafts of each chain were taken, each from its beginning."""
    found, taken = pick(chains, seconds, margin)
    assert all(places == list(range(len(places))) for places in taken)
    return found, tuple(map(len, taken))


def counts(chains, seconds, margin=0.0, rows=20):
    return choose_chains(chains, times(seconds, rows), margin)[1]


def tokens(chains, counts):
    return len(chains) + sum(sum(c[:k]) for c, k in zip(chains, counts, strict=True))


@settings(deadline=None)
@given(CHAINS, STAIRS)
def test_no_other_choice_is_better(chains, stairs):
    seconds = 1.0 + np.concatenate([[0.0], np.cumsum(stairs)])
    found, taken = choose_chains(chains, seconds)
    assert abs(found.tokens - tokens(chains, taken)) < 1e-9
    assert found.seconds == seconds[len(chains) + sum(taken)]
    survival = np.array([chance for chain in chains for chance in chain])
    assert best_goodput(survival, len(chains), seconds) == pytest.approx(found.goodput)
    for counts in product(*(range(len(c) + 1) for c in chains)):
        other = tokens(chains, counts) / seconds[len(chains) + sum(counts)]
        assert other <= found.goodput * (1 + 1e-9)


def test_free_rows_are_all_taken_and_dear_ones_are_not():
    chains = [[0.9, 0.5], [0.2]]
    assert counts(chains, lambda rows: 1.0) == (2, 1)
    assert counts(chains, float) == (0, 0)
    assert counts(chains, lambda rows: 1 + 0.3 * (rows - 2)) == (1, 0)


def test_a_step_of_the_staircase_is_used_to_its_end():
    """Four rows cost what three do: a poor draft rides along."""
    assert counts([[0.9, 0.1]], lambda rows: 1.0 if rows == 1 else 1.3) == (2,)


def test_drafting_must_beat_plain_decoding_by_a_margin():
    def seconds(rows):
        return 1.0 if rows == 1 else 1.5

    assert counts([[0.6]], seconds) == (1,)
    assert counts([[0.6]], seconds, margin=0.1) == (0,)


def test_ranks_agree_on_equals():
    chains = [[0.5, 0.5], [0.5], [0.5]]
    # the earlier depth, then the earlier request
    assert counts(chains, lambda rows: 1.0, rows=5) == (1, 1, 0)
    assert counts([[0.5], []], lambda rows: 1.0, rows=2) == (0, 0)


def test_trees_are_taken_from_their_roots():
    """The first request's second root and its child are worth more than the other's third."""
    survival = [[0.9, 0.05, 0.5, 0.3], [0.8, 0.6, 0.1]]
    found, taken = pick(survival, times(lambda rows: 1.0, rows=7))
    assert taken == [[0, 2, 3], [0, 1]]
    assert found.tokens == pytest.approx(2 + 0.9 + 0.5 + 0.3 + 0.8 + 0.6)
