"""What is measured, on what, and by which clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outrider.selftest.attention import LLAMA_8B, Heads

__all__ = ["Bench", "Contest", "EventTimer", "Grid", "Measurement", "Timer", "Work"]

FLUSH_BYTES = 256 << 20
Work = Callable[[], object]


class Timer(Protocol):
    """Says how long work takes on the device."""

    def __call__(self, work: Work) -> float:
        """Return the milliseconds of one run, with cold caches."""
        ...


class EventTimer:
    """Times work by the device's own clock, which does not count the host's launches."""

    def __init__(self, device: torch.device) -> None:
        self._scratch = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._start, self._end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def __call__(self, work: Work) -> float:
        """Return the milliseconds of one run, with cold caches."""
        # four times: while the device flushes, the host launches the work, so that the device
        # finds all of it waiting and no gap between its kernels is measured
        for _ in range(4):
            self._scratch.zero_()
        self._start.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))


@dataclass(frozen=True)
class Grid:
    """What is measured."""

    batches: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    rows: tuple[int, ...] = (1, 4, 8)
    heads: Heads = LLAMA_8B
    sample_rows: tuple[int, ...] = (1, 8, 64, 512)
    vocab: int = 128_256
    repeats: int = 30
    warmups: int = 3
    copy_bytes: int = 1 << 30

    @staticmethod
    def quick() -> Grid:
        """Return a smaller grid: a minute instead of several."""
        return Grid(batches=(1, 8), contexts=(1024, 8192), sample_rows=(1, 64), repeats=10)

    def steps(self) -> Iterator[tuple[str, Mapping[str, int]]]:
        """Yield what is measured together: an operation and its shape."""
        for batch in self.batches:
            for context in self.contexts:
                for rows in self.rows:
                    yield "paged_attention", {"batch": batch, "context": context, "rows": rows}
        for rows in self.sample_rows:
            yield "sample_match", {"rows": rows, "vocab": self.vocab}


@dataclass(frozen=True)
class Bench:
    """The device layer: where tensors live, the clock, and how much memory is free."""

    device: torch.device
    timer: Timer
    free_bytes: Callable[[], int]
    processors: int

    @staticmethod
    def of_gpu(device: torch.device) -> Bench:
        """Return the layer of a real GPU."""
        return Bench(
            device=device,
            timer=EventTimer(device),
            free_bytes=lambda: int(torch.cuda.mem_get_info(device)[0]),
            processors=torch.cuda.get_device_properties(device).multi_processor_count,
        )


@dataclass(frozen=True)
class Measurement:
    """The times of one contender at one shape.

    bytes: what the step must read once, whoever computes it: gigabytes a second are of these
    """

    operation: str
    contender: str
    shape: Mapping[str, int]
    bytes: int
    milliseconds: tuple[float, ...]

    def percentile(self, share: float) -> float:
        """Return a percentile of the times, in ms: between two of them, in proportion."""
        ordered = sorted(self.milliseconds)
        at = share * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])

    @property
    def median(self) -> float:
        """Return the median, in ms."""
        return self.percentile(0.5)

    def rate(self, share: float = 0.5) -> float:
        """Return the gigabytes a second at a percentile of the times."""
        return self.bytes / self.percentile(share) / 1e6

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "operation": self.operation,
            "contender": self.contender,
            **self.shape,
            "bytes": self.bytes,
            "median_ms": self.median,
            "p10_ms": self.percentile(0.1),
            "p90_ms": self.percentile(0.9),
            "gb_per_s": self.rate(),
            "repeats": len(self.milliseconds),
        }


@dataclass(frozen=True)
class Contest:
    """Contenders for one shape, the first of them ours."""

    operation: str
    shape: Mapping[str, int]
    bytes: int
    contenders: Mapping[str, Work]
