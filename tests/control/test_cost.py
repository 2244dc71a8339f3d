"""The cost model on made-up machines: stairs, noise, and a change of regime."""

from __future__ import annotations

import random

import pytest

from outrider.control.cost import KNOTS, Curve, StepCost


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
    assert not Curve().is_known
    assert Curve().seconds(4) == 0.0


def test_stairs_are_learnt_through_noise():
    curve = Curve()
    learn(curve, stairs, 2000)
    for knot in KNOTS[:36]:
        assert curve.seconds(knot) == pytest.approx(stairs(knot), rel=0.2)
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
    for _ in range(10_000):  # until hope is gone
        curve.observe(2, 0.12)
        curve.observe(4, 0.10)
        curve.observe(8, 0.20)
    assert curve.seconds(2) == curve.seconds(3) == curve.seconds(4) == pytest.approx(0.11, rel=0.01)
    assert curve.seconds(6) == pytest.approx(0.11, rel=0.01)  # the step: in the middle
    assert curve.seconds(7) == pytest.approx(0.20, rel=0.01)
    # beyond what was seen: as steep as from the first to the last
    assert curve.seconds(14) == pytest.approx(0.29, rel=0.01)


def test_a_step_is_made_of_its_parts():
    cost = StepCost()
    for _ in range(10_000):
        cost.observe(8, 1000, 0.3)
        cost.draft.observe(2, 0.05)
    assert cost.table(8)[-1] == pytest.approx(0.3, rel=0.01)
    assert cost.drafting(3, 2, 2) == pytest.approx(0.15, rel=0.01)


def test_context_is_told_from_rows():
    """Attention reads every token of the context: 1 microsecond each on this machine."""
    cost, rng = StepCost(), random.Random(0)
    for _ in range(2000):
        rows, context = rng.choice([4, 8, 16]), rng.randrange(0, 100_000)
        cost.observe(rows, context, (stairs(rows) + 1e-6 * context) * rng.lognormvariate(0, 0.05))
    for context in (1_000, 50_000, 100_000):
        expected = stairs(8) + 1e-6 * context
        assert cost.table(8, context)[-1] == pytest.approx(expected, rel=0.15)


def test_noise_is_not_taken_for_context():
    cost, rng = StepCost(), random.Random(0)
    for step in range(500):
        cost.observe(4, 1000 + step % 50, 0.1 * rng.lognormvariate(0, 0.1))
    assert cost.table(4, 1000)[-1] == pytest.approx(0.1, rel=0.1)
    assert cost.slope.value * 1000 < 0.02


def test_graphs_have_their_own_steps():
    """Rows are padded to the next captured graph: nothing lies between."""
    curve = Curve(knots=[8, 16, 32])
    for _ in range(10_000):
        curve.observe(5, 0.1)
        curve.observe(32, 0.3)
    assert curve.seconds(1) == curve.seconds(8) == pytest.approx(0.1, rel=0.01)
    assert curve.seconds(9) == curve.seconds(16) == curve.seconds(8)  # the middle: not above 20
    assert curve.seconds(17) == pytest.approx(0.3, rel=0.01)


def test_what_was_seen_once_is_hoped_to_be_better():
    curve = Curve()
    curve.observe(4, 0.1)
    once = curve.seconds(4)
    for _ in range(50):
        curve.observe(4, 0.1)
    assert 0.09 < once < curve.seconds(4) < 0.1


def test_the_first_pass_of_a_draft_model_reads_what_is_new():
    """Its time is told from the others', though only the sum is seen."""
    cost, rng = StepCost(), random.Random(3)
    for _ in range(200):
        passes, unread = rng.randrange(1, 6), rng.choice((4, 64))
        seconds = (0.3 if unread == 64 else 0.05) + (passes - 1) * 0.05
        cost.observe_drafting(passes, 4, unread, seconds)
    assert cost.drafting(1, 4, 64) == pytest.approx(0.3, rel=0.1)
    assert cost.drafting(5, 4, 4) == pytest.approx(0.25, rel=0.1)
    assert cost.drafting(5, 4, 64) == pytest.approx(0.5, rel=0.1)


def test_a_slow_spell_is_not_a_long_context():
    """Other texts, 1,500 tokens longer, come while the machine is slower by a third."""
    cost = StepCost()
    for _ in range(20):
        cost.observe(16, 1000, 0.27)
        cost.observe(30, 1000, 0.30)
    for _ in range(15):
        cost.observe(30, 2500, 0.40)
    plain, drafting = cost.table(30, 2500)[[16, 30]]
    assert drafting > 1.3 * plain
