"""What the draft model in SGLang knows of its own cache, without a server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.hosts.sglang.draft_model import SglangDraftModel


class Req:
    """As much of SGLang's request as is looked at."""

    def __init__(self, req_pool_idx=0):
        self.req_pool_idx = req_pool_idx


def batch(*chunks):
    """A prefill batch of the host's: (request, cached before it, read by it)."""
    reqs, prefixes, extended = zip(*chunks, strict=True)
    return SimpleNamespace(reqs=reqs, extend_prefix_lens=prefixes, extend_seq_lens=extended)


def cached(model, req):
    return model.open(SimpleNamespace(req=req)).length


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(SglangDraftModel, "_forward", lambda self, batch: None)
    config = SimpleNamespace(vocab_size=32, context_len=1 << 20)
    return SglangDraftModel(SimpleNamespace(model_config=config, model_runner=None), 1 << 20)


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
