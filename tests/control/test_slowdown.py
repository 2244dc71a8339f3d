"""The slowdown guard: drafts are off where they were slower, and on again later."""

from __future__ import annotations

from outrider.control.slowdown import MIN_STEPS, REST_STEPS, SlowdownGuard


def drive(guard, steps, seconds):
    """Return how many of the steps had drafts; plain ones would take a second."""
    drafted = 0
    for _ in range(steps):
        drafted += not guard.is_tripped
        guard.observe(not guard.is_tripped, 1.0 if guard.is_tripped else seconds, 1.0)
    return drafted


def test_what_is_slower_stops_and_is_tried_again():
    guard = SlowdownGuard()
    assert drive(guard, MIN_STEPS, 1.2) == MIN_STEPS
    assert guard.is_tripped
    assert drive(guard, REST_STEPS, 1.2) == 0
    assert not guard.is_tripped
    assert drive(guard, 10_000, 1.2) < 0.03 * 10_000  # ever longer rests
    assert drive(guard, 2_000, 0.8) > 900  # within the longest rest it is on again
    assert not guard.is_tripped


def test_what_is_faster_is_let_run():
    guard = SlowdownGuard()
    assert drive(guard, 1000, 0.9) == 1000
    assert guard.trips == 0


def test_a_little_noise_is_let_pass():
    guard = SlowdownGuard()
    assert drive(guard, 1000, 1.01) == 1000


def test_plain_steps_say_nothing():
    guard = SlowdownGuard()
    for _ in range(100):
        guard.observe(False, 2.0, 1.0)
    assert not guard.is_tripped
