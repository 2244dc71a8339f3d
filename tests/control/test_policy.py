"""The choice of drafts against every other choice."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control.policy import choose

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


def counts_of(choice):
    """How many drafts of each chain were taken, each from its beginning."""
    assert all(nodes == tuple(range(len(nodes))) for nodes in choice.nodes)
    return tuple(len(nodes) for nodes in choice.nodes)


def counts(chains, seconds, margin=0.0, rows=20):
    return counts_of(choose(chains, times(seconds, rows), margin))


def tokens(chains, counts):
    return len(chains) + sum(sum(c[:k]) for c, k in zip(chains, counts, strict=True))


@settings(deadline=None)
@given(CHAINS, STAIRS)
def test_no_other_choice_is_better(chains, stairs):
    seconds = 1.0 + np.concatenate([[0.0], np.cumsum(stairs)])
    found = choose(chains, seconds)
    assert abs(found.tokens - tokens(chains, counts_of(found))) < 1e-9
    assert found.seconds == seconds[len(chains) + sum(counts_of(found))]
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
    found = choose(survival, times(lambda rows: 1.0, rows=7))
    assert found.nodes == ((0, 2, 3), (0, 1))
    assert found.tokens == pytest.approx(2 + 0.9 + 0.5 + 0.3 + 0.8 + 0.6)
