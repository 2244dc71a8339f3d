"""How long passes take on this machine, measured before control begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from outrider.control import Control
from outrider.serving.ranks import Ranks

logger = logging.getLogger(__name__)

ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of rows whose passes are timed before control begins..."""

MAX_SECONDS = 8.0
"""...as far as these seconds go."""

REPEATS, SHORT_PASS = 3, 0.05
"""Passes of fewer seconds than SHORT_PASS are timed so many times."""

Launch = Callable[[int], Tensor]
"""Launches a pass of so many rows, and returns its logits, [N, V]."""


def timed_pass(run: Callable[[], Tensor], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds from the launch of a pass until its result can be read.

    A launch returns before the device is done: reading one value waits for it. Nothing else may
    be queued before; a pass that was timed leaves nothing behind.

    run: launches the pass and returns its logits, [N, V]
    """
    started = clock()
    run()[0, 0].item()
    return clock() - started


def calibrate(
    control: Control, ranks: Ranks, target: Launch, models: Sequence[Launch], most: int
) -> None:
    """Report to control how long passes of several sizes take: it need not begin by guessing.

    A fault on any rank ends calibration on all: control then begins with what it has.

    target, models: launch passes of the target and of the models that control uses
    most: the most rows of a pass
    """
    started = time.perf_counter()

    def agreed(launch: Launch, count: int) -> float:
        """Return the seconds of a pass that no rank has failed in."""
        seconds, fault = 0.0, None
        try:
            seconds = timed_pass(lambda: launch(count))
        except Exception as error:
            fault = error
        if ranks.any(fault is not None):
            raise _Fault(fault or "on another rank")
        return seconds

    def passes(count: int) -> tuple[float, list[float]]:
        return agreed(target, count), [agreed(model, count) for model in models]

    try:
        passes(1)  # warms up, and waits for what is queued
        for count in (size for size in ROW_COUNTS if size <= most):
            for _ in range(REPEATS):
                seconds, drafted = passes(count)
                control.calibrate(count, seconds, drafted)
                is_late = time.perf_counter() - started > MAX_SECONDS
                # other ranks have other clocks
                if stop := ranks.any(is_late or seconds + sum(drafted) > SHORT_PASS):
                    break
            if stop and ranks.any(is_late):
                break
    except _Fault as error:
        logger.warning("calibration failed, control begins with what it has: %s", error)
    logger.info("calibration took %.1f s", time.perf_counter() - started)


class _Fault(Exception):
    """A pass failed on one of the ranks."""
