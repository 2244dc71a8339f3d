"""SGLang's requests in the table: whom the drafters are told of, and when."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from outrider.engines.sglang.requests import Describer
from outrider.serving.profile import Profile
from outrider.serving.table import RequestTable
from outrider.serving.values import PrefillLaunch


class Told:
    """The requests that were started, and not stopped."""

    def __init__(self):
        self.known = []

    def start(self, requests):
        self.known += [(request.req.rid, request.drafter) for request in requests]

    def stop(self, requests):
        for request in requests:
            self.known.remove((request.req.rid, request.drafter))


def make(rid, **options):
    params = SamplingParams(max_new_tokens=4, custom_params={"outrider": options})
    params.normalize(None)
    req = Req(rid, "", [1, 2, 3], params, eos_token_ids=set())
    req.output_ids.append(7)
    return req


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def table(told):
    args = SimpleNamespace(speculative_num_steps=4, enable_deterministic_inference=True)
    describe = Describer(["ngram"], Profile(drafter="ngram"), args, Counter())
    return RequestTable(describe, told)


def test_drafters_are_not_told_of_ended_requests(table, told):
    """Beside a grammar SGLang chooses a batch, then ends some of it and takes their slots."""
    ended, other = make("ended"), make("other")
    ended.finished_reason = FINISH_LENGTH(length=1)
    requests = table.sync([ended, other])
    table.complete(requests)
    assert [request.finish_reason is None for request in requests] == [False, True]
    assert told.known == [("other", "ngram")]
    table.sync([other])
    table.sync([])
    assert told.known == []


def test_a_request_without_its_first_token_is_introduced_later(table, told):
    req = make("new")
    requests = table.sync([req], [PrefillLaunch([req], [3], None)])
    assert told.known == []
    table.complete(requests)
    assert told.known == [("new", "ngram")]


def test_requests_that_want_no_drafts_have_no_drafter(table, told):
    table.sync([make("plain", max_drafts=0)])
    assert told.known == [("plain", "none")]
