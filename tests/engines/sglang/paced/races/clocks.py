"""Vector clocks: what each stream comes after."""

from __future__ import annotations

from typing import Any

import numpy as np

MOST_STREAMS = 64


class Clocks:
    """The clocks of streams, and of the CPU."""

    def __init__(self) -> None:
        self._clocks: list[np.ndarray] = []
        self._names: list[str] = []
        self._cpu, self._version = np.zeros(MOST_STREAMS, np.int64), 0
        self._seen: list[int] = []

    def number(self, stream: Any) -> int:
        """Return the number of a stream."""
        of, found = getattr(stream, "race_number", (None, 0))
        if of is not self:
            found = len(self._clocks)
            assert found < MOST_STREAMS, "too many streams"
            stream.race_number = self, found
            clock = np.zeros(MOST_STREAMS, np.int64)
            clock[found] = 1
            self._clocks.append(clock)
            self._seen.append(-1)
            self._names.append(f"stream {found}")
        return int(found)

    def name(self, stream: Any, name: str) -> None:
        """Call a stream by a name in reports."""
        self._names[self.number(stream)] = name

    def clock(self, stream: Any) -> np.ndarray:
        """Return the clock of a stream to which something is launched now."""
        number = self.number(stream)
        clock = self._clocks[number]
        if self._seen[number] != self._version:
            np.maximum(clock, self._cpu, out=clock)
            self._seen[number] = self._version
        return clock

    def release(self, stream: Any) -> np.ndarray:
        """Return what has happened when all that was launched to a stream is done."""
        clock = self.clock(stream)
        found = clock.copy()
        clock[self.number(stream)] += 1
        return found

    def acquire(self, stream: Any, clock: np.ndarray) -> None:
        """Let what a stream does from now on come after this."""
        own = self.clock(stream)
        np.maximum(own, clock, out=own)

    def cpu_waits(self, clock: np.ndarray) -> None:
        """Let the CPU wait."""
        np.maximum(self._cpu, clock, out=self._cpu)
        self._version += 1

    def all_wait(self) -> None:
        """Let the CPU wait for all streams."""
        for clock in self._clocks:
            self.cpu_waits(clock)
        for number, clock in enumerate(self._clocks):
            clock[number] += 1
