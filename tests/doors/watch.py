"""A watch over each input: how long it takes, and how much memory."""

from __future__ import annotations

import functools
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

SECONDS = 5.0
"""Of this process's own time no input may take more."""

WAIT_SECONDS = float(os.environ.get("OUTRIDER_FUZZ_SECONDS", "60"))
"""No input may take longer. A machine that does other things needs more than SECONDS."""

FIRST_SECONDS = 120.0
"""The first input of a test may take so long: imports and compilers come with it."""

MEGABYTES = 500
"""By more an input may not make this process larger."""

TIMERS = ((signal.ITIMER_REAL, signal.SIGALRM), (signal.ITIMER_PROF, signal.SIGPROF))


class Watch:
    """Counts inputs, and fails those that take too long or too much memory.

    seconds: of this process that an input may take
    wait: how long it may take
    """

    current: Watch | None = None

    def __init__(self, seconds: float = SECONDS, wait: float = WAIT_SECONDS) -> None:
        self.seconds, self.wait = seconds, wait
        self.inputs = self.hangs = self.heavy = 0
        self._ends = (0.0, 0.0)  # by the clock, and by this process's own

    def over(self, test):
        """Return a test that is watched at each input."""

        @functools.wraps(test)
        def watched(*args, **kwargs):
            self.inputs += 1
            _forget_peak()
            before = _memory("VmRSS")
            with self._alarm():
                test(*args, **kwargs)
            self._check_time()  # what a library computes in one call is not interrupted
            if (grown := _memory("VmHWM") - before) > MEGABYTES:
                self.heavy += 1
                pytest.fail(f"the input takes {grown:.0f} MB")

        return watched

    def _check_time(self, *_: object) -> None:
        if time.monotonic() >= self._ends[0] or time.process_time() >= self._ends[1]:
            self.hangs += 1
            # what no door catches by `except Exception`
            pytest.fail(f"the input takes over {self.seconds:g} s, or {self.wait:g} s of waiting")

    @contextmanager
    def _alarm(self):
        is_first = self.inputs == 1
        limits = [max(FIRST_SECONDS, one) if is_first else one for one in (self.wait, self.seconds)]
        now = time.monotonic(), time.process_time()
        Watch.current, self._ends = self, (now[0] + limits[0], now[1] + limits[1])
        before = [signal.signal(sent, self._check_time) for _, sent in TIMERS]
        for (timer, _), limit in zip(TIMERS, limits, strict=True):
            signal.setitimer(timer, limit + 0.01, 0.5)
        try:
            yield
        finally:
            for (timer, sent), handler in zip(TIMERS, before, strict=True):
                signal.setitimer(timer, 0)
                signal.signal(sent, handler)
            Watch.current = None

    @contextmanager
    def pause(self):
        """Leave out what is not the door's: a server that has to start again."""
        ends, begun = self._ends, (time.monotonic(), time.process_time())
        self._ends = (float("inf"), float("inf"))
        try:
            yield
        finally:
            taken = time.monotonic() - begun[0], time.process_time() - begun[1]
            self._ends = (ends[0] + taken[0], ends[1] + taken[1])


def _memory(name: str) -> float:
    """Return megabytes of this process: VmRSS has it now, VmHWM had it at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    return 0.0


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
