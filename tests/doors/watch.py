"""A watch over each input: how long it takes, and how much memory."""

from __future__ import annotations

import functools
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

SECONDS = 5.0
"""Longer no input may take, if its module says nothing else."""

MEGABYTES = 500
"""By more an input may not make this process larger."""


class Watch:
    """Counts inputs, and fails those that take too long or too much memory.

    seconds: that an input may take
    """

    current: Watch | None = None

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.inputs = self.hangs = self.heavy = 0
        self._deadline = 0.0

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
        if time.monotonic() >= self._deadline:
            self.hangs += 1
            # what no door catches by `except Exception`
            pytest.fail(f"the input takes over {self.seconds:g} s")

    @contextmanager
    def _alarm(self):
        Watch.current, self._deadline = self, time.monotonic() + self.seconds
        before = signal.signal(signal.SIGALRM, self._check_time)
        signal.setitimer(signal.ITIMER_REAL, self.seconds + 0.01)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            Watch.current = None

    @contextmanager
    def pause(self):
        """Leave out what is not the door's: a server that has to start again."""
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        started = time.monotonic()
        try:
            yield
        finally:
            self._deadline += time.monotonic() - started
            signal.setitimer(signal.ITIMER_REAL, left)


def _memory(name: str) -> float:
    """Return megabytes of this process: VmRSS has it now, VmHWM had it at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    return 0.0


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
