"""Control's values: what goes in and what comes out, and what a report says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from test_device import Device

from outrider.control import AdaptiveDrafter, Control, Limits
from outrider.control.decision import CpuDrafts, DeviceDrafts, Feasible, Plain, Report
from outrider.control.device import NAME, DeviceChoice
from outrider.control.step import Step
from outrider.core import (
    Budget,
    KeyedCoins,
    Outcome,
    Outcomes,
    Proposal,
    Request,
    SamplingParams,
    chain,
)

K, PADDED = 4, 6


class Drafts:
    """Drafts the same for every request."""

    name = "free"

    def start(self, requests):
        pass

    stop = observe = start

    def propose(self, requests, budget):
        return Proposal.of([chain([7] * most) for most in budget.max_drafts])


class Server:
    """Two requests, and control that knows that passes of any size take a second."""

    def __init__(self, drafts=True, **limits):
        self.steps, self.now = [], 0.0
        self.control = Control(
            {"free": Drafts()} if drafts else {},
            clock=lambda: self.now,
            on_step=self.steps.append,
            limits=Limits(**limits),
        )
        for rows in (1, 2, 4, 8, 16):
            self.control.calibrate(rows, 1.0, [])
        sampling = SamplingParams(max_tokens=10**6)
        self.requests = [Request(i, (1, 2, 3), sampling, 0) for i in range(2)]
        self.budget = Budget(np.full(2, K), "match", KeyedCoins(), trees=False)
        self.feasible = Feasible()

    def decide(self):
        return self.control.decide(self.requests, self.budget, self.feasible)

    def report(self, decision, early=False, accepted=None):
        """Report a step that took a second. accepted: drafts of each request; None for all"""
        self.now += 1.0
        counts = np.zeros(2, np.int64)
        if isinstance(decision, CpuDrafts):
            counts = decision.proposal.num_drafts
        elif isinstance(decision, DeviceDrafts):
            counts = decision.num_drafts
        right = counts if accepted is None else accepted
        outcomes = Outcomes.of(
            [
                Outcome(request, (7,) * (n + 1), tuple(range(n + 1)), int(count), int(n), None)
                for request, count, n in zip(self.requests, counts, right, strict=True)
            ]
        )
        self.control.observe(Report(outcomes, decision, early, self.now))
        outcomes.apply()
        self.control.meanwhile()
        return self.steps[-1] if self.steps else None


def state(value):
    """Return all that a part of control remembers, to be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: state(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [state(each) for each in value]
    if type(value).__module__.startswith("outrider.") and hasattr(value, "__dict__"):
        return {type(value).__name__: state(vars(value))}
    return value


def early_answers(right, steps=60, **options):
    """Return the types of all early decisions, and how often one of them changed control."""
    device, types, changes = Device(right, **options), set(), 0
    for _ in range(steps):
        before = state(device.control)
        decisions = [device.control.decide_early(device.requests) for _ in range(3)]
        changes += state(device.control) != before
        types.add(type(decisions[0]))
        assert len({repr(decision) for decision in decisions}) == 1
        device.step()
    return types, changes


def test_deciding_early_changes_nothing():
    types = set()
    for right, options in ((0.8, {}), (0.0, {"row": 0.05}), (0.0, {"head": 0.8, "batch": 4})):
        more, changes = early_answers(right, **options)
        assert changes == 0
        types |= more
    assert types == {Plain, DeviceDrafts, type(None)}


def test_twin_an_early_decision_that_changes_control_is_noticed(monkeypatch):
    drafts = DeviceChoice.drafts

    def changing(self, requests):
        self.goodput += 1.0
        return drafts(self, requests)

    monkeypatch.setattr(DeviceChoice, "drafts", changing)
    assert early_answers(0.8, steps=10)[1] == 10


def test_device_drafts_are_of_the_requests_asked_for():
    device = Device(0.9, batch=2)
    device.run(30)
    both = device.control.decide_early(device.requests)
    other = device.control.decide_early(device.requests[::-1])
    assert both.num_drafts.tolist() == other.num_drafts.tolist()[::-1]
    new = Request(99, (1, 2), SamplingParams(), 0)
    assert device.control.decide_early([new, device.requests[0]]).num_drafts[0] == 0
    assert device.control.decide_early([new]) is None


def test_values_cannot_be_written():
    server = Server()
    decision = server.decide()
    values = [decision, server.feasible, server.control.limits, Plain()]
    values += [server.report(decision), DeviceDrafts(NAME, np.ones(2, np.int64))]
    for value in values:
        for field in dataclasses.fields(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)


def test_drafts_of_the_cpu_come_with_their_drafters():
    server = Server()
    decision = server.decide()
    assert isinstance(decision, CpuDrafts)
    assert decision.names == ["free", "free"]
    assert not decision.padded
    assert server.report(decision).as_dict()["drafters"] == {"free": 2}


def test_a_step_is_what_was_launched_not_what_was_decided():
    server = Server()
    assert isinstance(server.decide(), CpuDrafts)
    step = server.report(Plain())
    assert not step.speculated
    assert step.rows == 2
    assert step.as_dict()["drafters"] == {}


@pytest.mark.parametrize("early", [True, False])
def test_a_step_is_early_if_that_is_reported_and_it_followed_another(early):
    server = Server(drafts=False, launches_early=True)
    server.control.score_unused(server.requests, server.budget, server.feasible)
    assert not server.report(Plain(), early).early  # the first one
    assert not server.control.cost.early.seconds(1)
    server.control.score_unused(server.requests, server.budget, server.feasible)
    assert server.report(Plain(), early).early == early
    assert bool(server.control.cost.early.seconds(1)) == early


@pytest.mark.parametrize("padded", [True, False])
def test_a_padded_pass_is_learned_as_one_if_it_is_reported(padded):
    """Control may want one, and the engine may launch another pass."""
    server = Server(reads_each_row=True)
    server.feasible = Feasible(padded_width=PADDED)
    decision = server.decide()
    step = server.report(replace(decision, padded=padded))
    assert step.padded_width == (PADDED if padded else 0)
    assert server.control.cost.padded.has_seen(2 * PADDED) == padded


def test_a_padded_pass_is_asked_for_where_it_is_faster():
    server = Server(reads_each_row=True)
    for turn in range(200):  # contexts are long, and each row reads one
        context = (1000, 60_000)[turn % 2]
        for rows in (2, 2 + 2 * K):
            server.control.cost.observe(rows, context, 1.0 + 4e-5 * context * rows / 2, 2)
    server.requests = [
        Request(i, (1,) * 30_000, SamplingParams(max_tokens=10**6), 0) for i in range(2)
    ]
    assert not server.decide().padded
    server.feasible = Feasible(padded_width=PADDED)
    assert server.decide().padded


@pytest.mark.parametrize("on_device", [True, False])
def test_drafts_teach_the_device_if_it_made_them(on_device):
    server = Server(drafts=False)
    arm = server.control.device.arms[NAME]
    before = arm.chances.tries(np.array([0.05]))[0]
    drafts = Proposal.of([chain([7] * K)] * 2)
    decision = CpuDrafts(drafts, ["other"] * 2)
    if on_device:
        decision = DeviceDrafts(NAME, drafts.num_drafts)
    server.decide()
    step = server.report(decision, accepted=[2, 2])
    assert step.on_device == (NAME if on_device else "")
    assert step.rows == 2 + 2 * K
    assert (arm.chances.tries(np.array([0.05]))[0] > before) == on_device


def test_a_step_ends_when_that_is_reported():
    """What the engine did since is the next step's."""
    server = Server()
    decision = server.decide()
    outcomes = Outcomes.of([Outcome(r, (7,), (0,), K, 0, None) for r in server.requests])
    server.now = 5.0
    server.control.observe(Report(outcomes, decision, False, ended=2.0))
    server.control.meanwhile()
    assert server.steps[-1].seconds == 2.0
    server.decide()
    step = server.report(Plain())
    assert (step.t, step.cpu_seconds, step.seconds) == (2.0, 3.0, 4.0)


def test_graph_sizes_are_the_row_buckets_unless_others_are_given():
    def bucket(**options):
        return Control({}, limits=Limits(graph_sizes=(8, 16)), **options).cost.verify.row_bucket(9)

    assert bucket() == 16
    assert bucket(row_buckets=[12, 24]) == 12
    assert Control({}).cost.verify.row_bucket(9) == 9


def test_the_drafter_is_control_that_waits():
    server = Server()
    drafter = AdaptiveDrafter(server.control)
    proposal = drafter.propose(server.requests, server.budget)
    assert proposal.num_drafts.tolist() == [K, K]
    assert [drafter.used(request) for request in server.requests] == ["free", "free"]
    drafter.observe([Outcome(r, (7,), (0,), K, 0, None) for r in server.requests])
    drafter.meanwhile()
    assert isinstance(server.steps[-1], Step)
    assert server.steps[-1].names == ["free", "free"]
