"""Whatever a drafter does wrong costs speed only, and is counted."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from outrider.core import (
    ROOT,
    Budget,
    Draft,
    DraftFault,
    KeyedCoins,
    Outcome,
    PointMass,
    Proposal,
    Request,
    Sampled,
    SamplingParams,
    Siblings,
    chain,
)
from outrider.drafters import GuardedDrafter

V = 10


class Scripted:
    """Does in each step what its script says."""

    name = "scripted"

    def __init__(self, *script):
        self.script = list(script)
        self.calls: list[str] = []
        self.known: set[int] = set()

    def start(self, requests):
        self.calls.append("start")
        self.known |= {r.id for r in requests}

    def propose(self, requests, budget):
        self.calls.append("propose")
        assert {r.id for r in requests} <= self.known
        action = self.script.pop(0) if self.script else "good"
        if callable(action):
            return action()
        return Proposal.of([chain([1]) for _ in requests])

    def observe(self, outcomes):
        self.calls.append("observe")
        assert {o.request.id for o in outcomes} <= self.known

    def stop(self, requests):
        self.calls.append("stop")
        self.known -= {r.id for r in requests}


def requests(count=2):
    return [Request(i, (1,), SamplingParams(), 0) for i in range(count)]


def budget(rule="match", *most):
    return Budget(most or (3, 3), rule, KeyedCoins())


def fail():
    raise RuntimeError("out of memory")


def run(guard, steps, made=None, rule="match"):
    """Return in which of the steps there were drafts."""
    made = made or requests()
    guard.start(made)
    drafted = []
    for _ in range(steps):
        proposal = guard.propose(made, budget(rule))
        drafted.append(sum(proposal.num_drafts) > 0)
        guard.observe([Outcome(r, (1,), (0,), 0, 0, None) for r in made])
    guard.stop(made)
    return drafted


def test_good_drafter_is_let_alone():
    guard = GuardedDrafter(Scripted(), V)
    assert run(guard, 3) == [True] * 3
    assert not guard.fallbacks


def test_exception(caplog):
    drafter = Scripted(fail)
    guard = GuardedDrafter(drafter, V)
    assert run(guard, 4) == [False, False, True, True]
    assert guard.fallbacks == {"error": 2, "resting": 2}
    # after the fault everything is told anew
    assert drafter.calls[:3] == ["start", "propose", "stop"]
    assert drafter.calls[3:5] == ["start", "propose"]
    assert "out of memory" in caplog.text


def test_rests_longer_each_time():
    guard = GuardedDrafter(Scripted(*[fail] * 4), V)
    steps = run(guard, 20)
    assert guard.fallbacks["error"] == 4 * 2
    assert steps.index(True) == 4 + 1 + 2 + 4 + 8


@pytest.mark.parametrize("broken", ["start", "observe", "stop"])
def test_other_calls_may_fail_too(broken):
    drafter = Scripted()
    calls = {"left": 1}
    original = getattr(drafter, broken)

    def once(argument):
        if calls["left"]:
            calls["left"] = 0
            fail()
        original(argument)

    setattr(drafter, broken, once)
    guard = GuardedDrafter(drafter, V)
    assert run(guard, 4).count(True) >= 2
    assert guard.fallbacks["error"] == 2


def test_stop_failing_after_a_fault():
    drafter = Scripted(fail)
    drafter.stop = lambda requests: fail()
    assert run(GuardedDrafter(drafter, V), 4)[-1]


def of(*drafts):
    return lambda: Proposal.of(list(drafts))


Q = torch.full((1, V), 0.1)
GARBAGE = {
    "id too large": of(chain([V]), chain([])),
    "id negative": of(chain([-1]), chain([])),
    "over budget": of(chain([1, 2, 3, 4]), chain([])),
    "for another batch": of(chain([1])),
    "int32": lambda: Proposal(
        torch.tensor([1], dtype=torch.int32), (1, 0), (ROOT,), (PointMass(), PointMass())
    ),
    "parent after child": lambda: Proposal(
        torch.tensor([1]), (1, 0), (3,), (PointMass(), PointMass())
    ),
    "not a proposal": lambda: None,
}
BAD_DISTRIBUTIONS = {
    "q is nan": of(chain([1], Sampled(Q * torch.nan)), chain([])),
    "q does not sum to 1": of(chain([1], Sampled(Q * 2)), chain([])),
    "q of another vocabulary": of(chain([1], Sampled(Q[:, :5] * 2)), chain([])),
    "q cannot have drawn it": of(chain([1], Sampled(torch.eye(V)[2:3])), chain([])),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage(kind):
    guard = GuardedDrafter(Scripted(GARBAGE[kind]), V)
    assert run(guard, 3) == [False, False, True]
    reason = "error" if kind == "not a proposal" else "garbage"
    assert guard.fallbacks == {reason: 2, "resting": 2}


@pytest.mark.parametrize("rule", ["residual", "block"])
@pytest.mark.parametrize("kind", BAD_DISTRIBUTIONS)
def test_impossible_distribution(kind, rule):
    guard = GuardedDrafter(Scripted(BAD_DISTRIBUTIONS[kind]), V)
    assert run(guard, 1, rule=rule) == [False]
    assert guard.fallbacks == {"garbage": 2}
    # `match` does not look at it
    assert run(GuardedDrafter(Scripted(BAD_DISTRIBUTIONS[kind]), V), 1) == [True]


def test_distribution_that_does_not_fit_the_rule():
    tree = Draft((1, 2), (ROOT, ROOT), Siblings(Q.expand(2, V), replacement=False))
    for rule, fits in (("block", False), ("residual", True), ("match", True)):
        guard = GuardedDrafter(Scripted(of(tree, chain([]))), V)
        assert run(guard, 1, rule=rule) == [fits]


def test_nothing_allowed_nothing_asked():
    drafter = Scripted()
    guard = GuardedDrafter(drafter, V)
    guard.start(requests())
    assert guard.propose(requests(), budget("match", 0, 0)).num_drafts.tolist() == [0, 0]
    assert "propose" not in drafter.calls


def test_time_out():
    """A hanging call is left behind; when it returns, the drafter starts afresh."""
    gate = threading.Event()

    def hang():
        gate.wait(10)
        return Proposal.of([chain([1]), chain([1])])

    drafter = Scripted(hang)
    guard = GuardedDrafter(drafter, V, timeout=0.05)
    made = requests()
    guard.start(made)
    started = time.monotonic()
    assert sum(guard.propose(made, budget()).num_drafts) == 0
    for _ in range(5):
        guard.observe([Outcome(r, (1,), (0,), 0, 0, None) for r in made])
        assert sum(guard.propose(made, budget()).num_drafts) == 0
    guard.stop(made[:1])
    assert time.monotonic() - started < 5
    assert guard.fallbacks == {"timeout": 2, "resting": 10}
    gate.set()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if sum(guard.propose(made[1:], budget("match", 3)).num_drafts) > 0:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the drafter did not come back")
    guard.close()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e300, "1"])
def test_time_outs_that_cannot_be_waited_for(timeout):
    with pytest.raises(ValueError, match="time-out must be > 0 seconds"):
        GuardedDrafter(Scripted(), V, timeout=timeout)


@pytest.mark.parametrize("layers", [None, 3, ("a",), (1.0,), ((0,),)])
def test_hidden_layers_are_numbers(layers):
    drafter = Scripted()
    drafter.hidden_layers = layers
    with pytest.raises(TypeError, match="hidden_layers of drafter scripted must be numbers"):
        GuardedDrafter(drafter, V)


def test_a_drafter_may_use_its_arrays_again():
    """What was proposed and checked stays as it is, whatever the drafter's threads do."""
    proposal = Proposal.of([chain([1, 2]), chain([3])])
    guard = GuardedDrafter(Scripted(lambda: proposal), V)
    made = requests()
    guard.start(made)
    found = guard.propose(made, budget())
    proposal.tokens.fill_(V + 5)
    proposal.num_drafts[:], proposal.parents[:] = 9, 9
    assert found.tokens.tolist() == [1, 2, 3]
    assert found.num_drafts.tolist() == [2, 1]
    assert found.parents.tolist() == [ROOT, 0, ROOT]


def test_thread_without_fault():
    guard = GuardedDrafter(Scripted(), V, timeout=5)
    assert run(guard, 3) == [True] * 3
    guard.close()


# -- what a server calls of a drafter beside the protocol


def known(*script, **options):
    """Return a guarded drafter that knows two requests, and them."""
    guard, made = GuardedDrafter(Scripted(*script), V, **options), requests()
    guard.start(made)
    return guard, made


def test_a_call_is_guarded_too():
    calls: list[str] = []
    drafter = Scripted()
    guard, some = GuardedDrafter(drafter, V), requests()
    guard.call(some, lambda: calls.append("called"))
    assert calls == []  # it does not know them yet
    guard.start(some)
    guard.call(some[:1], lambda: calls.append("called"))
    assert calls == ["called"]
    guard.call(some, fail)
    assert guard.fallbacks == {"error": 2}
    guard.call(some, lambda: calls.append("called"))
    assert calls == ["called"], "it rests, and knows nobody"


def test_what_is_asked_is_guarded_too():
    guard, made = known()
    assert guard.ask(made, lambda: 7) == 7
    assert guard.ask(made, fail) is None
    assert guard.fallbacks == {"error": 2}
    assert guard.ask(made, lambda: 7) is None, "it rests"
    assert guard.fallbacks == {"error": 2, "resting": 2}
    drafter = guard._drafter
    assert drafter.known == set()
    assert guard.ask(made, lambda: sorted(drafter.known)) == [0, 1], "after a fault: anew"


def test_new_requests_are_introduced_before_a_question():
    guard, _ = known()
    more = requests(3)
    assert guard.ask(more, lambda: sorted(guard._drafter.known)) == [0, 1, 2]


def test_an_answer_ends_the_growth_of_rests_and_a_fault_does_not():
    guard, made = known()
    rests = []
    for call in (fail, fail, lambda: 7, fail):
        guard.ask(made, call)
        rests.append(guard._rest)
        while guard._rest:
            guard.ask(made, call)
    assert rests == [1, 2, 0, 1]


def test_a_question_that_takes_too_long_is_a_time_out():
    gate = threading.Event()
    guard, made = known(timeout=0.05)
    assert guard.ask(made, lambda: gate.wait(10)) is None
    assert guard.fallbacks == {"timeout": 2}
    guard.call(made, fail)
    guard.pass_on([Outcome(made[0], (1,), (0,), 0, 0, None)], lambda outcomes: fail())
    assert guard.fallbacks == {"timeout": 2}, "nothing is called while a call hangs"
    gate.set()
    guard.close()


def test_what_is_checked_is_a_copy_or_a_fault():
    guard, made = known()
    proposal = Proposal.of([chain([1, 2]), chain([3])])
    found = guard.checked(proposal, budget())
    proposal.tokens.fill_(V + 5)
    assert found.tokens.tolist() == [1, 2, 3]
    with pytest.raises(DraftFault, match="token ids outside"):
        guard.checked(proposal, budget())
    assert guard.ask(made, lambda: guard.checked(proposal, budget())) is None
    assert guard.fallbacks == {"garbage": 2}


def test_what_is_passed_on_is_guarded_and_of_known_requests():
    guard, made = known()
    seen = []
    done = [Outcome(r, (1,), (0,), 0, 0, None) for r in requests(3)]
    guard.pass_on(done, lambda outcomes: seen.append([o.request.id for o in outcomes]))
    assert seen == [[0, 1]], "the third was never introduced"
    guard.stop(made)
    guard.pass_on(done, lambda outcomes: fail())
    assert not guard.fallbacks, "it knows nobody"
    guard.start(made)
    guard.pass_on(done, lambda outcomes: fail())
    assert guard.fallbacks == {"error": 2}


def test_work_that_can_wait_is_guarded():
    drafter = Scripted()
    drafter.meanwhile = lambda: drafter.calls.append("meanwhile")
    guard = GuardedDrafter(drafter, V)
    guard.meanwhile()
    assert drafter.calls == ["meanwhile"]
    drafter.meanwhile = fail
    broken = GuardedDrafter(drafter, V)
    broken.start(requests())
    broken.meanwhile()
    assert broken._rest == 1
    broken.meanwhile()  # not called while it rests
    assert run(broken, 3)[-1], "it goes on later"
    GuardedDrafter(Scripted(), V).meanwhile()  # most have no such work


CALLS = {
    "start": lambda guard, made: guard.start(made),
    "propose": lambda guard, made: guard.propose(made, budget()),
    "ask": lambda guard, made: guard.ask(made, fail),
    "call": lambda guard, made: guard.call(made, fail),
    "call_early": lambda guard, made: guard.call_early(made, fail, None),
    "observe": lambda guard, made: guard.observe(outcomes_of(made)),
    "pass_on": lambda guard, made: guard.pass_on(outcomes_of(made), lambda done: fail()),
    "meanwhile": lambda guard, made: guard.meanwhile(),
    "stop": lambda guard, made: guard.stop(made),
}


def outcomes_of(made):
    return [Outcome(r, (1,), (0,), 0, 0, None) for r in made]


class Failing(Scripted):
    """Fails in every call, once it is told to."""

    fails = False

    def _fail(self, *_):
        if self.fails:
            fail()

    start = observe = stop = _fail

    def propose(self, requests, budget):
        fail()

    def meanwhile(self):
        self._fail()


@pytest.mark.parametrize("timeout", [None, 5])
@pytest.mark.parametrize("name", CALLS)
def test_the_law_every_call_is_guarded(name, timeout, caplog):
    drafter = Failing()
    guard, made = GuardedDrafter(drafter, V, timeout), requests()
    guard.start(made)
    drafter.fails = True
    CALLS[name](guard, made)
    assert "out of memory" in caplog.text
    assert guard._rest == 1
    guard.close()


def test_each_public_call_of_a_drafter_is_among_them():
    methods = {n for n, f in vars(GuardedDrafter).items() if callable(f) and n[0] != "_"}
    assert methods - CALLS.keys() == {"checked", "close"}, "these call no drafter"
