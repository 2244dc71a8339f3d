"""The server's drafters: each request with the one it chose, each of them guarded."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.control import AdaptiveDrafter, adaptive_control
from outrider.control.decision import CpuDrafts, DeviceDrafts, Feasible, Plain, Report
from outrider.core import Budget, KeyedCoins, Outcome, Outcomes, Proposal, SamplingParams, chain
from outrider.drafters import GuardedDrafter, NoDrafter
from outrider.serving.pool import Pool
from outrider.serving.ranks import Ranks
from outrider.serving.values import Columns, ServedRequest

V = 10


class Constant:
    """Drafts one token over and over, and remembers which requests came."""

    def __init__(self, token):
        self.name = str(token)
        self.token, self.seen = token, []

    def start(self, requests):
        self.seen.append(("start", [r.id for r in requests]))

    def propose(self, requests, budget):
        return Proposal.of([chain([self.token] * k) for k in budget.max_drafts])

    def observe(self, outcomes):
        self.seen.append(("observe", [o.request.id for o in outcomes]))

    def stop(self, requests):
        self.seen.append(("stop", [r.id for r in requests]))


class Control(Constant):
    """Control that decides what it is told to."""

    def __init__(self, decision=None):
        super().__init__(1)
        self.decision, self.reports = decision, []

    def decide(self, requests, budget, feasible):
        self.feasible = feasible
        if self.decision is None:
            raise RuntimeError("out of memory")
        return self.decision

    def decide_early(self, requests, most, feasible):
        self.asked = [r.id for r in requests], most.tolist()
        if self.decision is None:
            raise RuntimeError("out of memory")
        return self.decision

    def scores_unused(self, on_device):
        return not on_device

    def forget(self, requests):
        self.seen.append(("forget", [r.id for r in requests]))

    def observe(self, report):
        self.reports.append(report)


def request(number, drafter):
    most = 0 if drafter == "none" else 3
    return ServedRequest(number, (1, 2), SamplingParams(), 0, drafter=drafter, max_drafts=most)


def pool_of(drafters, **others):
    return Pool({name: GuardedDrafter(each, V) for name, each in drafters.items()}, **others)


def budget(*most):
    return Budget(most, "match", KeyedCoins())


def decide(pool, requests, *most):
    return pool.decide(None, requests, budget(*most), Feasible())


def report(requests, decision, made=None):
    outcomes = Outcomes.of([Outcome(r, (5,), (0,), 0, 0, None) for r in requests])
    return Report(outcomes, decision, early=False, ended=0.0, made=made)


def on_device(*num_drafts, width=3):
    return DeviceDrafts("device", np.array(num_drafts), width)


def test_requests_go_to_their_drafters():
    drafters = {"a": Constant(7), "b": Constant(8)}
    pool = pool_of(drafters)
    requests = [request(i, "ab"[i % 2]) for i in range(3)]
    pool.start(requests)
    decision = decide(pool, requests, 1, 2, 3)
    assert isinstance(decision, CpuDrafts)
    paths = decision.proposal.paths()
    assert paths == ((), (7,), (), (8,), (8, 8), (), (7,), (7, 7), (7, 7, 7))
    assert decision.names == ["a", "b", "a"]
    pool.observe(report(requests, decision))
    pool.stop(requests)
    assert drafters["a"].seen == [("start", [0, 2]), ("observe", [0, 2]), ("stop", [0, 2])]
    assert drafters["b"].seen == [("start", [1]), ("observe", [1]), ("stop", [1])]
    pool.start(requests[:1])
    assert decide(pool, requests[:1], 1).proposal.num_drafts.tolist() == [1]


def test_a_fault_costs_the_requests_of_its_drafter_only():
    broken = Constant(7)
    broken.propose = lambda requests, budget: 1 / 0
    pool = pool_of({"a": broken, "b": Constant(8)})
    requests = [request(i, "ab"[i % 2]) for i in range(3)]
    pool.start(requests)
    assert decide(pool, requests, 1, 2, 3).proposal.num_drafts.tolist() == [0, 2, 0]
    assert pool.fallback_totals() == {"error": 2}


def test_without_a_budget_nothing_is_asked():
    drafter = Constant(7)
    pool = pool_of({"a": drafter})
    assert decide(pool, [request(0, "a")], 0) == Plain()
    assert drafter.seen == []


@pytest.mark.parametrize(
    ("decision", "counted"),
    [
        (None, {"error": 2}),
        (CpuDrafts(Proposal.of([chain([V]), chain([])]), ["x", ""]), {"garbage": 2}),
        (CpuDrafts(Proposal.of([chain([1] * 4), chain([])]), ["x", ""]), {"garbage": 2}),
    ],
    ids=["a fault", "a token beyond the vocabulary", "more than may be"],
)
def test_a_fault_of_control_makes_the_step_a_plain_one(decision, counted):
    control = Control(decision)
    pool = pool_of({"adaptive": control}, control=control)
    requests = [request(0, "adaptive"), request(1, "adaptive")]
    pool.start(requests)
    assert decide(pool, requests, 3, 3) == Plain()
    assert pool.fallback_totals() == counted


def test_what_control_decides_is_done():
    for decision in (on_device(2), Plain()):
        control = Control(decision)
        pool = pool_of({"adaptive": control}, control=control)
        pool.start([request(0, "adaptive")])
        assert decide(pool, [request(0, "adaptive")], 3) is decision


def test_control_learns_of_its_own_requests_only():
    control = Control(Plain())
    pool = pool_of({"adaptive": control, "b": Constant(8)}, control=control)
    requests = [request(0, "adaptive"), request(1, "b")]
    pool.start(requests)
    pool.observe(report(requests, Plain()))
    pool.observe(found := report(requests[:1], Plain()))
    own, all_own = control.reports
    assert [outcome.request.id for outcome in own.outcomes] == [0]
    assert all_own is found


def beside_others(decision):
    """Return a pool with control, and requests of which every other one has no drafts."""
    control = Control(decision)
    pool = pool_of({"adaptive": control, "none": NoDrafter()}, control=control)
    requests = [request(i, ("none", "adaptive")[i % 2]) for i in range(4)]
    pool.start(requests)
    return pool, control, requests


def test_drafts_of_the_device_go_to_the_requests_that_may_have_them():
    """The step has a row for each of the others too."""
    pool, control, requests = beside_others(on_device(2, 1))
    feasible = Feasible(frozenset(["device"]), max_rows=9)
    decision = pool.decide(None, requests, budget(0, 3, 0, 3), feasible)
    assert (decision.drafter, decision.width) == ("device", 3)
    assert decision.num_drafts.tolist() == [0, 2, 0, 1]
    assert control.feasible.max_rows == 7
    assert not pool.fallback_totals()


def test_early_decisions_are_for_the_whole_batch():
    pool, control, requests = beside_others(on_device(0, 2, 0, 1))
    feasible = Feasible(frozenset(["device"]))
    found = pool.decide_early(requests, Columns.of(requests), feasible)
    assert found is control.decision
    assert control.asked == ([0, 1, 2, 3], [0, 3, 0, 3])
    plain = requests[::2]
    assert pool.decide_early(plain, Columns.of(plain), feasible) == Plain()


def test_a_fault_in_an_early_decision_makes_the_step_a_plain_one():
    pool, control, requests = beside_others(None)
    columns, feasible = Columns.of(requests), Feasible(frozenset(["device"]))
    assert pool.decide_early(requests, columns, feasible) == Plain()
    assert pool.fallback_totals() == {"error": 4}
    control.decision = on_device(0, 2, 0, 1)
    assert pool.decide_early(requests, columns, feasible) == Plain(), "it rests"
    assert pool.decide_early(requests, columns, feasible) is control.decision


def test_after_a_fault_control_is_told_of_its_requests_though_no_step_waits():
    pool, control, requests = beside_others(on_device(0, 2, 0, 1))
    columns, feasible = Columns.of(requests), Feasible(frozenset(["device"]))
    new = request(5, "adaptive")

    def decide():
        return pool.decide_early(requests, columns, feasible)

    control.observe = lambda report: 1 / 0
    pool.observe(report(requests, Plain()))
    del control.observe
    pool.observe(report(requests, Plain()))
    assert control.reports == [], "it does not know them"
    pool.start([new])  # while it rests
    requests.append(new)
    columns = Columns.of(requests)
    control.seen.clear()
    assert decide() is control.decision
    assert control.seen == [("start", [1, 3, 5])]
    assert decide() is control.decision
    assert control.seen == [("start", [1, 3, 5])], "once"
    pool.observe(report(requests, Plain()))
    assert [outcome.request.id for outcome in control.reports[0].outcomes] == [1, 3, 5]


def test_requests_whose_first_token_is_not_known_are_not_introduced_by_an_early_decision():
    pool, control, requests = beside_others(on_device(0, 2, 0, 1, 0))
    control.seen.clear()
    joined = [*requests, request(5, "adaptive")]
    pool.decide_early(joined, Columns.of(joined), Feasible(frozenset(["device"])))
    assert control.seen == []
    pool.start(joined[-1:])
    assert control.seen == [("start", [5])]


def test_control_forgets_requests_that_it_decided_for_and_was_not_told_of():
    pool, control, requests = beside_others(Plain())
    pool.stop(requests[:2])
    assert control.seen == [("start", [1, 3]), ("stop", [1]), ("forget", [0, 1])]


def test_rows_of_all_requests_are_free_again_when_they_have_ended():
    control = adaptive_control()
    drafters = {"adaptive": AdaptiveDrafter(control), "none": NoDrafter()}
    pool = pool_of(drafters, control=control)
    for first in range(0, 40, 4):
        requests = [request(first + i, ("none", "adaptive")[i % 2]) for i in range(4)]
        pool.start(requests)
        pool.decide_early(requests, Columns.of(requests), Feasible(frozenset(["device"])))
        pool.stop(requests)
    (row,) = control.acceptance.rows([99])
    assert row < 4


@pytest.mark.parametrize("most", [[3, 3], [3, 1], [0, 0]])
def test_a_drafter_of_the_device_makes_as_many_in_every_step(most):
    pool = pool_of({"device": Constant(7)}, depths={"device": 2})
    requests = [request(0, "device"), request(1, "device")]
    columns = replace(Columns.of(requests), max_drafts=np.array(most))
    found = pool.fixed_on_device(columns, 64)
    assert found.num_drafts.tolist() == [min(2, n) for n in most]
    assert found.width == max(1, *found.num_drafts), "some are made, though none is verified"
    assert pool.fixed_on_device(columns, 2).num_drafts.tolist() == [0, 0]


def test_unused_drafts_are_scored_if_control_wants_them():
    pool, _, _ = beside_others(Plain())
    assert pool.scores_unused("")
    assert not pool.scores_unused("device")
    assert not pool_of({"a": Constant(7)}).scores_unused("")


def test_control_gets_the_drafts_of_its_own_requests():
    pool, control, requests = beside_others(Plain())
    made = np.arange(12).reshape(4, 3)
    pool.observe(report(requests, on_device(0, 2, 0, 1), made))
    pool.observe(report(requests[1::2], on_device(2, 1), made[1::2]))
    pool.observe(report(requests, Plain()))
    assert [r if r is None else r.made.tolist() for r in control.reports[:2]] == [
        [[3, 4, 5], [9, 10, 11]]
    ] * 2
    assert [o.request.id for o in control.reports[0].outcomes] == [1, 3]
    assert control.reports[2].made is None


def test_twin_drafts_of_others_are_seen():
    pool, control, requests = beside_others(Plain())
    pool.observe(report([requests[3], *requests[:3]], Plain(), np.arange(12).reshape(4, 3)))
    assert control.reports[0].made.tolist() != [[3, 4, 5], [9, 10, 11]]


def test_on_other_ranks_no_drafter_is_called():
    drafter = Constant(7)
    ranks = Ranks(SimpleNamespace(rank_in_group=1, world_size=1))
    pool = pool_of({"a": drafter}, ranks=ranks)
    pool.start([request(0, "a")])
    pool.observe(report([request(0, "a")], Plain()))
    pool.meanwhile()
    pool.stop([request(0, "a")])
    assert drafter.seen == []
