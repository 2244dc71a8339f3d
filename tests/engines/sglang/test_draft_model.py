"""What the draft model in SGLang knows of its own cache, without a server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outrider.engines.sglang.batches import SglangBatch
from outrider.engines.sglang.drafts.draft_model import SglangDraftModel
from outrider.engines.sglang.plugin import installed_hooks
from outrider.serving.ranks import Message

VERSION = installed_hooks().version
NOTHING = SglangBatch(VERSION, None, None)


class Req:
    """As much of SGLang's request as is looked at, in either version."""

    def __init__(self, req_pool_idx=0):
        self.req_pool_idx, self.kv = req_pool_idx, self


def batch(*chunks):
    """A prefill batch of SGLang's: (request, cached before it, read by it)."""
    reqs, prefixes, extended = zip(*chunks, strict=True)
    return SimpleNamespace(
        reqs=reqs, **{VERSION.prefix_lens: prefixes, VERSION.extend_lens: extended}
    )


def cached(model, req):
    return model.open(SimpleNamespace(req=req)).length


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(SglangDraftModel, "_forward", lambda self, batch: None)
    config = SimpleNamespace(vocab_size=32, context_len=1 << 20)
    worker = SimpleNamespace(model_config=config, model_runner=None)
    return SglangDraftModel(worker, 1 << 20, VERSION)


def test_what_was_read_stays_known(model):
    req = Req()
    model.prefill(batch((req, 0, 300)))
    sequence = model.open(SimpleNamespace(req=req))
    sequence.length += 10  # ten steps later
    model.close(sequence)
    assert cached(model, req) == 310


def test_a_chunk_that_was_skipped_leaves_a_gap(model):
    """All from the gap on is read again; a part that the radix cache has is taken for read."""
    req, other = Req(), Req(1)
    model.prefill(batch((req, 20, 100), (other, 0, 100)))
    model.skip(batch((req, 120, 100)))
    model.prefill(batch((req, 220, 100), (other, 100, 100)))
    assert cached(model, req) == 120
    assert cached(model, other) == 200


def test_a_request_that_was_retracted_is_read_anew(model):
    """Its slots are others now, but for what the radix cache has kept."""
    req = Req()
    model.prefill(batch((req, 0, 300)))
    req.req_pool_idx = 5
    model.skip(batch((req, 60, 250)))
    assert cached(model, req) == 60
    model.prefill(batch((req, 60, 250)))
    assert cached(model, req) == 310


def test_a_request_on_another_row_of_the_table_is_unread(model):
    req = Req()
    model.prefill(batch((req, 0, 300)))
    req.req_pool_idx = 5
    assert cached(model, req) == 0


class Told:
    """Ranks of which this is the first; keeps what it tells the others."""

    def __init__(self):
        self.told = []

    def tell(self, message, *lists):
        self.told.append((message, *lists))


@pytest.fixture
def leader(model, monkeypatch):
    """A draft model of rank 0, a request's sequence, and what the other ranks were told."""
    monkeypatch.setattr(
        SglangDraftModel, "_forward", lambda self, batch: torch.zeros(len(batch[0]), 32)
    )
    monkeypatch.setattr(SglangDraftModel, "_decode", lambda self, *lists: lists)
    monkeypatch.setattr(SglangDraftModel, "_prefill", lambda self, *lists: lists)
    model._ranks = Told()
    req = Req(4)
    model.note_prefill(batch((req, 0, 30)), is_read=True)
    model.bind(NOTHING)
    return model, model.open(SimpleNamespace(req=req)), model._ranks.told


def test_other_ranks_are_told_of_each_pass(leader):
    model, sequence, told = leader
    model.catch_up([(sequence, [7, 8, 9])])
    model.extend([(sequence, [5, 6])])
    assert told == [
        (Message.EXTEND, [4], [30], [3], [7, 8, 9]),
        (Message.DECODE, [5, 6], [4, 4], [33, 34]),
    ]
    assert model.has_run
    assert sequence.length == 35


def test_they_are_not_told_of_a_pass_that_was_never_begun(leader, monkeypatch):
    model, sequence, told = leader

    def fail(self, *lists):
        raise torch.OutOfMemoryError("no room for the rows")

    monkeypatch.setattr(SglangDraftModel, "_decode", fail)
    with pytest.raises(torch.OutOfMemoryError):
        model.extend([(sequence, [5])])
    assert not told
    assert not model.has_run


def test_what_failed_elsewhere_was_not_read_and_is_a_fault_once(leader):
    model, sequence, told = leader
    model.extend([(sequence, [5])])
    model.extend([(sequence, [6])])
    model.undo("rank 1 failed")
    assert sequence.length == 30
    model.bind(NOTHING)
    with pytest.raises(RuntimeError, match="rank 1"):
        model.extend([(sequence, [5])])
    assert len(told) == 2
    model.extend([(sequence, [5])])
    assert sequence.length == 31
