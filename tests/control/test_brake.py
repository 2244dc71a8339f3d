"""The brake: off where it was slower, on again later."""

from __future__ import annotations

from outrider.control.brake import ENOUGH, REST, Brake


def drive(brake, steps, seconds):
    """Return how many of the steps had drafts; plain ones would take a second."""
    drafted = 0
    for _ in range(steps):
        drafted += not brake.is_on
        brake.observe(not brake.is_on, 1.0 if brake.is_on else seconds, 1.0)
    return drafted


def test_what_is_slower_stops_and_is_tried_again():
    brake = Brake()
    assert drive(brake, ENOUGH, 1.2) == ENOUGH
    assert brake.is_on
    assert drive(brake, REST, 1.2) == 0
    assert not brake.is_on
    assert drive(brake, 10_000, 1.2) < 0.03 * 10_000  # ever longer rests
    assert drive(brake, 2_000, 0.8) > 900  # within the longest rest it is on again
    assert not brake.is_on


def test_what_is_faster_is_let_run():
    brake = Brake()
    assert drive(brake, 1000, 0.9) == 1000
    assert brake.pulled == 0


def test_a_little_noise_is_let_pass():
    brake = Brake()
    assert drive(brake, 1000, 1.01) == 1000


def test_plain_steps_say_nothing():
    brake = Brake()
    for _ in range(100):
        brake.observe(False, 2.0, 1.0)
    assert not brake.is_on
