"""The choice of drafts against every other choice."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control import policy
from outrider.control.policy import LEAST_SURVIVAL, best_goodput, choose, spread
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


# -- how many drafts each request gets, where none may be slowed down much


def emitted(survival, num_drafts):
    """Return the tokens that are expected of each request."""
    return np.array([1 + row[:k].sum() for row, k in zip(survival, num_drafts, strict=True)])


def slows_down(survival, seconds, spare, slowdown, num_drafts):
    """Say whether a request waits longer than its tokens are worth."""
    batch = len(survival)
    time = seconds[batch + sum(num_drafts)] / seconds[batch]
    if slowdown is None or time <= 1 + slowdown + 1e-9:
        return False
    worth = (1 + slowdown) * (emitted(survival, num_drafts) + spare)
    return bool((worth < time - 1e-9).any())


def best_of_all(survival, seconds, spare, slowdown):
    """Return the highest goodput of all numbers of drafts that slow no request down too much."""
    batch, depth = survival.shape
    worth = (survival > LEAST_SURVIVAL).sum(1)  # others are never verified
    return max(
        emitted(survival, counts).sum() / seconds[batch + sum(counts)]
        for counts in product(range(depth + 1), repeat=batch)
        if batch + sum(counts) < len(seconds)
        and not (np.array(counts) > worth).any()
        and not slows_down(survival, seconds, spare, slowdown, counts)
    )


def cases(count=1500):
    """Make small cases up: chances, times that rise evenly or in steps, and what may be lost."""
    rng = np.random.default_rng(0)
    for number in range(count):
        batch, depth = rng.integers(1, 4, 2)
        chances = rng.choice([0.005, 0.02, 0.1, 0.3, 0.6, 0.9, 0.97], (batch, depth))
        survival = (chances * rng.uniform(0.8, 1, (batch, depth))).cumprod(1)
        rows = rng.integers(0, batch * depth + 1)  # there may be fewer rows than drafts
        stairs = (
            np.full(rows, rng.uniform(0, 0.3)),
            rng.uniform(0, 0.3, rows),
            rng.choice([0, 0, 0, 0.5], rows) * rng.uniform(0.1, 1),
        )[number % 3]
        seconds = np.concatenate([np.ones(batch + 1), 1 + stairs.cumsum()])
        yield survival, seconds, rng.choice([0, 0, -0.05, -0.3], batch)


SLOWDOWNS = (0.0, 0.02, 0.2)


def test_no_request_is_slowed_down_and_goodput_is_nearly_the_best():
    some_drafts = 0
    for survival, seconds, spare in cases():
        for slowdown in SLOWDOWNS:
            found = spread(survival, seconds, spare, slowdown)
            counts, rows = found.num_drafts, len(survival) + found.num_drafts.sum()
            assert rows < len(seconds)
            assert (counts <= survival.shape[1]).all()
            assert not slows_down(survival, seconds, spare, slowdown, counts)
            assert found.goodput == pytest.approx(emitted(survival, counts).sum() / seconds[rows])
            assert found.goodput >= 0.97 * best_of_all(survival, seconds, spare, slowdown)
            some_drafts += counts.any()
    assert some_drafts > 1000


def test_without_a_limit_goodput_is_the_best():
    for survival, seconds, spare in cases():
        found = spread(survival, seconds, spare, None)
        assert found.goodput == pytest.approx(best_of_all(survival, seconds, spare, None))


def test_twin_without_the_limit_requests_are_slowed_down():
    seen = [
        slows_down(
            survival, seconds, spare, 0.02, spread(survival, seconds, spare, None).num_drafts
        )
        for survival, seconds, spare in cases()
    ]
    assert sum(seen) > 50


@pytest.mark.parametrize(("batch", "copying"), [(4, 0.2), (16, 0.2), (16, 0.6), (32, 0.6)])
def test_few_numbers_are_compared_and_little_is_lost(monkeypatch, batch, copying):
    """In a batch of 16 with up to 24 drafts each there are 385 numbers."""
    rng = np.random.default_rng(batch)
    for _ in range(20):
        ease = rng.normal(np.where(rng.random(batch) < copying, 3.0, 0.0), 1.0)
        chances = 1 / (1 + np.exp(-ease[:, None] - np.linspace(-1.5, 2, 24)))
        rows = np.arange(batch * 25 + 1)
        case = chances.cumprod(1), 1 + 0.004 * np.maximum(rows - batch, 0), np.zeros(batch), 0.02
        found = spread(*case).goodput
        with monkeypatch.context() as patch:
            patch.setattr(policy, "CANDIDATES", len(rows))
            assert found >= 0.97 * spread(*case).goodput


def of_one_that_copies(batch=32, depth=8):
    """Return survivals of requests of which one copies, and times that rise with every row."""
    survival = np.full((batch, depth), 0.03)
    survival[5] = 0.98 ** np.arange(1, depth + 1)
    return survival, np.array([1 + 0.002 * max(0, n - batch) for n in range(batch * (1 + depth))])


def test_a_request_that_copies_gets_rows_among_many_that_do_not():
    """Rows are shared as a total: an equal share would be a draft or none for each."""
    survival, seconds = of_one_that_copies()
    for slowdown in (None, 0.02):
        found = spread(survival, seconds[: 32 + 8 + 1], np.zeros(32), slowdown)
        assert found.num_drafts.tolist() == [8 if r == 5 else 0 for r in range(32)]


def test_drafts_of_one_take_no_more_time_than_others_may_wait():
    survival, seconds = of_one_that_copies()
    seconds = 1 + 5 * (seconds - 1)
    assert spread(survival, seconds, np.zeros(32), None).num_drafts.tolist()[5] == 8
    found = spread(survival, seconds, np.zeros(32), 0.02).num_drafts
    assert found.sum() == found[5] == 2


def test_requests_that_gain_too_may_wait_longer():
    survival = np.array([[0.9, 0.8, 0.7], [0.3, 0.1, 0.05]])
    seconds = np.array([1, 1, 1, 1.1, 1.2, 1.25, 1.3, 1.4, 1.5])
    wide = spread(survival, seconds, np.zeros(2), 0.02).num_drafts
    assert wide.tolist() == [3, 1]
    # the second one has emitted less than plain decoding would have: more drafts do not help
    late = spread(survival, seconds, np.array([0, -0.4]), 0.02).num_drafts
    assert late.tolist() == [0, 0]


def test_few_rows_go_to_those_that_need_them_first():
    """The others' drafts are more likely, and without its own the third one is slowed down."""
    survival = np.array([[0.9, 0.8], [0.9, 0.8], [0.3, 0.1]])
    seconds = np.array([1, 1, 1, 1, 1.1, 1.2, 1.25])
    found = spread(survival, seconds, np.zeros(3), 0.0)
    assert found.num_drafts.tolist() == [1, 1, 1]


def test_a_gain_below_the_margin_is_left():
    survival, seconds = np.array([[0.3]]), np.array([1.0, 1.0, 1.25])
    assert spread(survival, seconds, np.zeros(1), None).num_drafts.tolist() == [1]
    assert spread(survival, seconds, np.zeros(1), None, margin=0.05).num_drafts.tolist() == [0]


def test_drafts_that_are_hardly_ever_right_are_not_verified_though_they_cost_nothing():
    survival = np.array([[0.5, LEAST_SURVIVAL], [LEAST_SURVIVAL / 2, 0.0]])
    assert spread(survival, np.ones(7), np.zeros(2), 0.02).num_drafts.tolist() == [1, 0]
