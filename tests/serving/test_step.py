"""The served step over an engine that echoes texts: launched early, settled later, and in order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.control.decision import CpuDrafts, DeviceDrafts, Plain
from outrider.core import FinishReason, Proposal, SamplingParams, chain
from outrider.core.settle import kept_tokens
from outrider.drafters import GuardedDrafter, NgramDrafter, NoDrafter
from outrider.serving import device, values
from outrider.serving.decider import Decider
from outrider.serving.device import DeviceTexts
from outrider.serving.device_drafters import DeviceDrafters
from outrider.serving.in_flight import InFlight
from outrider.serving.pool import Pool
from outrider.serving.rows import RowBudget
from outrider.serving.step import ServedStep
from outrider.serving.table import RequestTable
from outrider.serving.telemetry import Telemetry
from outrider.serving.values import (
    Batch,
    Knows,
    Launched,
    PrefillLaunch,
    ServedRequest,
    Traits,
)

V, ROOM = 1000, 128
PROMPT = 5
JUNK = 900
"""What follows a row whose path is not in the text: no text has such tokens."""


@dataclass(eq=False)
class Req:
    """A request of the engine's. text: its prompt, and what the target emits"""

    rid: str
    text: list[int]
    max_tokens: int
    drafter: str = "none"
    max_drafts: int = 3
    explain: bool = False
    needs_text: bool = False
    output_ids: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def origin_input_ids(self):
        return self.text[:PROMPT]

    @property
    def answer(self):
        return self.text[PROMPT : PROMPT + self.max_tokens]

    def finished(self):
        return self.has_ended


def describe(req, number):
    drafts = req.max_drafts if req.drafter != "none" else 0
    return ServedRequest(
        number,
        tuple(req.origin_input_ids),
        SamplingParams(max_tokens=req.max_tokens),
        seed=0,
        output=list(req.output_ids),
        req=req,
        traits=Traits(req.max_tokens, needs_text=req.needs_text),
        drafter=req.drafter,
        max_drafts=drafts,
        explain=req.explain,
    )


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of the fake engine.

    index, knows, lens: of the requests; the last two after the step
    emitted: [N] after each row
    """

    reqs: list[Req]
    index: torch.Tensor
    emitted: list[int]
    knows: Knows
    lens: list[int]
    drafts: Any = None


class Echo:
    """An engine whose target emits each request's known text.

    events: what was asked of it, in order
    """

    def __init__(self, device):
        self.events: list[Any] = []
        self.lens: dict[str, int] = {}  # how many tokens are cached, as the device knows it
        self.knows: dict[str, Knows] = {}
        self.placed: list[Any] = []
        self._device = device

    def prepare(self, batch, requests):
        self.events.append("prepare")
        return replace(batch, longest=np.array([request.length - 1 for request in requests]))

    def choose_pass(self, batch, members, decision):
        return decision

    def lay_out(self, batch, members, decision, drafts):
        requests = members.requests
        reqs, index = [request.req for request in requests], batch.index[members.places]
        if drafts is not None:
            owners = drafts.layout.owner.tolist()
            paths = [
                (
                    reqs[owner],
                    int(drafts.lens[owner]),
                    drafts.tokens[row - place : row + 1].tolist(),
                )
                for row, (owner, place) in enumerate(
                    zip(owners, drafts.layout.place.tolist(), strict=True)
                )
            ]
            return self._rows(reqs, index, paths, Knows.DEVICE, [0] * len(reqs), drafts)
        proposal = Proposal.empty(len(reqs))
        if isinstance(decision, CpuDrafts):
            proposal = decision.proposal
        is_plain = members.is_whole and not len(proposal.parents)
        lens, last = members.lens.tolist(), [request.last_token for request in requests]
        if is_plain and batch.knows is Knows.BOTH:  # the device knows its own last tokens
            lens = [self.lens[req.rid] for req in reqs]
            last = [req.text[n] for req, n in zip(reqs, lens, strict=True)]
        paths = [
            (reqs[owner], lens[owner], [last[owner], *path])
            for owner, path in zip(proposal.row_owners.tolist(), proposal.paths(), strict=True)
        ]
        after = [n + 1 for n in lens]
        return self._rows(reqs, index, paths, Knows.BOTH if is_plain else Knows.CPU, after)

    def _rows(self, reqs, index, paths, knows, lens, drafts=None):
        emitted = []
        for req, start, path in paths:
            end = start + len(path)
            is_text = path == req.text[start:end]
            emitted.append(req.text[end] if is_text else JUNK + end % 90)
        return Rows(reqs, index, emitted, knows, lens, drafts)

    def run(self, rows):
        self.events.append("run")
        tokens, lens = torch.tensor(rows.emitted), rows.lens
        if rows.knows is Knows.BOTH:
            self._device.append(rows.index, torch.tensor(lens), tokens)
        if rows.drafts is not None:
            after, tokens = self._device.advance(rows.drafts, tokens)
            lens = after.tolist()
        for req, n in zip(rows.reqs, lens, strict=True):
            self.lens[req.rid], self.knows[req.rid] = n, rows.knows
        return tokens

    def emitted(self, ticket):
        self.events.append("fetch")
        return ticket

    def first_tokens(self, ticket):
        self.events.append("first tokens")
        return ticket

    def keep(self, launched, running, requests, tokens, counts):
        return kept_tokens(requests, tokens, counts)

    def place(self, settled):
        self.placed.append(settled)


class Drafts:
    """Drafts what the target emits; a draft at a place in `wrong` is another token."""

    name = "known"

    def __init__(self, wrong=()):
        self.wrong, self.asked, self.seen = wrong, 0, {}

    def start(self, requests):
        self.seen.update({request.id: [*request.prompt, *request.output] for request in requests})

    def stop(self, requests):
        for request in requests:
            del self.seen[request.id]

    def observe(self, outcomes):
        for outcome in outcomes:
            self.seen[outcome.request.id] += outcome.tokens

    def propose(self, requests, budget):
        self.asked += 1
        found = []
        for request, most in zip(requests, budget.max_drafts.tolist(), strict=True):
            assert self.seen[request.id] == [*request.prompt, *request.output]
            n = request.length
            tokens = [1 if i in self.wrong else t for i, t in enumerate(request.req.text[n:], n)]
            found.append(chain(tokens[:most]))
        return Proposal.of(found)


class Counting(Decider):
    """A decider that notes for which steps it is asked to score drafts."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.scored: list[Launched] = []

    def score_unused(self, launched):
        self.scored.append(launched)
        super().score_unused(launched)


class Counts:
    """Metrics: keeps the steps that it is given."""

    def __init__(self):
        self.settled = []

    def record(self, settled):
        self.settled.append(settled)

    def totals(self, name, totals):
        pass


class Server:
    """A scheduler that launches a step before it takes in what the last one emitted.

    steps: those that were launched and not taken in yet
    """

    def __init__(self, *reqs, drafts=None, control=None, calibrate=None, limit=64):
        self.texts = DeviceTexts(torch.arange(8 * ROOM).view(8, ROOM), {"min_n": 1, "max_n": 4})
        self.device = DeviceDrafters(self.texts)
        guards = {
            "none": NoDrafter(),
            "known": drafts or Drafts(),
            "device": NgramDrafter(min_n=1, max_n=4),
        }
        if control is not None:
            guards["adaptive"] = control
        self.pool = Pool(
            {name: GuardedDrafter(drafter, V) for name, drafter in guards.items()},
            control=control,
            depths={"device": 64},
        )
        self.engine, self.in_flight = Echo(self.device), InFlight()
        self.table = RequestTable(describe, self.pool)
        rows = RowBudget(limit, V, logit_bytes=2, coins=None, trees=False)
        self.decider = Counting(self.table, self.pool, self.device, rows, calibrate=calibrate)
        self.metrics = Counts()
        self.step = ServedStep(
            self.engine,
            self.table,
            self.pool,
            self.device,
            self.decider,
            Telemetry(self.pool, self.metrics),
            self.in_flight,
        )
        self.reqs: list[Req] = []
        self.steps: list[Launched] = []
        self.lines: dict[str, int] = {}
        self.last: Launched | None = None
        if reqs:
            self.prefill(*reqs)
            self.step.settle_next()
            self.take_prefill(*reqs)
            self.engine.events.clear()

    def prefill(self, *reqs):
        """Launch a prefill of these requests, which emits their first tokens."""
        self.in_flight.begin_prefill()
        ticket = [req.text[PROMPT] for req in reqs]
        self.in_flight.append(PrefillLaunch(reqs, [PROMPT] * len(reqs), ticket))
        for req in reqs:
            self.lines[req.rid] = len(self.lines)
            self.engine.lens[req.rid], self.engine.knows[req.rid] = PROMPT, Knows.BOTH
        index = torch.tensor([self.lines[req.rid] for req in reqs])
        lens = torch.full_like(index, PROMPT)
        self.device.enter(reqs, index, lens, torch.tensor(ticket), np.empty(0, np.int64))
        self.reqs += reqs
        self.last = None

    def take_prefill(self, *reqs):
        """Append what a prefill has emitted."""
        for req in reqs:
            req.output_ids.append(req.text[PROMPT])
            req.has_ended = req.max_tokens == 1

    def launch(self):
        """Launch a step of all requests that the scheduler does not know to have ended."""
        reqs = self.reqs = [req for req in self.reqs if not req.has_ended]
        knows = {self.engine.knows[req.rid] for req in reqs}
        step = self.step.launch(
            Batch(
                reqs,
                next(side for side in (Knows.CPU, Knows.DEVICE, Knows.BOTH) if side in knows),
                self.in_flight.max_cached(reqs, self.table),
                torch.tensor([self.lines[req.rid] for req in reqs]),
                torch.tensor([self.engine.lens[req.rid] for req in reqs]),
                None,
                device_drafter="" if self.last is None else self.last.device_drafter,
            )
        )
        self.last = step
        self.steps.append(step)
        return step

    def take(self):
        """Append what the oldest step emitted. Return it, settled."""
        settled = self.step.outcome_of(self.steps.pop(0))
        for outcome in settled.outcomes:
            req = outcome.request.req
            if req.max_tokens > 1:  # otherwise it has ended by its first token
                req.output_ids += outcome.tokens
                req.has_ended = outcome.finish_reason is not None
        self.step.after_outcome()
        return settled

    def serve(self):
        """Serve all requests to their ends, a step ahead."""
        while any(not req.has_ended for req in self.reqs):
            self.launch()
            if len(self.steps) > 1:
                self.take()
        while self.steps:
            self.take()


def req(rid="a", max_tokens=20, **options):
    """Return a request with a text that repeats itself, now and then otherwise."""
    first = 10 * (1 + ord(rid[0]) % 20)
    text = [first + (i % 6 if i % 17 else 7) for i in range(ROOM)]
    return Req(rid, text, max_tokens, **options)


# -- launched early


def test_plain_steps_are_launched_before_the_last_one_is_known():
    server = Server(req())
    first = server.launch()
    second = server.launch()
    assert (first.early, second.early) == (True, True)
    assert server.engine.events == ["run", "run"], "nothing was fetched before the launch"
    settled = server.take()
    assert settled.launched is first
    assert settled.outcomes.tokens.tolist() == server.reqs[0].answer[1:2]
    assert server.engine.events == ["run", "run", "fetch"]


@pytest.mark.parametrize("option", ["explain", "needs_text"])
def test_a_step_that_needs_the_text_waits_for_it(option):
    server = Server(req(**{option: True}))
    server.launch()
    server.engine.events.clear()
    assert not server.launch().early
    assert server.engine.events == ["fetch", "prepare", "run"]


# -- with drafts of the CPU


def test_a_step_with_drafts_waits_for_the_last_outcome():
    server = Server(req(drafter="known"))
    first = server.launch()
    assert not first.early
    assert isinstance(first.decision, CpuDrafts)
    assert first.num_drafts().tolist() == [3]
    server.engine.events.clear()
    second = server.launch()
    assert server.engine.events == ["fetch", "prepare", "run"]
    assert server.take().outcomes.tokens.tolist() == server.reqs[0].answer[1:5]
    assert server.engine.events == ["fetch", "prepare", "run"], "it was settled by the launch"
    assert server.take().launched is second
    assert server.reqs[0].output_ids == server.reqs[0].answer[:9]


def test_what_the_target_does_not_agree_with_is_dropped():
    server = Server(req(drafter="known"), drafts=Drafts(wrong={PROMPT + 2}))
    server.launch()
    settled = server.take()
    assert settled.outcomes.num_drafts.tolist() == [3]
    assert settled.outcomes.num_accepted_drafts.tolist() == [1]
    assert server.reqs[0].output_ids == server.reqs[0].answer[:3]


def test_a_fault_of_a_drafter_makes_the_step_a_plain_one(monkeypatch):
    drafts = Drafts()
    monkeypatch.setattr(drafts, "propose", lambda *_: 1 / 0)
    server = Server(req(drafter="known"), drafts=drafts)
    asked = server.reqs[0]
    assert isinstance(server.launch().decision, Plain)
    server.serve()
    assert server.pool.fallback_totals()["error"] > 0
    assert asked.output_ids == asked.answer


# -- with drafts of the device


def accepted(server):
    """Return how many drafts were accepted in the steps that were settled."""
    server.step.meanwhile()
    return sum(int(s.outcomes.num_accepted_drafts.sum()) for s in server.metrics.settled)


def test_drafts_of_the_device_are_made_before_the_last_step_is_known():
    server = Server(req(drafter="device"))
    early = [server.launch() for _ in range(3)]
    assert all(isinstance(step.decision, DeviceDrafts) for step in early)
    assert [step.early for step in early] == [True] * 3, "the device has the texts from the prompts"
    assert [step.device_drafter for step in early] == ["device"] * 3
    assert server.engine.events == ["run"] * 3
    asked = server.reqs[0]
    server.serve()
    assert asked.output_ids == asked.answer
    assert accepted(server) > 3, "the text repeats itself"


def test_requests_that_join_do_not_make_a_step_wait():
    """Nor does a plain request among those that draft, nor the end of one."""
    a, b, c = req(drafter="device"), req("b", 9, drafter="device"), req("c")
    server = Server(a)
    server.launch()
    for joining in (b, c):
        server.launch()
        server.prefill(joining)
        server.engine.events.clear()
        step = server.launch()
        assert step.early
        assert [each.req for each in step.requests] == server.reqs
        assert isinstance(step.decision, DeviceDrafts)
        assert server.engine.events == ["run"], "nothing was fetched before the launch"
        server.take_prefill(joining)
        server.take()
    server.serve()
    assert [each.output_ids for each in (a, b, c)] == [each.answer for each in (a, b, c)]
    assert all(settled.launched.early for settled in server.metrics.settled)
    assert accepted(server) > 6


def test_twin_a_text_that_the_device_does_not_have_makes_steps_wait(monkeypatch):
    a, b = req(drafter="device"), req("b", drafter="device")
    server = Server(a)
    server.launch()
    monkeypatch.setattr(DeviceTexts, "enter", lambda *_: None)
    server.prefill(b)
    server.engine.events.clear()
    assert not server.launch().early
    assert server.engine.events == ["fetch", "first tokens", "prepare", "run"]
    server.take_prefill(b)
    server.serve()
    assert [each.output_ids for each in (a, b)] == [each.answer for each in (a, b)]


def test_with_more_requests_than_lines_the_cpu_drafts(monkeypatch):
    monkeypatch.setattr(device, "MAX_TEXT_BYTES", 2 * 4 * ROOM)
    lengths = {"a": 30, "b": 12, "c": 9, "d": 20}
    asked = [req(rid, n, drafter="device") for rid, n in lengths.items()]
    server = Server(*asked[:3])
    while asked[1].output_ids != asked[1].answer:
        server.launch()
        server.take()
    server.prefill(asked[3])  # in the line of one that has ended
    server.launch()
    server.take_prefill(asked[3])
    server.serve()
    assert [each.output_ids for each in asked] == [each.answer for each in asked]
    on_device = [
        {each.req.rid for each in settled.launched.requests}
        for settled in server.metrics.settled
        if isinstance(settled.launched.decision, DeviceDrafts)
    ]
    assert on_device[-1] <= {"a", "d"}
    assert {"a", "d"} in on_device
    assert not any({"a", "b", "c"} <= rids for rids in on_device)
    assert not server.pool.fallback_totals()


def made_of(server):
    """Return the reports of a server's steps, as they come."""
    reports, observe = [], server.pool.observe

    def noted(report):
        reports.append(report)
        observe(report)

    server.pool.observe = noted
    return reports


def is_made_for(report):
    """Say of each request of a report whether all its drafts are tokens of its own text."""
    own = [set(request.req.text) for request in report.outcomes.requests]
    return [set(drafts) <= tokens for drafts, tokens in zip(report.made.tolist(), own, strict=True)]


def served_beside_one_that_ends():
    """Serve three requests, one without drafts and one that ends early. Return the reports."""
    asked = [req("a", 7), req("b", 20, drafter="device"), req("c", 20)]
    server = Server(*asked)
    for _ in range(4):  # the texts repeat themselves then, and there is something to look up
        server.launch()
        server.take()
    reports = made_of(server)
    server.serve()
    assert [each.output_ids for each in asked] == [each.answer for each in asked]
    return [report for report in reports if isinstance(report.decision, DeviceDrafts)]


def test_drafts_without_rows_are_reported_of_their_own_requests():
    reports = served_beside_one_that_ends()
    sizes = [len(report.outcomes.requests) for report in reports]
    assert set(sizes) >= {1, 2, 3}
    assert any(
        len(report.decision.num_drafts) > size for report, size in zip(reports, sizes, strict=True)
    ), "a request had ended when its step was settled"
    for report in reports:
        assert report.made.shape == (len(report.outcomes.requests), report.decision.width)
        assert all(is_made_for(report))
    without = [r for r in reports for n in r.outcomes.num_drafts.tolist() if not n]
    assert len(without) > 6


def test_twin_drafts_of_requests_that_have_ended_are_seen(monkeypatch):
    monkeypatch.setattr(
        values,
        "unpack",
        lambda fetched, counts, members: (
            *device.unpack(fetched, counts, members)[:2],
            device.unpack(fetched, counts, None)[2][: len(counts if members is None else members)],
        ),
    )
    assert not all(all(is_made_for(report)) for report in served_beside_one_that_ends())


def test_a_fault_on_the_device_makes_the_step_a_plain_one_and_is_counted(monkeypatch, caplog):
    asked = req(drafter="device"), req("b", drafter="device")
    server = Server(*asked, calibrate=lambda batch: None)  # so the first step waits
    monkeypatch.setattr(DeviceDrafters, "begin", lambda *_: 1 / 0)
    first = server.launch()
    assert not first.early
    assert isinstance(first.decision, Plain)
    assert server.pool.fallback_totals() == {"device": 2}
    assert "no more drafts of device on the device" in caplog.text
    server.serve()
    assert server.pool.fallback_totals() == {"device": 2}, "it is not asked again"
    assert [each.output_ids for each in asked] == [each.answer for each in asked]


def test_a_fault_in_a_step_launched_early_waits_for_the_last_outcome(monkeypatch):
    server = Server(req(drafter="device"))
    server.launch()
    monkeypatch.setattr(DeviceTexts, "rows", lambda *_: 1 / 0)
    server.engine.events.clear()
    step = server.launch()
    assert not step.early
    assert not step.device_drafter
    assert server.engine.events == ["fetch", "prepare", "run"]
    assert server.pool.fallback_totals() == {"device": 1}
    asked = server.reqs[0]
    server.serve()
    assert asked.output_ids == asked.answer


# -- requests that end, and that begin


def test_a_row_of_a_request_that_has_ended_is_discarded():
    a, b = req("a", max_tokens=2), req("b")
    server = Server(a, b)
    server.launch()
    both = server.launch()
    assert len(both.requests) == 2
    server.take()
    assert (a.has_ended, b.has_ended) == (True, False)
    server.launch()
    settled = server.take()
    assert settled.launched is both
    assert settled.running.tolist() == [1]
    assert [outcome.request.req for outcome in settled.outcomes] == [b]
    assert settled.members.places.tolist() == [1]
    assert settled.kept_rows().tolist() == [1]
    server.serve()
    assert [each.output_ids for each in (a, b)] == [a.answer, b.answer]
    assert len(server.table) == 0


def test_of_a_step_whose_requests_have_all_ended_nothing_is_fetched():
    a = req(max_tokens=2)
    server = Server(a)
    server.launch()
    server.launch()
    server.take()
    server.engine.events.clear()
    settled = server.take()
    assert server.engine.events == []
    assert len(settled.outcomes) == 0
    assert a.output_ids == a.answer
    assert len(server.table) == 0


def test_a_step_behind_a_prefill_in_flight_is_launched_early():
    """The CPU does not know the first token; the drafters are told when it does."""
    drafts = Drafts()
    server, a = Server(drafts=drafts), req()
    server.prefill(a)
    step = server.launch()
    assert step.early
    assert server.engine.events == ["run"]
    assert step.requests[0].output == []
    settled = server.take()
    assert server.engine.events == ["run", "first tokens", "fetch"]
    assert settled.outcomes.tokens.tolist() == a.answer[1:2]
    assert step.requests[0].output == a.answer[:2]


def test_drafts_behind_a_prefill_wait_for_the_first_token():
    drafts = Drafts()
    server, a = Server(drafts=drafts), req(drafter="known")
    server.prefill(a)
    step = server.launch()
    assert server.engine.events == ["first tokens", "prepare", "run"]
    assert list(drafts.seen.values()) == [a.text[: PROMPT + 1]]
    assert step.num_drafts().tolist() == [3]
    server.take_prefill(a)
    assert server.take().outcomes.num_accepted_drafts.tolist() == [3]


# -- settling


def test_steps_are_settled_in_the_order_of_their_launches():
    server = Server(req(), req("b"))
    first, second, third = (server.launch() for _ in range(3))
    assert list(server.in_flight) == [first, second, third]
    later = server.step.outcome_of(second)
    assert list(server.in_flight) == [third]
    assert [settled.launched for settled in server.engine.placed] == [first, second]
    before = server.step.outcome_of(first)
    assert before.launched is first
    tokens = [settled.outcomes.tokens.tolist() for settled in (before, later)]
    a, b = server.reqs
    assert tokens == [[a.answer[1], b.answer[1]], [a.answer[2], b.answer[2]]]
    assert [each.output for each in first.requests] == [each.answer[:3] for each in (a, b)]


def test_twin_another_order_is_seen(monkeypatch):
    monkeypatch.setattr(InFlight, "popleft", InFlight.pop)
    server = Server(req(), req("b"))
    first, second = (server.launch() for _ in range(2))
    server.step.outcome_of(first)
    assert [settled.launched for settled in server.engine.placed] != [first, second]
    assert [each.output for each in first.requests] != [each.answer[:3] for each in server.reqs]


def test_each_step_is_counted_once_and_in_order_and_its_time_is_split():
    server = Server(req(drafter="known"), req("b"))
    launched = []
    while not all(each.has_ended for each in server.reqs):
        launched.append(server.launch())
        server.take()
    server.step.meanwhile()
    assert [settled.launched for settled in server.metrics.settled] == launched
    every = {"host", "scheduler", "forward", "verify"}
    for settled in server.metrics.settled:
        clock = settled.launched.clock
        assert {*clock.parts} - {"draft"} == every
        assert ("draft" in clock.parts) or settled.launched.early
        assert all(end >= begin for _, begin, end in clock.laps)


class Asleep:
    """Control that lets steps go without drafts, and keeps what it is asked to score."""

    name = "adaptive"
    hidden_layers = ()

    def __init__(self):
        self.scored = []

    def start(self, requests):
        pass

    stop = forget = observe = start

    def decide_early(self, requests, most, feasible):
        return Plain()

    def scores_unused(self, on_device):
        return not on_device

    def score_unused(self, requests, budget, feasible):
        self.scored.append((list(requests), budget.max_drafts.tolist()))


def test_unused_drafts_are_scored_while_one_early_step_is_in_flight():
    control, a = Asleep(), req(drafter="adaptive")
    server = Server(a, control=control)
    server.launch()
    server.take()
    assert server.decider.scored == [], "nothing is in flight"
    server.launch()
    (second, third) = server.launch(), server.launch()
    server.take()
    assert server.decider.scored == [], "two steps are in flight"
    server.take()
    assert server.decider.scored == [third]
    assert second is not third
    live = third.requests[0]
    assert control.scored == [([live], [3])]
    server.prefill(req("b"))
    server.launch()
    server.take()
    assert server.decider.scored == [third], "a prefill is in flight too"


def test_an_informed_step_in_flight_is_not_scored():
    server = Server(req(drafter="known"))
    server.launch()
    server.launch()
    server.take()
    assert server.in_flight.only_decode() is not None
    assert server.decider.scored == []


def test_passes_are_timed_once_and_before_the_first_step():
    timed: list[Batch] = []
    server = Server(req(), calibrate=timed.append)
    server.launch()
    assert len(timed) == 1
    assert server.launch().early
    assert len(timed) == 1


# -- the law: texts are those of plain decoding


CASES = {
    "plain": ["none"] * 3,
    "drafts": ["known"] * 3,
    "device": ["device"] * 3,
    "several": ["none", "known", "device"],
}


def served(case):
    """Serve three requests that end at different times. Return them, and how many steps."""
    lengths = [23, 7, 40]
    reqs = [
        req(rid, max_tokens=n, drafter=name)
        for rid, n, name in zip("abc", lengths, CASES[case], strict=True)
    ]
    server = Server(*reqs, drafts=Drafts(wrong={9, 14, 21, 30}))
    server.serve()
    assert not server.pool.fallback_totals()
    return reqs, len(server.metrics.settled)


@pytest.mark.parametrize("case", CASES)
def test_every_text_is_the_targets_own(case):
    reqs, _ = served(case)
    assert [each.output_ids for each in reqs] == [each.answer for each in reqs]


def test_drafts_take_fewer_steps():
    assert served("drafts")[1] < served("plain")[1]
    assert served("device")[1] < served("plain")[1]


def test_twin_rows_that_are_not_discarded_are_seen(monkeypatch):
    """Requests are taken for running in steps that were launched before they ended."""
    monkeypatch.setattr(Launched, "running", lambda self: np.arange(len(self.requests)))
    reqs, _ = served("plain")
    assert [each.output_ids for each in reqs] != [each.answer for each in reqs]


# -- the law: the device has each text


class Fickle(Drafts):
    """Control that decides at random, now early and now when the last outcome is known."""

    name = "adaptive"
    hidden_layers = ()

    def __init__(self, rng):
        super().__init__(wrong={9, 14, 21, 30})
        self.rng = rng

    def decide_early(self, requests, most, feasible):
        kind = self.rng.choice(["wait", "plain", "device", "device"])
        if kind == "wait":
            return None
        return self._of_device(most, feasible) if kind == "device" else Plain()

    def decide(self, requests, budget, feasible):
        kind = self.rng.choice(["plain", "device", "cpu", "cpu"])
        if kind == "cpu":
            budget = replace(budget, max_drafts=self.rng.integers(0, budget.max_drafts + 1))
            proposal = self.propose(requests, budget)
            if len(proposal.parents):
                return CpuDrafts(proposal, ["known"] * len(requests))
        return self._of_device(budget.max_drafts, feasible) if kind == "device" else Plain()

    def _of_device(self, most, feasible):
        if "device" not in feasible.on_device:
            return Plain()
        drafts = self.rng.integers(0, most + 1)
        return DeviceDrafts("device", drafts, max(1, drafts.max() + self.rng.integers(0, 3)))

    def scores_unused(self, on_device):
        return False

    def forget(self, requests):
        pass

    def observe(self, report):
        super().observe(report.outcomes)


KINDS = {
    (Plain, True): "plain",
    (Plain, False): "informed",
    (CpuDrafts, False): "drafts of the CPU",
    (DeviceDrafts, True): "device",
    (DeviceDrafts, False): "informed device",
}


class Mixed(Server):
    """Serves requests that join at any time, by steps of all kinds, and compares texts.

    wrong: how many texts differed on the device: from what the target emits where a step begins,
        and from prompt and output where nothing is in flight
    kinds: of the steps that were launched
    """

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        super().__init__(control=Fickle(rng))
        self.rng, self.wrong, self.kinds = rng, 0, set()
        ends, catch_up = self.texts.ends, self.texts.catch_up

        def compared_ends(requests, decision, index, lens, longest):
            for request, n, most in zip(requests, lens.tolist(), longest.tolist(), strict=True):
                assert n <= most
                self.compare(request, request.req.text[: n + 1])
            return ends(requests, decision, index, lens, longest)

        def compared_catch_up(requests):
            catch_up(requests)
            for request in requests:
                self.compare(request, [*request.prompt, *request.output])

        self.texts.ends, self.texts.catch_up = compared_ends, compared_catch_up

    def compare(self, request, text):
        line = self.texts._lines[request.req.rid].number
        self.wrong += self.texts._tokens[line, : len(text)].tolist() != text

    def serve_mixed(self):
        """Return the requests, served to their ends."""
        asked = [
            req(rid, int(self.rng.integers(1, 40)), drafter=self.rng.choice(["adaptive", "none"]))
            for rid in "abcdef"
        ]
        asked[0].drafter, coming, joining = "adaptive", [*asked], []
        while coming or self.steps or any(not each.has_ended for each in self.reqs):
            if joining:  # their prefill is taken in one step after it was launched
                self.take_prefill(*joining)
            running = [each for each in self.reqs if not each.has_ended]
            joining = []
            if coming and (not running or self.rng.random() < 0.2):
                joining = [coming.pop(0) for _ in range(min(len(coming), self.rng.integers(1, 3)))]
                self.prefill(*joining)
            elif running:
                step = self.launch()
                self.kinds.add(KINDS[type(step.decision), step.early])
            while len(self.steps) > 1 or (self.steps and not self.reqs):
                self.take()
            if not any(not each.has_ended for each in self.reqs):
                while self.steps:
                    self.take()
        return asked


SEEDS = range(25)


def test_the_device_has_each_text_whatever_came_before():
    kinds = set()
    for seed in SEEDS:
        server = Mixed(seed)
        asked = server.serve_mixed()
        assert [each.output_ids for each in asked] == [each.answer for each in asked]
        assert not server.pool.fallback_totals()
        assert server.wrong == 0
        kinds |= server.kinds
    assert kinds == {*KINDS.values()}


def lost_append(self, index, lens, tokens):
    self.last_tokens[index] = tokens


def lost_write(self, texts, write=DeviceTexts._write):
    write(self, [each for each in texts if not each[2]])  # only prompts


def lost_advance(self, rows, emitted, advance=DeviceTexts.advance):
    before = self._tokens.clone()
    found = advance(self, rows, emitted)
    self._tokens.copy_(before)
    return found


@pytest.mark.parametrize(
    ("method", "lost"),
    [("append", lost_append), ("_write", lost_write), ("advance", lost_advance)],
)
def test_twin_tokens_that_are_not_written_are_seen(monkeypatch, method, lost):
    """Those of a plain step, those that the device lacks, or those of a step with its drafts."""
    monkeypatch.setattr(DeviceTexts, method, lost)
    assert any(wrong_texts(seed) for seed in SEEDS)


@pytest.mark.parametrize("dropped", [0, 3, 17])
def test_twin_a_single_token_that_is_not_written_is_seen(monkeypatch, dropped):
    calls, append = iter(range(10**6)), DeviceTexts.append

    def all_but_one(self, *tokens):
        (lost_append if next(calls) == dropped else append)(self, *tokens)

    monkeypatch.setattr(DeviceTexts, "append", all_but_one)
    assert any(wrong_texts(seed) for seed in SEEDS)


def wrong_texts(seed):
    server = Mixed(seed)
    server.serve_mixed()
    return server.wrong


def test_the_reason_of_an_end_is_told():
    server = Server(req(max_tokens=2))
    server.launch()
    assert server.take().outcomes.finish_reasons == [FinishReason.LENGTH]
