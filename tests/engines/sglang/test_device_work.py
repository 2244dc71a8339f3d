"""What a GPU would do between passes: out of the scheduler's clock here, at a GPU's price."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from paced import clock, work
from paced.device import Device, Pass
from paced.log import virtual
from paced.prices import LOGITS, Prices, prices_of
from paced.tensor import GreedyLogits, run_kernel
from paced.texts import VOCABULARY
from paced.work import Launches, one_launch

from outrider.engines.costs import H100_8B, PROFILES

SLOW = 0.02
"""Seconds of a slow kernel here."""

NOISE = 0.004
"""Seconds by which this machine may be late."""


@pytest.fixture
def device():
    """A device whose work is priced, its books in use."""
    device = Device(H100_8B, prices=Prices())
    work.use(device.work)
    device.work.calibrate(device.on_device(torch.zeros(16)))
    yield device
    work.use(None)


def seconds(function, *args):
    """Return how long a call took by the server's clock, and in real time."""
    began, real = clock.now(), clock.real()
    function(*args)
    return clock.now() - began, clock.real() - real


def slow(x):
    time.sleep(SLOW)
    return x + 1


# -- by the clock


def test_a_slow_kernel_costs_its_launch_only(device):
    x = device.on_device(torch.zeros(4))
    took, real = seconds(run_kernel, slow, x)
    assert real > SLOW
    assert device.work.prices.launch <= took < NOISE
    part = device.work.parts["slow"]
    assert (part.calls, part.launches, part.launching) == (1, 1, device.work.prices.launch)
    assert part.real > SLOW


def test_a_slow_operation_costs_its_launch_only(device):
    class Slow(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            time.sleep(SLOW)
            return func(*args, **(kwargs or {}))

    x = device.on_device(torch.zeros(4))
    with Slow():
        took, real = seconds(lambda: x * 2)
    assert real > SLOW
    assert took < NOISE


def test_the_cpus_own_work_counts(device):
    x, plain = device.on_device(torch.zeros(4)), torch.zeros(4)
    assert seconds(slow, plain)[0] > SLOW
    took, real = seconds(slow, x)  # it sleeps outside the operation
    assert SLOW < took < real + NOISE


def test_an_expensive_launch_counts_though_it_is_cheap_here():
    device = Device(H100_8B, prices=Prices(launch=SLOW))
    work.use(device.work)
    try:
        took, real = seconds(lambda: device.on_device(torch.zeros(4)) + 1)
    finally:
        work.use(None)
    assert real < SLOW < took


def test_what_is_booked_is_what_is_charged(device):
    """Also for questions and views: nothing of what the books themselves take is left."""
    x, index = device.on_device(torch.arange(16)), device.on_device(torch.arange(4))
    prices = device.work.prices
    cases = {
        "kernel": (lambda: x + 1, prices.launch),  # takes 10 us or more here
        "gather": (lambda: x[index], prices.launch),
        "view": (lambda: x[:3], prices.view),
        "same type": (lambda: x.long(), prices.view),
        "length": (lambda: len(x), prices.ask),
    }
    for name, (call, price) in cases.items():
        charged = work._charged(call)
        assert charged == pytest.approx(price, abs=4e-6), name


def test_without_prices_all_is_the_cpus():
    device = Device(H100_8B)
    plain = torch.zeros(4)
    assert device.work is None
    assert device.on_device(plain) is plain
    before = clock.excused()
    took, _ = seconds(run_kernel, slow, plain)
    assert took > SLOW
    assert clock.excused() == before


def test_reads_wait_and_count(device):
    ready = device.enqueue("decode", 1, 0, 1, 0)
    tokens = torch.argmax(GreedyLogits.over(torch.tensor([7]), VOCABULARY, ready, device.wait), -1)
    took, _ = seconds(tokens.tolist)
    assert took > H100_8B.target.fixed / 2
    assert clock.now() >= ready


def test_programs_that_measure_time_follow_the_clock(monkeypatch):
    def measure(clock=clock.real):
        return clock

    monkeypatch.setattr(time, "perf_counter", clock.real)
    clock._redirect(measure)
    assert measure() is clock.now
    clock.follow("no such package")
    before, real = time.perf_counter(), clock.real()
    clock.excuse(5.0)
    try:
        assert time.perf_counter() - before < clock.real() - real - 4.9
    finally:
        clock.excuse(-5.0)


# -- on the device


def test_kernels_delay_what_follows(device):
    prices = Prices(kernel=SLOW)
    device.work.prices = prices
    first = device.enqueue("decode", 1, 0, 1, 0)
    logits = GreedyLogits.over(torch.tensor([7, 8]), VOCABULARY, first, device.wait)
    tokens = torch.argmax(logits, -1)
    assert tokens.ready == pytest.approx(first + SLOW + 2 * LOGITS / prices.bandwidth)
    more = tokens + 1
    assert more.ready == pytest.approx(tokens.ready + SLOW, abs=1e-6)
    second = device.enqueue("decode", 1, 0, 1, 0)
    assert second == pytest.approx(more.ready + H100_8B.target.decode(1, 0), abs=1e-6)


def test_kernels_beside_a_pass_do_not_wait_for_it(device):
    ready = device.enqueue("decode", 1, 0, 1, 0)
    beside = device.on_device(torch.arange(4)) + 1
    assert beside.ready < ready < device.free_at
    assert device.free_at - ready == pytest.approx(device.work.prices.kernel, rel=0.1)


def test_a_read_of_what_was_computed_is_a_read_of_its_pass(device):
    ready = device.enqueue("decode", 1, 0, 1, 0)
    tokens = torch.argmax(GreedyLogits.over(torch.tensor([7]), VOCABULARY, ready, device.wait), -1)
    [made] = device._passes
    (tokens + 1).tolist()
    assert made.read
    assert made.read < ready


def test_large_kernels_cost_by_their_bytes(device):
    ready = device.enqueue("decode", 1, 0, 1, 0)
    few, many = (
        torch.argmax(GreedyLogits.over(torch.zeros(n).long(), 9, ready, device.wait), -1).ready
        for n in (1, 1000)
    )
    assert many - few == pytest.approx(999 * LOGITS / device.work.prices.bandwidth)


def test_profiles_have_the_memory_of_their_device():
    rates = {name: prices_of(name).bandwidth for name in PROFILES}
    assert rates["h100-8b"] == rates["h100x4-70b"] < rates["mi300x-32b"]


# -- bare SGLang's and ours alike


def test_the_same_operations_cost_the_same_whoever_asks(device):
    """As operations of their own, as SGLang's are, or within one of our functions."""
    x, index = device.on_device(torch.arange(16)), device.on_device(torch.arange(4))

    def step(x, index):
        found = x[index] + 1
        x[index] = found
        return found[None, :2]

    step(x, index)
    [alone] = device.work.parts.values()
    run_kernel(step, x, index)
    within = device.work.parts["step"]
    assert alone.launches == within.launches == 3
    # operations of their own pay for their views too
    views = alone.calls - alone.launches
    assert alone.launching == pytest.approx(within.launching + views * device.work.prices.view)


def test_what_is_within_a_function_is_booked_once(device):
    x = device.on_device(torch.zeros(4))

    def inner(x):
        time.sleep(SLOW)
        return x + len(x)

    def outer(x):
        return run_kernel(inner, x) * 2

    before = clock.excused()
    run_kernel(outer, x)
    assert list(device.work.parts) == ["outer"]
    assert device.work.parts["outer"].launches == 2
    assert SLOW - NOISE < clock.excused() - before < 2 * SLOW


def test_launches_are_counted_as_a_gpu_has_them():
    x = torch.arange(6)
    with Launches() as found:
        y = torch.cat([x[:3].view(1, 3), x[3:][None]]).clamp(min=1)
        y[0] = torch.empty(3, dtype=y.dtype).fill_(7)
        one_launch(lambda: [y.sum() + i for i in range(5)])
    assert found.number == 2 + 2 + 1


# -- other processes


def test_moments_of_a_client_by_the_servers_clock():
    def queued(at, excused):
        return Pass("decode", at, at, at + 1, 1, 0, 1, 0, excused=excused)

    # a second of real time in which the server's clock moves by 0.8 s, then one of 0.5 s
    on_server = virtual([queued(10.0, 5.0), queued(10.8, 5.2), queued(11.3, 5.7)])
    moments = [14.0, 15.0, 15.5, 16.0, 16.5, 17.0, 18.0]
    assert [on_server(m) for m in moments] == pytest.approx([9, 10, 10.4, 10.8, 11.05, 11.3, 12.3])
    found = [on_server(14 + i / 100) for i in range(400)]
    assert all(a < b for a, b in pairwise(found))


def test_passes_carry_what_was_excused_and_launched(device):
    x = device.on_device(torch.zeros(4))
    for _ in range(2):
        run_kernel(slow, x)
        since = clock.real()
        device.enqueue("decode", 1, 0, 1, 0, device._launched())
        time.sleep(SLOW)  # makes the values up
        device.note_launch(since)
    first, last = device._passes
    prices = device.work.prices
    assert last.launches - first.launches == 1 + prices.graph_inputs + 1
    assert last.launching - first.launching == pytest.approx(prices.launch + prices.launch_of_pass)
    assert last.excused - first.excused > 2 * SLOW - NOISE
    assert last.queued - first.queued < NOISE
    on_server = virtual([first, last])
    assert on_server(clock.real()) == pytest.approx(clock.now(), abs=NOISE)
