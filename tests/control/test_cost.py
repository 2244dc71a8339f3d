"""The cost model on made-up machines: stairs, noise, and a change of regime."""

from __future__ import annotations

import random

import pytest

from outrider.control.cost import DraftCost, StepCost
from outrider.control.curve import ROW_BUCKETS, Curve
from outrider.control.decision import Limits


def stairs(rows: int) -> float:
    """Flat to 16 rows, then a step for every 16."""
    return 0.1 * (1 + 0.4 * ((rows - 1) // 16))


def learn(curve: Curve, machine, steps: int, seed: int = 0, rows=range(1, 49)) -> None:
    """Observe with noise; one step in twenty is three times as long."""
    rng = random.Random(seed)
    for _ in range(steps):
        n = rng.choice(rows)
        noise = rng.lognormvariate(0.0, 0.05) * (3.0 if rng.random() < 0.05 else 1.0)
        curve.observe(n, machine(n) * noise)


def test_nothing_is_known_before_anything_is_seen():
    assert not Curve().seconds(1)
    assert Curve().seconds(4) == 0.0


def test_stairs_are_learnt_through_noise():
    curve = Curve()
    learn(curve, stairs, 2000)
    for rows in ROW_BUCKETS[:36]:
        assert curve.seconds(rows) == pytest.approx(stairs(rows), rel=0.2)
    times = [curve.seconds(rows) for rows in range(1, 200)]
    assert times == sorted(times)


def test_a_single_outlier_moves_little():
    curve = Curve()
    for _ in range(50):
        curve.observe(4, 0.1)
    curve.observe(4, 100.0)
    assert curve.seconds(4) < 0.104


def test_a_new_regime_is_followed():
    """Another process takes half of the machine: within thirty steps the model knows."""
    curve = Curve()
    learn(curve, lambda rows: 0.1, 300, rows=[4])
    learn(curve, lambda rows: 0.2, 30, rows=[4])
    assert curve.seconds(4) == pytest.approx(0.2, rel=0.25)


def test_what_falls_is_pooled():
    curve = Curve()
    for _ in range(10_000):  # until optimism is gone
        curve.observe(2, 0.12)
        curve.observe(4, 0.10)
        curve.observe(8, 0.20)
    assert curve.seconds(2) == curve.seconds(3) == curve.seconds(4) == pytest.approx(0.11, rel=0.01)
    assert curve.seconds(6) == pytest.approx(0.11, rel=0.01)  # the step: in the middle
    assert curve.seconds(7) == pytest.approx(0.20, rel=0.01)
    # beyond what was seen: as steep as from the first to the last
    assert curve.seconds(14) == pytest.approx(0.29, rel=0.01)


def test_a_step_is_made_of_its_parts():
    cost, draft = StepCost(), DraftCost()
    for _ in range(10_000):
        cost.observe(8, 1000, 0.3)
        draft.passes.observe(2, 0.05)
    assert cost.table(8, 0, 8)[-1] == pytest.approx(0.3, rel=0.01)
    assert draft.seconds(3, 2, 2) == pytest.approx(0.15, rel=0.01)


def test_context_is_told_from_rows():
    """Attention reads every token of the context: 1 microsecond each on this machine."""
    cost, rng = StepCost(), random.Random(0)
    for _ in range(2000):
        rows, context = rng.choice([4, 8, 16]), rng.randrange(0, 100_000)
        cost.observe(rows, context, (stairs(rows) + 1e-6 * context) * rng.lognormvariate(0, 0.05))
    for context in (1_000, 50_000, 100_000):
        expected = stairs(8) + 1e-6 * context
        assert cost.table(8, context, 8)[-1] == pytest.approx(expected, rel=0.2)


def test_noise_is_not_taken_for_context():
    cost, rng = StepCost(), random.Random(0)
    for step in range(500):
        cost.observe(4, 1000 + step % 50, 0.1 * rng.lognormvariate(0, 0.1))
    assert cost.table(4, 1000, 4)[-1] == pytest.approx(0.1, rel=0.1)
    assert cost.slope.value * 1000 < 0.02


def test_graphs_have_their_own_steps():
    """Rows are padded to the next captured graph: nothing lies between."""
    curve = Curve(row_buckets=[8, 16, 32])
    for _ in range(10_000):
        curve.observe(5, 0.1)
        curve.observe(32, 0.3)
    assert curve.seconds(1) == curve.seconds(8) == pytest.approx(0.1, rel=0.01)
    assert curve.seconds(9) == curve.seconds(16) == curve.seconds(8)  # the middle: not above 20
    assert curve.seconds(17) == pytest.approx(0.3, rel=0.01)


def test_what_was_seen_once_is_assumed_to_be_better():
    curve = Curve()
    curve.observe(4, 0.1)
    once = curve.seconds(4)
    for _ in range(50):
        curve.observe(4, 0.1)
    assert 0.09 < once < curve.seconds(4) < 0.1


def test_the_first_pass_of_a_draft_model_reads_what_is_new():
    """Its time is told from the others', though only the sum is seen."""
    cost, rng = DraftCost(), random.Random(3)
    for _ in range(200):
        passes, unread = rng.randrange(1, 6), rng.choice((4, 64))
        seconds = (0.3 if unread == 64 else 0.05) + (passes - 1) * 0.05
        cost.observe(passes, 4, unread, seconds)
    assert cost.seconds(1, 4, 64) == pytest.approx(0.3, rel=0.1)
    assert cost.seconds(5, 4, 4) == pytest.approx(0.25, rel=0.1)
    assert cost.seconds(5, 4, 64) == pytest.approx(0.5, rel=0.1)


def test_a_slow_spell_is_not_a_long_context():
    """Other texts, 1,500 tokens longer, come while the machine is slower by a third."""
    cost = StepCost()
    for _ in range(20):
        cost.observe(16, 1000, 0.27)
        cost.observe(30, 1000, 0.30)
    for _ in range(15):
        cost.observe(30, 2500, 0.40)
    plain, drafting = cost.table(30, 2500, 16)[[16, 30]]
    assert drafting > 1.3 * plain


def without_graphs(rows: int) -> float:
    """Graphs up to 160 rows; beyond them every kernel is launched by the host."""
    return 0.006 + 45e-6 * rows if rows <= 160 else 0.034 + 20e-6 * (rows - 160)


def test_rows_beyond_the_largest_graph_have_a_time_of_their_own():
    """A pass of 400 rows without a graph says nothing of the graph for 160, nor does it fit it."""
    curve = Curve(row_buckets=range(8, 161, 8))
    for _ in range(100):
        for rows in (8, 64, 160, 400):
            curve.observe(rows, without_graphs(rows))
    assert curve.row_bucket(400) == 448
    assert curve.seconds(160) == pytest.approx(without_graphs(160), rel=0.02)
    assert curve.seconds(400) == pytest.approx(without_graphs(400), rel=0.02)
    assert curve.seconds(152) < 0.02  # a graph
    assert curve.seconds(161) == curve.seconds(400)  # the step is where the graphs end
    # beyond: a row costs what it costs with graphs
    assert curve.seconds(600) == pytest.approx(0.039 + 200 * 45e-6, rel=0.1)


def test_rows_without_a_graph_are_assumed_slow_until_they_are_seen():
    curve = Curve(row_buckets=range(8, 161, 8))
    for _ in range(100):
        for rows in (8, 64, 128):
            curve.observe(rows, without_graphs(rows))
    assert not curve.has_seen(161)
    assert not curve.has_seen(400)
    assert curve.seconds(160) == pytest.approx(without_graphs(160), rel=0.05)
    assert curve.seconds(400) >= 2.5 * curve.seconds(160)
    times = [curve.seconds(rows) for rows in range(1, 1000)]
    assert times == sorted(times)
    assert list(curve.table(999)[1:]) == times


@pytest.mark.parametrize("row_buckets", [ROW_BUCKETS, (8, 16, 600)], ids=["no graphs", "graphs"])
def test_many_rows_are_told_apart(row_buckets):
    curve = Curve(row_buckets=row_buckets)
    for _ in range(100):
        for rows in (512, 1024, 4096, 100_000):
            curve.observe(rows, rows / 1000)
    for rows in (1024, 4096, 100_000):
        assert rows <= curve.row_bucket(rows) <= 1.25 * rows
        assert curve.seconds(rows) == pytest.approx(rows / 1000, rel=0.03)
    assert curve.row_bucket(1024) == curve.row_bucket(1023) == 1024
    assert curve.row_bucket(1025) == 1280
    times = list(curve.table(150_000))
    assert times == sorted(times)


@pytest.mark.parametrize("factor", [0.01, 0.1, 10.0, 100.0])
def test_a_first_value_that_is_far_off_is_left_within_a_few_steps(factor):
    """Calibration that times launches, not passes: wrong by a hundred."""
    cost = StepCost()
    for _ in range(2):
        cost.observe(4, 0, 0.1 * factor)
    context = 0
    for _ in range(20):
        context += 4
        cost.observe(4, context, 0.1)
    assert cost.table(4, context, 4)[-1] == pytest.approx(0.1, rel=0.1)


def test_a_few_slow_steps_in_a_row_are_outliers():
    curve = Curve()
    for _ in range(50):
        curve.observe(4, 0.1)
    for _ in range(3):
        curve.observe(4, 10.0)
    assert curve.seconds(4) < 0.111


def test_a_wrong_first_value_is_not_taken_for_context():
    """Contexts grow while the time is found: none of the difference belongs to them."""
    cost = StepCost()
    cost.observe(64, 0, 0.0001)
    context = 16_000
    for _ in range(200):
        context += 64
        cost.observe(64, context, 0.006)
    assert cost.slope.value * context < 0.0001


# -- a cache that is read once for each row, and a second pass that reads it once

STOCK = Limits(reads_each_row=True)
FIXED, ROW, READ = 6e-3, 20e-6, 40e-9


def stock_cost(width=0, padding=1.0):
    """Return what is learnt of a backend that reads a request's cache for each of its rows."""
    cost = StepCost(limits=STOCK)
    for turn in range(400):
        context, requests = (1000, 60_000)[turn % 2], 4
        for rows in (requests, 3 * requests):
            seconds = FIXED + ROW * rows + READ * context * rows / requests
            cost.observe(rows, context, seconds, requests)
        if width:
            padded = padding * (FIXED + ROW * requests * width) + READ * context
            cost.observe(2 * requests, context, padded, requests, padded_width=width)
    return cost


def test_each_row_reads_the_cache():
    table = stock_cost().table(12, 60_000, 4)
    assert table[4] == pytest.approx(FIXED + 4 * ROW + READ * 60_000, rel=0.1)
    assert table[12] == pytest.approx(FIXED + 12 * ROW + READ * 180_000, rel=0.1)
    shared = stock_cost()
    shared.limits = Limits()  # the twin: it would be taken for the cost of the rows
    assert shared.table(12, 60_000, 4)[12] < 0.8 * table[12]


def test_a_padded_pass_is_chosen_where_it_is_faster():
    cost = stock_cost(width=5)
    assert not cost.prefers_padded(5, 1000, 4, padded_width=5)
    assert cost.prefers_padded(12, 60_000, 4, padded_width=5)
    assert not cost.prefers_padded(4, 60_000, 4, padded_width=5)  # nothing to verify
    table = cost.table(12, 60_000, 4, padded_width=5)
    padded = FIXED + 20 * ROW + READ * 60_000
    assert table[4] < padded
    assert table[12] == pytest.approx(padded, rel=0.1)
    # without graphs it may take several times as long
    assert not stock_cost(width=5, padding=4).prefers_padded(12, 60_000, 4, padded_width=5)


def test_without_a_padded_pass_none_is_chosen():
    cost = stock_cost(width=5)
    assert not cost.prefers_padded(12, 60_000, 4, padded_width=0)
    assert cost.table(12, 60_000, 4)[12] > 1.1 * cost.table(12, 60_000, 4, padded_width=5)[12]


def test_a_padded_pass_is_tried_once():
    cost = stock_cost()
    assert cost.prefers_padded(12, 1000, 4, padded_width=5)
    cost.observe(12, 1000, 1.0, 4, padded_width=5)
    assert not cost.prefers_padded(12, 1000, 4, padded_width=5)


def test_a_jump_in_context_is_learnt_at_once():
    """A slow spell of the machine is not taken for it: see the test of that."""
    cost = StepCost(limits=STOCK)
    for _ in range(50):
        cost.observe(16, 16_000, FIXED + 16 * ROW + READ * 16_000, 16)
    for _ in range(3):
        cost.observe(16, 500_000, FIXED + 16 * ROW + READ * 500_000, 16)
    assert cost.slope.value == pytest.approx(READ, rel=0.2)
    expected = FIXED + 48 * ROW + READ * 1_500_000  # never seen with so many rows
    assert cost.table(48, 500_000, 16)[48] == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("each", [True, False])
def test_a_plain_step_is_the_table_at_one_row_per_request(each):
    cost = stock_cost()
    cost.limits = Limits(reads_each_row=each)
    assert cost.plain(60_000, 4) == cost.table(12, 60_000, 4)[4]


# -- steps that are launched early


def test_an_assumed_time_is_replaced_by_the_first_observation():
    """However far off it is. An observed one is only corrected."""
    assumed, observed = Curve(optimism=0.0), Curve(optimism=0.0)
    assumed.seed(4, 10.0)
    assert assumed.is_known
    assert assumed.has_seen(4)
    assert assumed.seconds(4) == pytest.approx(10.0)
    observed.observe(4, 10.0)
    for curve in (assumed, observed):
        curve.observe(4, 0.1)
    assert assumed.seconds(4) == pytest.approx(0.1)
    assert observed.seconds(4) > 5.0
    assumed.observe(4, 0.12)  # from now on it is like any other
    assert 0.1 < assumed.seconds(4) < 0.12


def test_an_assumed_time_weighs_little_beside_observed_ones():
    """All passes take longer than was assumed: more rows are not assumed to be faster."""
    curve = Curve(optimism=0.0)
    for rows in (4, 8, 16):
        curve.seed(rows, 0.1)
    for _ in range(5):
        curve.observe(4, 0.2)
    assert curve.seconds(4) == pytest.approx(0.2, rel=0.05)
    assert curve.seconds(16) == curve.seconds(4)


def test_a_curve_without_optimism_is_what_was_observed():
    curve, twin = Curve(optimism=0.0), Curve()
    for each in (curve, twin):
        each.observe(4, 0.1)
    assert curve.seconds(4) == pytest.approx(0.1)
    assert twin.seconds(4) < 0.096


EARLY = Limits(launches_early=True)


def test_steps_that_are_launched_early_are_assumed_not_to_wait_until_one_is_seen():
    cost = StepCost(limits=EARLY)
    for _ in range(100):
        for rows in (4, 8, 16):
            cost.observe(rows, 0, 0.01 * rows)
        cost.cpu.observe(4, 0.05)
    early, waits = cost.early_table(16, 0, 4), cost.table(16, 0, 4)
    assert cost.waiting(0, 4) == pytest.approx(0.05, rel=0.1)
    assert early[4] == waits[4]
    assert early[5:] == pytest.approx(waits[5:] - cost.waiting(0, 4))
    assert early[16] > early[4]


def test_steps_that_are_launched_early_have_a_curve_of_their_own():
    cost = StepCost(limits=EARLY)
    for _ in range(50):
        for rows in (4, 16):
            cost.observe(rows, 0, 0.3, 4)
            cost.observe(rows, 0, 0.1 + 0.001 * rows, 4, early=True)
    early = cost.early_table(16, 0, 4)
    assert early[[4, 16]] == pytest.approx([0.104, 0.116], rel=0.01)
    assert cost.plain(0, 4) == early[4] == cost.table(16, 0, 4)[4]
    assert cost.table(16, 0, 4)[16] == pytest.approx(0.3, rel=0.01)
    assert cost.waiting(0, 4) == pytest.approx(0.196, rel=0.02)
