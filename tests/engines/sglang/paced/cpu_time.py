"""CPU time of our part of a decode step, beside a fixed piece of work in the same thread.

Our part is what the scheduler calls: the worker, what it emitted (`resolve`), and what is prepared
for the next step. What SGLang's own worker of the target does is left out, and what stands for the
device here. Times are of the thread: waiting costs nothing.

After each step the same thread does `reference`. It never changes, so a ratio to it means the same
on a busy machine, and nearly the same on another one.

$OUTRIDER_TEST_CPU names a file to which a server on the paced device writes a line for each decode
step: how many requests, our seconds, the reference's. If there is a file of this name with
`.planted` behind it, each of our steps takes longer by the share that it says. All names that are
hooked here are SGLang's, or of this folder.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import torch

VARIABLE = "OUTRIDER_TEST_CPU"

RESOLVE = {
    "scheduler_output_processor_mixin.SchedulerOutputProcessorMixin": (
        "_resolve_spec_overlap_token_ids"  # 0.5.11
    ),
    "scheduler_components.batch_result_processor.SchedulerBatchResultProcessor": (
        "_resolve_spec_v2_tokens"  # 0.5.23
    ),
}
"""Where the scheduler asks what a step emitted."""


class Part:
    """Some object, for `reference`."""

    def __init__(self, number: int) -> None:
        self.number, self.tokens, self.name = number, [number] * 4, str(number)


FAR = [Part(number) for number in range(20_000)]
ORDER: list[int] = np.random.default_rng(1).permutation(len(FAR)).tolist()


def reference(step: int) -> int:
    """Do what a step does: objects, lists, small arrays, small tensors. Never change this.

    Half of it is small enough for the caches, half is not: what else runs on the machine then slows
    it down as it slows a step down.
    """
    start = step * 1000 % len(FAR)
    far = [FAR[at] for at in ORDER[start : start + 1000]]
    return near() + sum(part.tokens[1] + len(part.name) for part in far) + near()


def near() -> int:
    """Do the half that is small."""
    parts = [Part(number) for number in range(48)]
    names = {part.name: part for part in parts}
    total = sum(names[str(number)].tokens[1] for number in range(0, 48, 2))
    lengths = np.array([len(part.tokens) + part.number for part in parts])
    owners = np.repeat(np.arange(48), lengths % 5)
    places = np.arange(len(owners)) - (np.cumsum(lengths % 5) - lengths % 5)[owners]
    total += int(places.max()) + int(np.flatnonzero(lengths > 20).sum())
    rows = torch.from_numpy(np.stack([owners, places]))
    table = torch.zeros(48, 64, dtype=torch.int64)
    table[rows[0], rows[1]] = rows[1] + 1
    found = torch.cat([table[rows[0], rows[1]], rows[0]]).clamp(min=0)
    total += sum(found.tolist()[::7])
    return total


class Meter:
    """Adds up the CPU time of calls, without that of other calls within them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None  # when the clock was started; None while it stands
        self._is_inside = False

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with the clock running."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside, self._since = True, thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += thread_time() - self._since
                self._is_inside, self._since = False, None

        return call

    def left_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with the clock standing."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._since is None:
                return function(*args, **kwargs)
            self.seconds += thread_time() - self._since
            self._since = None
            try:
                return function(*args, **kwargs)
            finally:
                self._since = thread_time()

        return call


def register(log: Path) -> None:
    """Meter the scheduler of a server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from paced import plugin

    meter = Meter()
    plugin.run_kernel = meter.left_out(plugin.run_kernel)  # one launch on a device, many ops here

    def loop(original: Any, self: Any) -> Any:
        _lay(meter, self, log)
        return original(self)

    loops = "sglang.srt.managers.scheduler.Scheduler.event_loop_overlap"
    HookRegistry.register(loops, loop, HookType.AROUND)


def _lay(meter: Meter, scheduler: Any, log: Path) -> None:
    """Lay the meter around what is counted, and what is left out: when all plugins are loaded."""
    import pkgutil

    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from paced.device import Device
    from paced.heads import PacedHead

    worker, target, idle = scheduler.model_worker, scheduler.tp_worker, scheduler.on_idle
    lines: list[str] = []
    planted = log.with_name(f"{log.name}.planted")

    for place, name in RESOLVE.items():
        try:
            owner: Any = pkgutil.resolve_name(f"sglang.srt.managers.{place}")
        except (ImportError, AttributeError):
            continue
        if isinstance(scheduler, owner):  # a mixin
            owner = type(scheduler)
        setattr(owner, name, meter.counted(getattr(owner, name)))
    for owner, name in ((Device, "wait"), (Device, "forward"), (PacedHead, "__call__")):
        setattr(owner, name, meter.left_out(getattr(owner, name)))
    PacedHead.logits = meter.left_out(PacedHead.logits)  # type: ignore[method-assign]
    target.forward_batch_generation = meter.left_out(target.forward_batch_generation)
    batches: Any = ScheduleBatch
    batches.prepare_for_decode = meter.counted(batches.prepare_for_decode)
    launch = meter.counted(worker.forward_batch_generation)

    def launched(batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = launch(batch, *args, **kwargs)
        seconds, meter.seconds = meter.seconds, 0.0
        if batch.forward_mode.is_decode():
            if planted.exists():
                start = thread_time()
                end = start + seconds * float(planted.read_text())
                while thread_time() < end:
                    pass
                seconds += thread_time() - start
            start = thread_time()
            reference(len(lines))
            lines.append(json.dumps([len(batch.reqs), seconds, thread_time() - start]))
        return result

    def on_idle(*args: Any) -> Any:
        if lines:
            with log.open("a") as out:
                out.write("\n".join(lines) + "\n")
            lines.clear()
        return idle(*args)

    worker.forward_batch_generation, scheduler.on_idle = launched, on_idle
