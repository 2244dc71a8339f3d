"""Calibration in the worker: which passes are timed, and that their slots are given back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outrider.control import adaptive_control
from outrider.engines.sglang.batches import SglangBatch
from outrider.engines.sglang.workers import base
from outrider.engines.sglang.workers.base import OutriderWorker
from outrider.serving.pool import Pool
from outrider.serving.ranks import Ranks
from outrider.serving.values import Batch, Knows


class Allocator:
    """A pool of so many slots."""

    def __init__(self, free):
        self.free_slots, self.taken = free, 0

    def available_size(self):
        return self.free_slots - self.taken

    def alloc(self, count):
        self.taken += count
        return torch.arange(count)

    def free(self, slots):
        self.taken -= len(slots)


class Passes:
    """The target, or a model, as far as passes go: it keeps their rows."""

    def __init__(self, fault_at=None):
        self.rows, self.fault_at = [], fault_at

    def run(self, rows):
        self.rows.append(rows)
        if len(self.rows) == self.fault_at:
            raise torch.OutOfMemoryError("no room")
        return torch.zeros(len(rows.tokens), 7)

    def run_target(self, rows):
        output = SimpleNamespace(next_token_logits=self.run(rows))
        return SimpleNamespace(logits_output=output)


@pytest.fixture
def calibrate(monkeypatch):
    """Return a function that calibrates a worker beside so many free slots, by these passes."""

    def copied(plain, tokens, index, positions, slots, reqs):
        found = {"tokens": tokens, "index": index, "positions": positions, "slots": slots}
        return SimpleNamespace(reqs=reqs, **found)

    monkeypatch.setattr(base, "copied_rows", copied)

    def run(allocator, target, model, most=1 << 20):
        worker = OutriderWorker.__new__(OutriderWorker)
        control = adaptive_control(SimpleNamespace(name="model"))
        readers = [(model, frozenset({"model", "adaptive"}))]
        worker._pool = Pool({}, control=control, readers=readers)
        worker._engine, worker._ranks = target, Ranks()
        worker._rows = SimpleNamespace(max_rows=lambda: most)
        plain = SimpleNamespace(reqs=["a", "b"], req_pool_indices=torch.tensor([3, 5]))
        req = SimpleNamespace(origin_input_ids=[4, 6])
        batch = SimpleNamespace(reqs=[req], token_to_kv_pool_allocator=allocator)
        own, longest = SglangBatch(None, batch, plain), torch.tensor([17, 2]).numpy()
        worker._calibrate(Batch([req], Knows.BOTH, longest, plain.req_pool_indices, None, own))
        return control

    return run


def test_rows_are_copies_of_the_first_requests_in_slots_of_their_own(calibrate):
    allocator, target, model = Allocator(1000), Passes(), Passes()
    control = calibrate(allocator, target, model)
    sizes = {len(rows.tokens) for rows in target.rows}
    assert sizes == {len(rows.tokens) for rows in model.rows}
    assert max(sizes) == base.ROW_COUNTS[-1]
    for rows in target.rows + model.rows:
        count = len(rows.tokens)
        assert rows.tokens == [6] * count
        assert rows.positions == [17] * count
        assert rows.index.tolist() == [3] * count
        assert rows.reqs == ["a"] * count
        assert len(set(rows.slots.tolist())) == count
    assert control.cost.verify.has_seen(1)
    assert allocator.taken == 0


@pytest.mark.parametrize(("free", "most", "rows"), [(10, 1 << 20, 8), (1000, 30, 24)])
def test_no_pass_has_more_rows_than_fit(calibrate, free, most, rows):
    target = Passes()
    calibrate(Allocator(free), target, Passes(), most)
    assert max(len(each.tokens) for each in target.rows) == rows


def test_a_fault_ends_calibration_and_gives_the_slots_back(calibrate, caplog):
    allocator = Allocator(1000)
    control = calibrate(allocator, Passes(), Passes(fault_at=6))
    assert "no room" in caplog.text
    assert control.cost.verify.has_seen(1)
    assert not control.cost.verify.has_seen(16)
    assert allocator.taken == 0


def test_a_full_pool_is_not_calibrated_in(calibrate):
    target = Passes()
    calibrate(Allocator(0), target, Passes())
    assert not target.rows
