"""The scheduler's clock, which leaves out what a device would have done, and waiting by it.

A process has *excused* seconds: real time that does not count, because a GPU would have spent it
(see `work`). `now` is real time without them. In all processes but a scheduler's, none are excused.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

real = time.perf_counter
"""Seconds of CLOCK_MONOTONIC: all processes of a machine read the same."""

SPIN = 0.0002
"""The last seconds of a wait are a busy loop: a sleep ends late by about this much."""

_PR_SET_TIMERSLACK = 29
_excused = 0.0


def now() -> float:
    """Return the seconds of this process's own clock: real time without what was excused."""
    return real() - _excused


def excused() -> float:
    """Return the seconds that were excused so far. Fewer than none if launches cost more."""
    return _excused


def excuse(seconds: float) -> None:
    """Take real seconds that are over out of this process's clock."""
    global _excused
    _excused += seconds


def follow(package: str) -> None:
    """Let `time.perf_counter` be this clock, also where a package's functions default to it."""
    time.perf_counter = now
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            for value in list(vars(module).values()):
                _redirect(value)


def _redirect(value: Any) -> None:
    """Replace perf_counter among a function's defaults, or those of a class's functions."""
    functions = vars(value).values() if isinstance(value, type) else (value,)
    for function in functions:
        defaults = getattr(function, "__defaults__", None) or ()
        if any(default is real for default in defaults):
            function.__defaults__ = tuple(now if d is real else d for d in defaults)


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
