"""How long passes take on this machine, measured before control begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from outrider.hosts.sglang.drafting import Drafters
from outrider.hosts.sglang.rows import decode_rows

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of rows whose passes are timed before control begins..."""

LONGEST = 8.0
"""...as far as these seconds go."""

REPEATS, SHORT = 3, 0.05
"""Passes of fewer seconds than SHORT are timed so many times."""


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
    batch: Any, plain: Any, run: Callable[[Any], Any], drafters: Drafters, max_rows: int
) -> None:
    """Tell control how long passes of several sizes take, so that it need not begin by guessing.

    Their rows are copies of the first request's next one, and go to slots of their own. A fault on
    any rank ends it on all of them.

    batch, plain: the host's decode batch, and the same as its workers take it
    run: runs the target over a batch
    """
    drafters.wants_calibration = False
    pool, started = batch.token_to_kv_pool_allocator, time.perf_counter()
    slots = pool.alloc(min(SIZES[-1], pool.available_size(), max_rows))
    if slots is None or not len(slots):
        return
    most = len(slots)  # of pages, only whole ones are given
    timing = _Timing(batch, plain, run, drafters, slots)
    try:
        timing.passes(1)  # warms up, and waits for what is queued
        for count in (size for size in SIZES if size <= most):
            for _ in range(REPEATS):
                seconds, drafted = timing.passes(count)
                drafters.calibrate(count, seconds, drafted)
                late = time.perf_counter() - started > LONGEST
                # other ranks have other clocks
                if stop := drafters.ranks.any(late or seconds + sum(drafted) > SHORT):
                    break
            if stop and drafters.ranks.any(late):
                break
    except _Fault as error:
        logger.warning("calibration failed, control begins with what it has: %s", error)
    finally:
        pool.free(slots)
    logger.info("calibration took %.1f s", time.perf_counter() - started)


class _Fault(Exception):
    """A pass failed on one of the ranks."""


class _Timing:
    """Times passes of the target and of draft models."""

    def __init__(
        self,
        batch: Any,
        plain: Any,
        run: Callable[[Any], Any],
        drafters: Drafters,
        slots: Tensor,
    ) -> None:
        self._batch, self._plain, self._slots = batch, plain, slots
        self._run, self._drafters = run, drafters

    def passes(self, count: int) -> tuple[float, list[float]]:
        """Return the seconds of a pass of so many rows: of the target, and of each draft model."""
        seconds = self._agreed(self._target_logits, count)
        return seconds, [self._agreed(model.run, count) for model in self._drafters.timed]

    def _agreed(self, launch: Callable[[Any], Tensor], count: int) -> float:
        """Return the seconds of a pass that no rank has failed in."""
        seconds, fault = 0.0, None
        try:
            rows = self._rows(count)
            seconds = timed_pass(lambda: launch(rows))
        except Exception as error:
            fault = error
        if self._drafters.ranks.any(fault is not None):
            raise _Fault(fault or "on another rank")
        return seconds

    def _rows(self, count: int) -> Any:
        batch, length = self._batch, int(self._batch.seq_lens_cpu[0])
        indices = batch.req_pool_indices[:1].expand(count)
        tokens, positions = [batch.reqs[0].origin_input_ids[-1]] * count, [length] * count
        rows = decode_rows(self._plain, tokens, indices, positions, self._slots[:count])
        rows.reqs = self._plain.reqs[:1] * count
        return rows

    def _target_logits(self, rows: Any) -> Tensor:
        logits: Tensor = self._run(rows).logits_output.next_token_logits
        return logits
