"""The table of requests: whom the drafters are told of, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from outrider.hosts.sglang.request_table import RequestTable


class Told:
    """Who was started and stopped."""

    def __init__(self):
        self.known = []

    def start(self, requests):
        self.known += [(request.req.rid, request.drafter) for request in requests]

    def stop(self, requests):
        for request in requests:
            self.known.remove((request.req.rid, request.drafter))


def make(rid, **wishes):
    params = SamplingParams(max_new_tokens=4, custom_params={"outrider": wishes})
    params.normalize(None)
    req = Req(rid, "", [1, 2, 3], params, eos_token_ids=set())
    req.output_ids.append(7)
    return req


@pytest.fixture
def table():
    args = SimpleNamespace(speculative_num_steps=4, enable_deterministic_inference=True)
    drafters = SimpleNamespace(router=Told(), fallbacks={})
    return RequestTable(drafters, ["ngram"], "ngram", args)


def test_who_has_ended_is_not_told_to_drafters(table):
    """Beside a grammar SGLang chooses a batch, then ends some of it and takes their slots."""
    ended, other = make("ended"), make("other")
    ended.finished_reason = FINISH_LENGTH(length=1)
    requests = table.update([ended, other])
    table.complete(requests)
    assert [request.finish_reason is None for request in requests] == [False, True]
    assert table._drafters.router.known == [("other", "ngram")]
    table.update([other])
    table.update([])
    assert table._drafters.router.known == []


def test_who_has_no_first_token_yet_is_told_later(table):
    req = make("new")
    requests = table.update([req], unread={"new"})
    assert table._drafters.router.known == []
    table.complete(requests)
    assert table._drafters.router.known == [("new", "ngram")]


def test_who_wants_no_drafts_has_no_drafter(table):
    table.update([make("plain", max_drafts=0)])
    assert table._drafters.router.known == [("plain", "none")]
