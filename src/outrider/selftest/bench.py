"""Times of the kernels beside the machine's bandwidth, the host's kernel and plain torch.

Contenders take turns within each repeat, each after the caches were flushed, so that a machine that
warms up or is shared slows all of them. A time is a median with the 10th and 90th percentile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from outrider.selftest.contenders import Arena
from outrider.selftest.timing import Bench, Contest, Grid, Measurement

__all__ = ["Benchmark", "measure"]


@dataclass
class Benchmark:
    """All measurements, and what could not be measured and why."""

    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def roofline(self) -> Measurement | None:
        """Return the measured copy, the bandwidth of this machine."""
        return next((m for m in self.measurements if m.operation == "copy"), None)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)


def measure(bench: Bench, grid: Grid, advance: Callable[[str], None]) -> Benchmark:
    """Measure the grid. Shapes that do not fit into free memory are skipped, and named.

    advance: called once after the copy and once after each step, with what was measured
    """
    found = Benchmark()
    found.measurements += _take_turns(bench, grid, _copy(bench, grid))
    advance("copy")
    arena = Arena(bench, grid, found.note)
    for operation, shape in grid.steps():
        found.measurements += _step(bench, grid, arena, operation, shape)
        advance(f"{operation} {' '.join(f'{k} {v}' for k, v in shape.items())}")
    return found


def _step(
    bench: Bench, grid: Grid, arena: Arena, operation: str, shape: Mapping[str, int]
) -> list[Measurement]:
    # a function, so that the tensors of a shape are gone before the next one's are made
    contest = arena.contest(operation, shape)
    return [] if contest is None else _take_turns(bench, grid, contest)


def _copy(bench: Bench, grid: Grid) -> Contest:
    size = min(grid.copy_bytes, bench.free_bytes() // 4)
    source = torch.zeros(size, dtype=torch.int8, device=bench.device)
    target = torch.empty_like(source)
    return Contest("copy", {}, 2 * size, {"copy": lambda: target.copy_(source)})


def _take_turns(bench: Bench, grid: Grid, contest: Contest) -> list[Measurement]:
    names = list(contest.contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(grid.warmups):
        for name in names:
            contest.contenders[name]()
    for repeat in range(grid.repeats):
        # each goes first in turn: none always follows the same neighbour
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(bench.timer(contest.contenders[name]))
    return [
        Measurement(contest.operation, name, contest.shape, contest.bytes, tuple(times[name]))
        for name in names
    ]
