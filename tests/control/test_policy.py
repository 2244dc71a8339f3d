"""The choice of drafts against every other choice."""

from __future__ import annotations

from itertools import product

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


def tokens(chains, counts):
    return len(chains) + sum(sum(c[:k]) for c, k in zip(chains, counts, strict=True))


@settings(deadline=None)
@given(CHAINS, STAIRS)
def test_no_other_choice_is_better(chains, stairs):
    def seconds(rows):
        return 1.0 + sum(stairs[:rows])

    found = choose(chains, seconds)
    assert abs(found.tokens - tokens(chains, found.counts)) < 1e-9
    assert found.seconds == seconds(len(chains) + sum(found.counts))
    for counts in product(*(range(len(c) + 1) for c in chains)):
        other = tokens(chains, counts) / seconds(len(chains) + sum(counts))
        assert other <= found.goodput * (1 + 1e-9)


def test_free_rows_are_all_taken_and_dear_ones_are_not():
    chains = [[0.9, 0.5], [0.2]]
    assert choose(chains, lambda rows: 1.0).counts == (2, 1)
    assert choose(chains, lambda rows: float(rows)).counts == (0, 0)
    assert choose(chains, lambda rows: 1 + 0.3 * (rows - 2)).counts == (1, 0)


def test_a_step_of_the_staircase_is_used_to_its_end():
    """Four rows cost what three do: a poor draft rides along."""
    assert choose([[0.9, 0.1]], lambda rows: 1.0 if rows == 1 else 1.3).counts == (2,)


def test_drafting_must_beat_plain_decoding_by_a_margin():
    def seconds(rows):
        return 1.0 if rows == 1 else 1.5

    assert choose([[0.6]], seconds).counts == (1,)
    assert choose([[0.6]], seconds, margin=0.1).counts == (0,)


def test_ranks_agree_on_equals():
    chains = [[0.5, 0.5], [0.5], [0.5]]
    found = choose(chains, lambda rows: 1.0, max_rows=5)
    assert found.counts == (1, 1, 0)  # the earlier depth, then the earlier request
    assert choose([[0.5], []], lambda rows: 1.0, max_rows=1).counts == (0, 0)
