"""The paced device as a plugin of SGLang.

$OUTRIDER_PACED switches it on: the name of a cost profile, or a JSON file with

    {"profile": "h100-8b", "reads_each_row": true, "log": "passes.jsonl", "spin": 0.0002,
     "prefill_row": 2e-6, "price_device_work": true}

of which only `profile` must be there.

reads_each_row: the cache is read as by attention backends other than Outrider's, and there is
    TARGET_VERIFY
log: where passes are written
prefill_row: seconds a token of the target's and the draft model's prefills, on top of the smallest
    pass, instead of the profile's
price_device_work: whether what a GPU would do between passes is taken out of the scheduler's clock
    and priced (see `work`); true unless it says false. If not, it is the CPU's work in real time
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.engines.costs import PROFILES
from paced import clock, cpu_time, recorder, work
from paced.clock import SPIN, now, sharpen_sleep
from paced.device import Device
from paced.prices import prices_of
from paced.races import server as races
from paced.tensor import Timed, run_kernel

VARIABLE = "OUTRIDER_PACED"
PLUGIN = "outrider_paced"
"""Its name for $SGLANG_PLUGINS: a server with this one only is bare SGLang on the device."""

KERNELS = ("device.look_up", "device.draft_rows", "device.accept", "head_steps.unread_rows")
"""Functions of `outrider.serving` that are the device's work as a whole. Their launches are counted
one by one: they are not fused on a GPU either."""

FUSED = ("ngram_match.reference.ngram_match",)
"""Functions of `outrider.kernels` that stand for one kernel."""

COPIES = ("device.to_device",)
"""Functions of `outrider.serving` that copy an array of the CPU to the device."""

LAUNCHES_OF_A_COPY = 2
"""A copy to the device, by the CPU time of so many launches: its memory is pinned before."""

BATCH = ("seq_lens", "orig_seq_lens", "req_pool_indices", "out_cache_loc")
"""What SGLang's batch has on the device once its prompts are prepared."""


def register() -> None:
    """Lay the hooks, if the device was asked for. A failure stops the server."""
    setting = os.environ.get(VARIABLE)
    try:
        if followed := os.environ.get(races.VARIABLE):
            races.register(followed, recorder.is_outrider)
        if file := os.environ.get(cpu_time.VARIABLE):
            cpu_time.register(Path(file))
        if setting:
            _lay_hooks(setting)
    except Exception as error:  # SGLang would log it, and serve the model without weights
        raise SystemExit(f"the paced device: {error!r}") from error


def make_device(setting: str) -> Device:
    """Return the device that $OUTRIDER_PACED describes."""
    options = {"profile": setting} if setting in PROFILES else json.loads(Path(setting).read_text())
    profile = PROFILES[options.pop("profile")]
    if (seconds := options.pop("prefill_row", None)) is not None:
        target, draft = (
            dataclasses.replace(cost, prefill_row=seconds)
            for cost in (profile.target, profile.draft)
        )
        profile = dataclasses.replace(profile, target=target, draft=draft)
    log = options.pop("log", None)
    spin, reads_each_row = options.pop("spin", SPIN), options.pop("reads_each_row", False)
    prices = prices_of(profile.name) if options.pop("price_device_work", True) else None
    if options:
        raise ValueError(f"unknown: {', '.join(options)}")
    return Device(profile, Path(log) if log else None, spin, reads_each_row, prices)


def _lay_hooks(setting: str) -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor import model_runner
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    made: list[Device] = []

    def device() -> Device:
        """Return this process's device: only the scheduler's process gets to have one."""
        if not made:
            made.append(make_device(setting))
            sharpen_sleep()
            _wait_at_events(made[0])
            _price(made[0])
        return made[0]

    def forward_raw(original: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_idle():
            return original(self, batch, *args, **kwargs)
        table, slots = self.req_to_token_pool.req_to_token, self.token_to_kv_pool_allocator.size + 1
        for held in (table, getattr(self.token_to_kv_pool_allocator, "free_pages", None)):
            device().hold(held)
        logits, states = device().forward(batch, table, slots, self.is_draft_worker)
        output = LogitsProcessorOutput(next_token_logits=logits, hidden_states=states)
        return model_runner.ModelRunnerOutput(logits_output=output, can_run_graph=False)

    def load_head(
        folder: Path, embedding: Any, num_layers: int, lm_head: Any = None, kind: Any = None
    ) -> Any:
        return device().head(folder, num_layers)

    hooks = {
        "model_executor.model_runner.ModelRunner._forward_raw": (forward_raw, HookType.AROUND),
        "mem_cache.allocator.TokenToKVPoolAllocator.free": (_free, HookType.AROUND),
        "sampling.sampling_params.SamplingParams.verify": (_greedy_only, HookType.AFTER),
    }
    for name, (hook, kind) in hooks.items():
        HookRegistry.register(f"sglang.srt.{name}", hook, kind)
    described = make_device(setting)
    is_priced = described.work is not None
    if is_priced:
        _follow_the_devices_tensors(device, made)
        clock.follow("outrider")
    if os.environ.get("SGLANG_PLUGINS") != PLUGIN:
        for kernel in KERNELS:
            HookRegistry.register(f"outrider.serving.{kernel}", run_kernel, HookType.AROUND)
        for kernel in FUSED if is_priced else ():
            HookRegistry.register(f"outrider.kernels.{kernel}", work.one_launch, HookType.AROUND)
        HookRegistry.register(
            "outrider.engines.sglang.drafts.heads.load_head", load_head, HookType.REPLACE
        )
    if described.reads_each_row:
        _verify_by_target()
    if file := os.environ.get(recorder.VARIABLE):
        recorder.register(Path(file))


def _price(device: Device) -> None:
    """Book the device's work from now on, if it is priced."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if device.work is not None:
        missing = HookRegistry._hooks.keys() - HookRegistry._patched  # SGLang only logs them
        if missing:
            raise SystemExit(f"the paced device: nothing is called {', '.join(sorted(missing))}")
        work.use(device.work)
        device.work.calibrate(device.on_device(torch.zeros(16)))


def _follow_the_devices_tensors(device: Callable[[], Device], made: list[Device]) -> None:
    """Let operations on what a GPU would have be booked: on batches, slots, tables, copies."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def prepared(result: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in BATCH:
            if isinstance(value := getattr(self, name, None), torch.Tensor):
                setattr(self, name, device().on_device(value))
        return result

    def copied(original: Any, array: Any, place: Any) -> Any:
        if not made:
            return original(array, place)
        since, books = clock.real(), work.current()
        tensor = original(array, place)
        assert books is not None
        launching = LAUNCHES_OF_A_COPY * books.prices.launch
        books.book("to_device", since, 1, 2 * array.nbytes, launching=launching)
        return made[0].on_device(tensor)

    prepare = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend"
    HookRegistry.register(prepare, prepared, HookType.AFTER)
    if os.environ.get("SGLANG_PLUGINS") != PLUGIN:
        for name in COPIES:
            HookRegistry.register(f"outrider.serving.{name}", copied, HookType.AROUND)


def _verify_by_target() -> None:
    """Let Outrider use TARGET_VERIFY on torch_native, which stands for GPU backends here."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from outrider.engines.sglang.arguments import settings

    def agree(rows: torch.Tensor, padded: torch.Tensor) -> bool:
        return bool((rows.argmax(-1) == padded.argmax(-1)).all())  # all that these logits have

    settings.VERIFYING.append("torch_native")
    HookRegistry.register("outrider.engines.sglang.verify_pass._agree", agree, HookType.REPLACE)


def _greedy_only(result: None, self: Any, vocab_size: int) -> None:
    if self.top_k != 1 or self.min_p or self.frequency_penalty or self.presence_penalty:
        raise ValueError("the paced device answers greedy requests only: temperature 0, no penalty")


def _free(original: Any, self: Any, free_index: torch.Tensor) -> None:
    """Give slots back, without copying all free ones each time.

    On a GPU that copy is the device's work. Here it would be the host's: 2 MB a step at 256
    requests, 64 MB at contexts of 32k.
    """
    is_grouped = getattr(self, "free_group", None)  # of 0.5.11: a list, and a flag beside it
    is_grouped = is_grouped is not None and not getattr(self, "is_not_in_free_group", False)
    if self.need_sort or is_grouped or not free_index.numel():
        return original(self, free_index)
    since, books, free = clock.real(), work.current(), self.free_pages
    with torch._C.DisableTorchFunctionSubclass():
        _append(self, free_index)
        if isinstance(free, Timed):
            self.free_pages = Timed.of(self.free_pages, 0.0, free.wait)
    if books is not None:  # a device would copy all of them
        books.book("free", since, 1, 16 * len(self.free_pages))
    return None


def _append(self: Any, free_index: torch.Tensor) -> None:
    free, ring = self.free_pages, getattr(self, "paced_ring", None)
    end, new = free.storage_offset() + len(free), len(free_index)
    inside = ring is not None and free.untyped_storage().data_ptr() == ring.data_ptr()
    if not inside or end + new > len(ring):
        # never the old one from its start: slots that were given out are views of it
        ring = self.paced_ring = torch.empty(2 * self.size + new, dtype=torch.int64)
        ring[: len(free)] = free
        end = len(free)
    ring[end : end + new] = free_index
    self.free_pages = ring[end - len(free) : end + new]


def _wait_at_events(device: Device) -> None:
    """Let events and streams of torch's CPU module wait for the device, as a GPU's do."""

    def record(self: Any, stream: Any = None) -> None:
        self.paced_ready = device.free_at

    def synchronize(self: Any) -> None:
        device.wait(getattr(self, "paced_ready", 0.0))

    def query(self: Any) -> bool:
        return bool(getattr(self, "paced_ready", 0.0) <= now())

    event: Any = torch.cpu.Event
    event.record, event.synchronize, event.query = record, synchronize, query
    torch.cpu.synchronize = lambda *_: device.wait(device.free_at)
