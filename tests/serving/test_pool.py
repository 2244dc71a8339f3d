"""The server's drafters: each request with the one it chose, each of them guarded."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from outrider.control.decision import CpuDrafts, DeviceDrafts, Feasible, Plain, Report
from outrider.core import Budget, KeyedCoins, Outcome, Outcomes, Proposal, SamplingParams, chain
from outrider.drafters import GuardedDrafter
from outrider.serving.pool import Pool
from outrider.serving.ranks import Ranks
from outrider.serving.values import ServedRequest

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
        if self.decision is None:
            raise RuntimeError("out of memory")
        return self.decision

    def observe(self, report):
        self.reports.append(report)


def request(number, drafter):
    return ServedRequest(number, (1, 2), SamplingParams(), 0, drafter=drafter, max_drafts=3)


def pool_of(drafters, **others):
    return Pool({name: GuardedDrafter(each, V) for name, each in drafters.items()}, **others)


def budget(*most):
    return Budget(most, "match", KeyedCoins())


def decide(pool, requests, *most):
    return pool.decide(None, requests, budget(*most), Feasible())


def report(requests, decision):
    outcomes = Outcomes.of([Outcome(r, (5,), (0,), 0, 0, None) for r in requests])
    return Report(outcomes, decision, early=False, ended=0.0)


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
    for decision in (DeviceDrafts("device", np.array([2])), Plain()):
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


def test_on_other_ranks_no_drafter_is_called():
    drafter = Constant(7)
    ranks = Ranks(SimpleNamespace(rank_in_group=1, world_size=1))
    pool = pool_of({"a": drafter}, ranks=ranks)
    pool.start([request(0, "a")])
    pool.observe(report([request(0, "a")], Plain()))
    pool.meanwhile()
    pool.stop([request(0, "a")])
    assert drafter.seen == []
