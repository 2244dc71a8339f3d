"""Calibration on a device whose results are ready later: a launch returns, and reading waits."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from outrider.control import adaptive_control
from outrider.serving.calibration import ROW_COUNTS, calibrate, timed_pass
from outrider.serving.ranks import Ranks

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


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(time, "perf_counter", device.clock)
    monkeypatch.setattr(timed_pass, "__defaults__", (device.clock,))
    return device


@pytest.fixture
def control():
    """Control that uses a draft model."""
    return adaptive_control(SimpleNamespace(name="model"))


def target_of(device):
    return lambda count: device.launch(seconds(count), count)


def model_of(device):
    return lambda count: device.launch(DRAFT * seconds(count), count)


def test_calibrated_times_are_those_of_the_passes(device, control):
    device.launch(3.0, 1)  # the time of what is still queued is not charged to any pass
    calibrate(control, Ranks(), target_of(device), [model_of(device)], ROW_COUNTS[-1])
    verify, draft = control.cost.verify, control.models["model"].cost.passes
    for rows in ROW_COUNTS:
        assert verify.seconds(rows) == pytest.approx(seconds(rows), rel=0.05)
        assert draft.seconds(rows) == pytest.approx(DRAFT * seconds(rows), rel=0.05)


def test_no_pass_has_more_rows_than_there_are_slots(device, control):
    counts = []

    def target(count):
        counts.append(count)
        return device.launch(seconds(count), count)

    calibrate(control, Ranks(), target, [model_of(device)], 10)
    assert max(counts) == 8


def test_a_fault_ends_calibration(device, control, caplog):
    calls = iter(range(100))

    def failing(count):
        if next(calls) == 5:
            raise torch.OutOfMemoryError("no room")
        return model_of(device)(count)

    calibrate(control, Ranks(), target_of(device), [failing], ROW_COUNTS[-1])
    assert "no room" in caplog.text
    assert control.cost.verify.has_seen(1)
    assert not control.cost.verify.has_seen(16)


class Others(Ranks):
    """Ranks of which another one fails in the pass of this number."""

    def __init__(self, failing):
        super().__init__()
        self.failing, self.asked = failing, 0

    def any(self, flag):
        self.asked += 1
        return flag or self.asked == self.failing


def test_a_fault_on_another_rank_ends_it_here_too(device, control, caplog):
    calibrate(control, Others(9), target_of(device), [model_of(device)], ROW_COUNTS[-1])
    assert "on another rank" in caplog.text
    assert control.cost.verify.has_seen(1)
    assert not control.cost.verify.has_seen(16)
