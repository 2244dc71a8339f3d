"""Calibration on a device whose results are ready later: a launch returns, and reading waits."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from outrider.control import adaptive_drafter
from outrider.hosts.sglang import calibration
from outrider.hosts.sglang.calibration import SIZES, calibrate, timed_pass
from outrider.hosts.sglang.drafting import Drafters
from outrider.hosts.sglang.ranks import Ranks

FIXED, ROW = 0.004, 40e-6
DRAFT = 0.25
"""The draft model takes this share of the target's time."""


class Device:
    """A queue of passes, and a clock that only they and whoever waits for them move on."""

    def __init__(self):
        self.now = self.free = 0.0

    def clock(self):
        return self.now

    def launch(self, seconds, rows):
        self.now += 1e-5
        self.free = max(self.now, self.free) + seconds
        return Result(torch.zeros(rows, 7), self, self.free)


class Result(torch.Tensor):
    """Logits that can be read when the device is done with them."""

    @staticmethod
    def __new__(cls, data, device, ready):
        found = torch.Tensor._make_subclass(cls, data)
        found.queue, found.ready = device, ready
        return found

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        source = next(a for a in args if isinstance(a, Result))
        if isinstance(found, Result):
            found.queue, found.ready = source.queue, source.ready
        elif func is torch.Tensor.item:
            source.queue.now = max(source.queue.now, source.ready)
        return found


def seconds(rows):
    return FIXED + ROW * rows


def test_a_pass_is_timed_until_it_is_done():
    device = Device()
    timed = timed_pass(lambda: device.launch(0.02, 3), device.clock)
    assert timed == pytest.approx(0.02, rel=0.01)
    # nothing of it is left to be charged to the next
    assert timed_pass(lambda: device.launch(0.01, 3), device.clock) == pytest.approx(0.01, rel=0.01)


class Pool:
    def __init__(self):
        self.taken = 0

    def available_size(self):
        return 1000

    def alloc(self, count):
        self.taken += count
        return torch.arange(count)

    def free(self, slots):
        self.taken -= len(slots)


@pytest.fixture
def setting(monkeypatch):
    """A decode batch, a target, and drafters with a draft model, on one device."""
    device = Device()
    monkeypatch.setattr(time, "perf_counter", device.clock)
    monkeypatch.setattr(
        calibration, "decode_rows", lambda plain, tokens, *_: SimpleNamespace(rows=len(tokens))
    )
    monkeypatch.setattr(timed_pass, "__defaults__", (device.clock,))

    def run_target(few):
        logits = device.launch(seconds(few.rows), few.rows)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits))

    def run_draft(few):
        return device.launch(DRAFT * seconds(few.rows), few.rows)

    req = SimpleNamespace(origin_input_ids=[4])
    batch = SimpleNamespace(
        reqs=[req],
        req_pool_indices=torch.tensor([3]),
        seq_lens_cpu=torch.tensor([17]),
        token_to_kv_pool_allocator=Pool(),
    )
    ranks = Ranks(SimpleNamespace(rank_in_group=0, world_size=1))
    model = SimpleNamespace(run=run_draft)
    control = adaptive_drafter(SimpleNamespace(name="model"))
    drafters = Drafters(
        *(None, {}, model, control, ranks), readers=[(model, {"adaptive"})],
        wants_calibration=True,
    )  # fmt: skip
    return device, batch, run_target, drafters


def test_calibrated_times_are_those_of_the_passes(setting):
    device, batch, target, drafters = setting
    device.launch(3.0, 1)  # what is still queued is nobody's time
    calibrate(batch, SimpleNamespace(reqs=batch.reqs), target, drafters, 1 << 20)
    verify, draft = drafters.control.cost.verify, drafters.control.models["model"].cost.passes
    for rows in SIZES:
        assert verify.seconds(rows) == pytest.approx(seconds(rows), rel=0.05)
        assert draft.seconds(rows) == pytest.approx(DRAFT * seconds(rows), rel=0.05)
    assert not drafters.wants_calibration
    assert batch.token_to_kv_pool_allocator.taken == 0


def test_a_fault_ends_calibration_and_gives_the_slots_back(setting, caplog):
    _, batch, target, drafters = setting
    run, calls = drafters.model.run, iter(range(100))

    def failing(few):
        if next(calls) == 5:
            raise torch.OutOfMemoryError("no room")
        return run(few)

    drafters.model.run = failing
    calibrate(batch, SimpleNamespace(reqs=batch.reqs), target, drafters, 1 << 20)
    assert "no room" in caplog.text
    assert drafters.control.cost.verify.has_seen(1)
    assert not drafters.control.cost.verify.has_seen(16)
    assert batch.token_to_kv_pool_allocator.taken == 0
