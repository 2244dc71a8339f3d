"""The detector in a server on the paced device. All names that are hooked are SGLang's."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paced import tensor as paced_tensor
from paced.races.callers import Site
from paced.races.detector import Races
from paced.races.modes import LABEL, following, is_label, patch_events

VARIABLE = "OUTRIDER_TEST_RACES"

HEAD_PASS = ("table", "lines", "lens")
"""In what a head's pass is told: the table of slots, and its row and the number of keys of each
row. With the package's folder, and that of its kernels, all names of ours that are known here."""

_no_modes = torch._C.DisableTorchFunction


def _play_device(races: Races, kind: Any) -> None:
    """Let an object of SGLang's tell our own code that its device is LABEL."""
    default = vars(kind).get("device", "cpu")

    def get(self: Any) -> Any:
        is_told = races.is_active and races.asks(sys._getframe(1)) == "ours"
        return str(LABEL) if is_told else self.__dict__.get("device", default)

    def put(self: Any, value: Any) -> None:
        self.__dict__["device"] = value

    kind.device = property(get, put)


def _passes(races: Races) -> None:
    """Note what the passes of the stand-ins touch: they compute in numpy."""
    from paced.device import Device
    from paced.heads import PacedHead

    def keys(table: Tensor, lines: Tensor, lens: np.ndarray, site: int) -> None:
        """Note that each row reads the first of its line's slots."""
        longest: dict[int, int] = {}
        for line, count in zip(lines.as_subclass(Tensor).tolist(), lens.tolist(), strict=True):
            longest[line] = max(count, longest.get(line, 0))
        start, stride = table.storage_offset(), table.stride(0)
        cells = [start + line * stride + np.arange(count) for line, count in longest.items()]
        races.touch(table, False, site, cells=np.concatenate(cells))

    def here() -> int:
        """Return the place that launches a pass: the first outside of the stand-ins."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and races._kind(frame.f_code) in ("pass", "torch"):
            frame = frame.f_back
        return races.site(frame) or 0

    def target() -> int:
        """Return the place of a pass of the target."""
        if "target" not in races._site_numbers:
            races._site_numbers["target"] = len(races._sites)
            races._sites.append(Site("the target's pass", False, is_pass=True))
        return races._site_numbers["target"]

    def forward(original: Any, self: Any, batch: Any, table: Tensor, *args: Any) -> Any:
        with _no_modes():
            site = target()
            for name in ("input_ids", "req_pool_indices", "positions", "seq_lens", "out_cache_loc"):
                if isinstance(part := getattr(batch, name, None), Tensor):
                    races.label(part)
                    races.touch(part, False, site)
            lens = batch.seq_lens.as_subclass(Tensor).numpy()
            keys(table, batch.req_pool_indices, lens, site)
        logits, states = original(self, batch, table, *args)
        with _no_modes():
            for made in (getattr(logits, "tokens", None), states):
                if made is not None:
                    races.label(made)
                    races.touch(made, True, site)
        if hasattr(races.runner, "shared_read_done_event"):
            # as graphs on CUDA: the scheduler waits for no more than the pass's own reads
            races.runner.shared_read_done_event = torch.cpu.Event()
            races.runner.shared_read_done_event.record()
        return logits, states

    def head(
        original: Any, self: Any, tokens: Tensor, x: Tensor, positions: Tensor, at: Any
    ) -> Any:
        table, lines, lens = (getattr(at, name) for name in HEAD_PASS)
        with _no_modes():
            site = here()
            for part in (tokens, x, positions, *vars(at).values()):
                if (isinstance(part, Tensor) and part.dim() == 1) or part is x:
                    races.label(part)
                    races.touch(part, False, site)
            keys(table, lines, lens.as_subclass(Tensor).numpy(), site)
        states = original(self, tokens, x, positions, at)
        with _no_modes():
            races.label(states)
            races.touch(states, True, site)
        return states

    def logits(original: Any, self: Any, states: Tensor) -> Any:
        with _no_modes():
            site = here()
            races.touch(states, False, site)
        made = original(self, states)
        with _no_modes():
            races.label(made)
            races.touch(made, True, site)
        return made

    kernel = paced_tensor.run_kernel

    def run_kernel(*args: Any, **kwargs: Any) -> Any:
        races.in_kernel += 1
        try:
            return kernel(*args, **kwargs)
        finally:
            races.in_kernel -= 1

    from paced import plugin

    plugin.run_kernel = run_kernel
    for owner, name, hook in (
        (Device, "forward", forward),
        (PacedHead, "__call__", head),
        (PacedHead, "logits", logits),
    ):
        setattr(owner, name, _around(getattr(owner, name), hook))
    lay = plugin._wait_at_events

    def wait_at_events(device: Any) -> None:
        lay(device)
        patch_events()

    plugin._wait_at_events = wait_at_events


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return call


def register(setting: str, ours: Callable[[str], bool]) -> None:
    """Follow the scheduler of a server. All names here are SGLang's.

    setting: what $OUTRIDER_TEST_RACES names
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    options = json.loads(Path(setting).read_text())
    log = Path(options["log"])
    races = Races(ours, options.get("plant"))
    _passes(races)
    for kind in (ScheduleBatch, ModelRunner):
        _play_device(races, kind)
    module_of = torch.get_device_module
    torch.get_device_module = lambda device=None: (
        torch.cpu if is_label(device) else module_of(device)
    )

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        with following(races):
            original(self, *args, **kwargs)

    def loop(original: Any, self: Any) -> Any:
        for name, stream in vars(self).items():
            if isinstance(stream, torch.cpu.Stream):
                races.name(stream, name.removesuffix("_stream"))
        self.schedule_stream.is_main = True
        pools = self.req_to_token_pool, self.token_to_kv_pool_allocator
        races.label(*pools)
        worker, races.runner = self.model_worker, self.tp_worker.model_runner
        launch, idle = worker.forward_batch_generation, self.on_idle

        def launched(batch: Any, *args: Any, **kwargs: Any) -> Any:
            races.label(batch, batch.sampling_info, *pools)
            return launch(batch, *args, **kwargs)

        written = ""

        def on_idle(*args: Any) -> Any:
            nonlocal written
            if (text := json.dumps(vars(races.report()), indent=1)) != written:
                written = text
                made = log.with_suffix(".new")
                made.write_text(text)
                made.replace(log)
            return idle(*args)

        worker.forward_batch_generation, self.on_idle = launched, on_idle
        if hasattr(self, "_war_barrier_enabled"):  # 0.5.23 has it, on CUDA
            self._war_barrier_enabled = options.get("fence", True)
        races.all_wait()
        with following(races):
            return original(self)

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.__init__", init, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.event_loop_overlap", loop, HookType.AROUND)
