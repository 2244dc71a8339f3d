"""Waiting for a moment, without slack."""

from __future__ import annotations

import ctypes
import time

now = time.perf_counter
"""Seconds of CLOCK_MONOTONIC: all processes of a machine read the same."""

SPIN = 0.0002
"""The last seconds of a wait are a busy loop: a sleep ends late by about this much."""

_PR_SET_TIMERSLACK = 29


def sharpen_sleep() -> None:
    """Let this thread's sleeps end when they should: Linux adds 50 us to save power."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def wait_until(moment: float, spin: float = SPIN) -> float:
    """Return not before a moment, and say how many seconds that took.

    spin: 0 only sleeps
    """
    start = now()
    left = moment - start
    if left <= 0:
        return 0.0
    if left > spin:
        time.sleep(left - spin)
    while now() < moment:
        pass
    return now() - start
