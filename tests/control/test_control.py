"""Control's values: what goes in and what comes out, and what a report says."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import replay
from worlds import World

from outrider.control import AdaptiveDrafter, Control, Limits, adaptive_control
from outrider.control.decision import CpuDrafts, DeviceDrafts, Feasible, Plain, Report
from outrider.control.device import NAME
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
    """Drafts the same for every request.

    known: the requests that it was introduced to
    asked: how often it was asked
    """

    name = "free"

    def __init__(self):
        self.known, self.asked = set(), 0

    def start(self, requests):
        self.known |= {request.id for request in requests}

    def stop(self, requests):
        self.known -= {request.id for request in requests}

    def observe(self, outcomes):
        pass

    def propose(self, requests, budget):
        self.asked += 1
        assert self.known >= {request.id for request in requests}
        return Proposal.of([chain([7] * most) for most in budget.max_drafts])


class Server:
    """Two requests, and control that knows that passes of any size take a second."""

    def __init__(self, drafts=True, **limits):
        self.steps, self.now, self.drafts = [], 0.0, Drafts()
        self.control = Control(
            {"free": self.drafts} if drafts else {},
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

    def decide_early(self):
        return self.control.decide_early(self.requests, self.budget.max_drafts, self.feasible)

    def report(self, decision, early=False, accepted=None, seconds=1.0, made=None):
        """Report a step. accepted: drafts of each request; None for all"""
        self.now += seconds
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
        self.control.observe(Report(outcomes, decision, early, self.now, made))
        outcomes.apply()
        self.control.meanwhile()
        return self.steps[-1] if self.steps else None


def test_device_drafts_are_of_the_requests_asked_for():
    world = World(np.array([0.95, 0.0]), batch=2, row=0.05, objective="throughput")
    world.run(60)

    def drafts(requests):
        most = np.full(len(requests), K)
        return world.control.decide_early(requests, most, world.feasible).num_drafts.tolist()

    while not drafts(world.requests)[0]:  # its last draft may have been wrong by chance
        world.step()
    both = drafts(world.requests)
    assert both[0] > both[1]
    assert drafts(world.requests[::-1]) == both[::-1]
    assert drafts(world.requests[:1]) == both[:1]
    # nothing is known of a new request: it gets some, but not as many
    new = Request(99, (1, 2), SamplingParams(), 0)
    assert 0 <= drafts([world.requests[0], new])[1] < both[0]


def test_values_cannot_be_written():
    server = Server()
    decision = server.decide()
    values = [decision, server.feasible, server.control.limits, Plain()]
    values += [server.report(decision), DeviceDrafts(NAME, np.ones(2, np.int64), 1)]
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
    server.report(Plain(), early, seconds=2.0)
    assert not any(step.early for step in server.steps)  # the first one
    assert server.control.cost.early.seconds(2) == pytest.approx(1.0)
    server.control.score_unused(server.requests, server.budget, server.feasible)
    assert server.report(Plain(), early, seconds=2.0).early == early
    # the times of more rows are assumed ones, which weigh little
    assert server.control.cost.early.seconds(2) == pytest.approx(2.0 if early else 1.0, rel=0.15)


@pytest.mark.parametrize("early", [True, False])
def test_a_step_that_follows_a_prefill_is_not_timed(early):
    """The prompts of new requests were read before it. Else they are taken for the step's time."""

    def times(new):
        server = Server(drafts=False, launches_early=True)
        for number in range(6):
            server.control.start(new if number == 5 else [])
            if not early:
                server.decide()
            server.report(Plain(), early, seconds=10.0 if number == 5 else 1.0)
        cost = server.control.cost
        return (cost.early if early else cost.verify).seconds(2)

    new = Request(9, (1, 2), SamplingParams(), 0)
    assert times([new]) == pytest.approx(1.0, rel=0.05)
    assert times([]) > times([new])  # the twin: nobody entered


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
    arm, rows = server.control.device.arms[NAME], server.control.acceptance.rows([0, 1])
    before = arm.survival(rows, server.budget.max_drafts)
    drafts = Proposal.of([chain([7] * K)] * 2)
    decision, made = CpuDrafts(drafts, ["other"] * 2), None
    if on_device:
        decision, made = DeviceDrafts(NAME, drafts.num_drafts, K), np.full((2, K), 7)
    server.decide()
    step = server.report(decision, accepted=[2, 2], made=made)
    assert step.on_device == (NAME if on_device else "")
    assert step.rows == 2 + 2 * K
    assert (arm.survival(rows, server.budget.max_drafts) != before).any() == on_device


def test_drafts_that_were_made_and_not_verified_teach_the_device_too():
    """The first of them is compared with what was emitted."""
    found = []
    for token in (7, 8):  # what follows is 7
        server = Server(drafts=False)
        decision = DeviceDrafts(NAME, np.zeros(2, np.int64), K)
        step = server.report(decision, early=True, made=np.full((2, K), token))
        assert step is None or not step.on_device
        arm, rows = server.control.device.arms[NAME], server.control.acceptance.rows([0, 1])
        found.append(arm.survival(rows, server.budget.max_drafts)[:, 0])
    assert (found[0] > found[1] + 0.1).all()


# -- early decisions


def test_nothing_is_decided_early_before_anything_is_known():
    server = Server(launches_early=True)
    assert server.decide_early() is None
    server.feasible = Feasible(frozenset([NAME]))
    assert isinstance(server.decide_early(), DeviceDrafts)


def test_an_engine_whose_device_cannot_draft_launches_plain_steps_early_while_control_sleeps():
    server = Server(drafts=False, launches_early=True)
    assert isinstance(server.decide(), Plain)
    assert isinstance(server.decide_early(), Plain)
    never = Server(drafts=False)  # it launches nothing early
    assert isinstance(never.decide(), Plain)
    assert never.decide_early() is None


def test_lookups_are_not_asked_where_the_device_can_look_up():
    server = Server(launches_early=True)
    server.feasible = Feasible(frozenset([NAME]))
    assert isinstance(server.decide(), DeviceDrafts)
    assert server.drafts.asked == 0
    server.feasible = Feasible()
    assert isinstance(server.decide(), CpuDrafts)
    assert server.drafts.asked == 1


def test_lookups_index_a_text_when_they_are_asked():
    server = Server()
    server.control.start(server.requests)
    assert not server.drafts.known
    server.report(server.decide())
    assert server.drafts.known == {0, 1}
    # a step with a request that they do not know: they are not in use, and would fall behind
    server.requests.append(Request(2, (1, 2), SamplingParams(), 0))
    outcomes = [Outcome(request, (7,), (0,), 0, 0, None) for request in server.requests]
    server.control.observe(Report(Outcomes.of(outcomes), Plain(), True, server.now))
    assert not server.drafts.known
    server.budget = Budget(np.full(3, K), "match", KeyedCoins(), trees=False)
    server.decide()
    assert server.drafts.known == {0, 1, 2}
    server.control.stop(server.requests[:1])
    assert server.drafts.known == {1, 2}


def test_drafts_are_scored_that_the_device_does_not_make():
    """Its lookups are compared with what is emitted, whoever made a step's drafts."""
    alone, world = World(0.5), World(0.5, model=0.5)
    assert not alone.control.scores_unused(NAME)
    assert alone.control.scores_unused("")
    assert world.control.scores_unused(NAME)
    waking = World(0.0, model=0.95)
    while waking.step()[1]:
        pass
    assert not waking.control.scores_unused("")  # they are used


KINDS = [("edit", 1), ("json", 4), ("prose", 4), ("mixed", 16)]


def played(kind, batch, make):
    """Return which steps were early, on recorded texts, in an engine whose device can draft."""

    class Noted(replay.OnDevice):
        def propose(self, control, budget):
            proposal = super().propose(control, budget)
            early.append(self.early)
            return proposal

    early = []
    theatre = Noted(replay.traces_of(kind, batch), batch)
    theatre.play(make(theatre))
    return early


def lookups_only(theatre):
    control = adaptive_control(clock=theatre.clock, limits=Limits(launches_early=True))
    replay.calibrate(control, theatre)
    return control


@pytest.mark.parametrize(("kind", "batch"), KINDS)
def test_no_step_waits_where_only_the_device_drafts(kind, batch):
    early = played(kind, batch, lookups_only)
    assert len(early) > 60
    assert all(early)


def test_twin_steps_with_drafts_of_a_model_wait():
    early = played("json", 1, replay.adaptive)
    assert 0 < sum(early) < len(early)


def test_a_model_that_is_worth_its_wait_is_waited_for_as_long_as_it_is():
    world = World(lookups=0.0, model=0.95)
    # the best: drafts as deep as the model makes them, in each step
    best = sum(0.95**depth for depth in range(5)) / (1.0 + 0.3 + 4 * 0.05 + 4 * 0.004)
    assert best > 2.5
    world.run(40)
    widths, early, speed = world.run(200)
    assert early < 0.05
    assert widths.mean() > 3.5
    assert speed > 0.95 * best
    world.model.right = 0.0
    world.run(100)
    asked, looked_up = world.model.asked, world.lookup.asked
    _, early, speed = world.run(400)
    assert world.lookup.asked - looked_up < 20  # the CPU need not look up either
    assert early > 0.95
    assert speed > 0.97
    assert world.model.asked - asked < 20
    world.model.right = 0.95  # it is found again
    world.run(400)
    assert world.run(200)[2] > 0.95 * best


def test_a_model_that_is_worth_its_passes_but_not_its_wait_is_left_alone():
    """1.6 tokens in 1.75 seconds; without the wait it would be 1.6 in 1.2."""
    world = World(lookups=0.0, model=0.4, wait=0.6)
    world.run(100)
    _, early, speed = world.run(400)
    assert early > 0.95
    assert speed > 0.97


def test_a_model_that_the_device_beats_is_left_alone():
    """It would pay without lookups, and is right more often; but lookups need not wait.

    While the model drafts, the CPU's lookups say what the device would find.
    """
    world = World(lookups=0.85, model=0.9)
    world.run(100)
    widths, early, speed = world.run(300)
    assert early > 0.95
    assert widths.mean() > 4
    assert speed > 4.0
    assert World(lookups=0.0, model=0.9).run(300)[2] < 3.0


# -- what control aims at


def test_users_are_not_slowed_down_and_throughput_is_maximized():
    """Two of four requests gain from drafts, and a row takes a twentieth of a step."""
    right, times, speeds = np.array([0.9, 0.9, 0.0, 0.0]), {}, {}
    for objective in ("users", "throughput"):
        world = World(right, batch=4, row=0.05, objective=objective)
        world.run(100)
        began = world.now, [len(request.output) for request in world.requests]
        speeds[objective] = world.run(300)[2]
        gained = [len(r.output) - n for r, n in zip(world.requests, began[1], strict=True)]
        times[objective] = (world.now - began[0]) / min(gained)  # seconds a token of the slowest
    assert times["users"] < 1.04
    assert times["throughput"] > 1.2
    assert speeds["throughput"] > 1.3 * speeds["users"]


def test_users_may_be_slowed_down_by_a_share():
    right, speeds = np.array([0.9, 0.9, 0.0, 0.0]), []
    for slowdown in (0.0, 0.2, 0.5):
        world = World(right, batch=4, row=0.05, slowdown=slowdown)
        world.run(100)
        speeds.append(world.run(300)[2])
    assert speeds[0] < 1.02 * 4
    assert speeds[0] < 0.95 * speeds[1]
    assert speeds[1] < 0.98 * speeds[2]


@pytest.mark.parametrize("objective", ["", "user", "THROUGHPUT", None, 1])
def test_other_objectives_are_refused(objective):
    with pytest.raises(ValueError, match="objective must be one of"):
        Control({}, objective=objective)


@pytest.mark.parametrize("slowdown", [-0.01, 1.5, math.nan, "0.1", None, True])
def test_a_slowdown_is_a_share(slowdown):
    with pytest.raises(ValueError, match="slowdown"):
        Control({}, slowdown=slowdown)


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
