"""What the device's log says of a run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paced.device import QUIET_SECONDS, Pass


def read_log(file: Path) -> list[Pass]:
    """Return the passes in a log."""
    return [Pass(**json.loads(line)) for line in file.read_text().splitlines()]


def finished_log(file: Path, since: float, patience: float = 20.0) -> list[Pass]:
    """Return the passes of a run that is over, as soon as the server has written them.

    since: when the run began, in real time. The file is removed: what the next run writes is its
        own.
    """
    deadline, seen = time.monotonic() + patience, -1
    while time.monotonic() < deadline:
        size = file.stat().st_size if file.exists() else 0
        if size and size == seen:
            passes = [made for made in read_log(file) if made.queued + made.excused >= since]
            if passes:
                file.unlink()
                return passes
        seen = size
        time.sleep(QUIET_SECONDS + 0.1)
    raise RuntimeError(f"nothing was written to {file}: is the paced device in the server?")


def virtual(passes: list[Pass]) -> Callable[[float], float]:
    """Return what turns a moment of another process into one of the server's clock.

    The server's clock leaves out the real time in which it did a GPU's work. How much that was is
    known wherever a pass was queued, and in proportion in between. It is monotonic.

    passes: of the server's log, the run's first and last among them
    """
    excused = np.array([made.excused for made in passes])
    moments = np.array([made.queued for made in passes]) + excused
    return lambda moment: float(moment - np.interp(moment, moments, excused))


@dataclass(frozen=True)
class Steady:
    """What happened while all requests of a batch were being decoded.

    seconds: from the first of these decode passes of the target to the last
    tokens: how many were emitted in that time
    steps: passes of the target
    device_seconds: in which the device worked
    gaps: seconds of each step in which the device had nothing to do: from the end of a pass to the
        next launch, those of draft passes included
    drafts: rows of the target's passes beyond one for each request
    excused: real seconds that the server's clock leaves out: a GPU's work, less its launches
    launches, launching: kernels that a GPU would have launched, and the CPU seconds charged for it
    """

    seconds: float
    tokens: int
    steps: int
    device_seconds: float
    gaps: tuple[float, ...]
    drafts: int
    excused: float = 0.0
    launches: int = 0
    launching: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of all requests together."""
        return self.tokens / self.seconds

    def summary(self, batch: int) -> dict[str, Any]:
        """Return the figures of a result file. Idle times in milliseconds."""
        gaps = sorted(self.gaps)
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "tokens_per_step": round(self.tokens / self.steps / batch, 3),
            "rows_per_step": round((self.drafts / self.steps + batch) / batch, 3),
            "ideal_tokens_per_second": round(self.tokens / self.device_seconds, 1),
            "share_of_ideal": round(self.device_seconds / self.seconds, 3),
            "idle_ms_median": round(1000 * statistics.median(gaps), 3),
            "idle_ms_p99": round(1000 * gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))], 3),
            "excused_ms_per_step": round(1000 * self.excused / self.steps, 3),
            "launches_per_step": round(self.launches / self.steps, 1),
            "launching_ms_per_step": round(1000 * self.launching / self.steps, 3),
        }


def steady(passes: list[Pass], batch: int) -> Steady:
    """Return what happened between the first and the last step with all requests in it.

    Prompts that are being read and requests that end one after the other are left out.
    """
    full = [i for i, p in enumerate(passes) if p.kind == "decode" and p.requests == batch]
    prefills = [i for i, p in enumerate(passes) if p.kind == "prefill"]
    full = [i for i in full if not prefills or i > prefills[-1]]
    if len(full) < 3:
        raise ValueError(f"only {len(full)} steps with all {batch} requests")
    window = passes[full[0] : full[-1] + 1]
    first, last = window[0], window[-1]
    # the last pass's tokens are not in its position yet: time ends where it begins
    targets = [p for p in window[:-1] if p.kind == "decode"]
    gaps = [0.0]
    for before, after in pairwise(window):
        gaps[-1] += max(0.0, after.queued - before.done)
        if after.kind == "decode":
            gaps.append(0.0)
    return Steady(
        seconds=last.start - first.start,
        tokens=last.position - first.position,
        steps=len(targets),
        device_seconds=sum(p.done - p.start for p in window[:-1]),
        gaps=tuple(gaps[:-1]),
        drafts=sum(p.rows - p.requests for p in targets),
        excused=last.excused - first.excused,
        launches=last.launches - first.launches,
        launching=last.launching - first.launching,
    )
