"""The table of requests: which requests the drafters are told of, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from outrider.control.decision import Plain
from outrider.core import FinishReason, SamplingParams
from outrider.serving.clock import StepClock
from outrider.serving.table import RequestTable
from outrider.serving.values import (
    Launched,
    Members,
    PrefillLaunch,
    ServedRequest,
    Traits,
)


@dataclass(eq=False)
class Req:
    """A request of an engine's."""

    rid: str
    origin_input_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    output_ids: list[int] = field(default_factory=list)
    has_ended: bool = False

    def finished(self):
        return self.has_ended


class Told:
    """The requests that drafters know."""

    def __init__(self):
        self.known = {}

    def start(self, requests):
        for request in requests:
            assert request.req.rid not in self.known, "told twice"
            self.known[request.req.rid] = list(request.output)

    def stop(self, requests):
        for request in requests:
            del self.known[request.req.rid]


def describe(req, number):
    return ServedRequest(
        number,
        tuple(req.origin_input_ids),
        SamplingParams(),
        seed=0,
        output=list(req.output_ids),
        finish_reason=FinishReason.STOP if req.finished() else None,
        req=req,
        traits=Traits(8),
    )


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def table(told):
    return RequestTable(describe, told)


def test_drafters_are_not_told_of_ended_requests(table, told):
    """Beside a grammar SGLang chooses a batch, then ends some of it and takes their slots."""
    ended, other = Req("ended", output_ids=[7], has_ended=True), Req("other", output_ids=[7])
    requests = table.sync([ended, other])
    table.complete(requests)
    assert [request.finish_reason is None for request in requests] == [False, True]
    assert told.known == {"other": [7]}
    table.sync([other])
    table.sync([])
    assert told.known == {}
    assert len(table) == 0


def test_a_request_without_its_first_token_is_introduced_later(table, told):
    req = Req("new")
    prefill = PrefillLaunch([req], [3], None)
    requests = table.sync([req], [prefill])
    assert told.known == {}
    assert table.max_length(req) == 4, "the first token counts before it is known"
    table.note_first_tokens(prefill, [7])
    table.complete(requests)
    assert told.known == {"new": [7]}, "with the token that the engine has not appended yet"
    assert table.max_length(req) == 4
    table.complete(requests)
    assert requests[0].output == [7]


def test_a_first_token_that_the_engine_has_appended_is_not_taken_twice(table, told):
    req = Req("new")
    prefill = PrefillLaunch([req], [3], None)
    requests = table.sync([req], [prefill])
    table.note_first_tokens(prefill, [7])
    req.output_ids.append(7)
    table.complete(requests)
    assert told.known == {"new": [7]}
    other = Req("other", output_ids=[9])
    (_, added) = table.sync([req, other])
    assert added.output == [9]


def test_a_request_in_flight_stays_until_its_step_is_settled(table, told):
    a, b = Req("a", output_ids=[7]), Req("b", output_ids=[7])
    members = Members.whole(table.sync([a, b]), np.array([3, 3]), table.columns)
    flight = Launched(members, Plain(), early=True, ticket=None, clock=StepClock(None))
    table.sync([a], [flight])
    assert set(told.known) == {"a", "b"}
    table.sync([b], [])
    assert set(told.known) == {"b"}


def test_the_list_is_the_same_as_long_as_the_requests_are(table):
    a, b = Req("a", output_ids=[7]), Req("b", output_ids=[7])
    first = table.sync([a, b])
    assert table.sync([a, b]) is first
    assert table.sync([b, a]) is not first
    assert [request.id for request in table.sync([a, b])] == [r.id for r in first]


def test_requests_that_have_ended_are_dropped(table, told):
    a, b = Req("a", output_ids=[7]), Req("b", output_ids=[7])
    (live, _) = table.sync([a, b])
    live.extend((8,), FinishReason.STOP)
    table.drop_ended()
    assert set(told.known) == {"b"}
    assert len(table) == 1
