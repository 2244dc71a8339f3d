"""The adaptive drafter in a made-up world whose best plan is known.

A world is a text that every request will emit, drafters that are right with known chances, and
times of passes. Time is counted, not measured, with noise.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.control import AdaptiveDrafter, Control, Limits, adaptive_control
from outrider.control.decision import Feasible, Plain, Report
from outrider.control.device import NAME
from outrider.control.model_choice import FREE_SHARE, MAX_CREDIT, MAX_DEBT, Account
from outrider.control.step import Passes, Step
from outrider.core import Budget, KeyedCoins, Outcome, Outcomes, Proposal, chain
from outrider.drafters import AheadDrafter

K = 6


class Guesser:
    """Drafts the coming text, each token right with a chance that may change."""

    def __init__(self, name, chance, seed=0, known=True, passes=None):
        self.name, self.chance, self.known = name, chance, known
        self.rng, self.asked = random.Random(seed), 0
        self.passes = passes or (lambda count: None)  # lets time go by

    def start(self, requests):
        pass

    stop = observe = start

    def unread(self, request):
        return 1

    def ready(self, request):
        return True

    def propose(self, requests, budget):
        self.asked += 1
        # a pass that must promise almost a draft for each request is not followed by another
        users = sum(most > 0 for most in budget.max_drafts)
        deepest = 1 if budget.min_gain > 0.9 * users else K
        self.passes(min(deepest, max(budget.max_drafts)))
        drafts = []
        for request, allowed in zip(requests, budget.max_drafts, strict=True):
            most = min(deepest, allowed)
            right = [self.rng.random() < self.chance for _ in range(most)]
            tokens = [request.text(i) if yes else -1 for i, yes in enumerate(right)]
            drafts.append(chain(tokens, confidences=[0.8] * most if self.known else ()))
        return Proposal.of(drafts)


class World:
    def __init__(self, batch=1, verify=lambda rows: 0.1, draft=0.02, seed=1):
        self.requests = [
            SimpleNamespace(id=r, length=100, text=lambda i, r=r: self.emitted[r] + i)
            for r in range(batch)
        ]
        self.emitted = [0] * batch
        self.verify, self.draft, self.rng = verify, draft, random.Random(seed)
        self.seconds, self.drafts, self.trees = 0.0, [], False

    def noise(self):
        return self.rng.lognormvariate(0, 0.05)

    def clock(self):
        return self.seconds

    def draft_passes(self, count):
        self.seconds += count * self.draft * self.noise()

    def propose(self, drafter, budget):
        return drafter.propose(self.requests, budget)

    def observe(self, drafter, outcomes):
        drafter.observe(outcomes)

    def step(self, drafter):
        budget = Budget((K,) * len(self.requests), "match", KeyedCoins(), self.trees)
        proposal = self.propose(drafter, budget)
        self.seconds += self.verify(proposal.num_rows) * self.noise()
        outcomes = []
        for request, draft in zip(self.requests, proposal.drafts(), strict=True):
            rows = [0]  # a node's row is one behind it
            for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
                if parent + 1 == rows[-1] and token == request.text(len(rows) - 1):
                    rows.append(node + 1)
            new = tuple(request.text(i) for i in range(len(rows)))
            outcomes.append(
                Outcome(request, new, tuple(rows), len(draft.tokens), len(rows) - 1, None)
            )
        self.observe(drafter, outcomes)
        for r, outcome in enumerate(outcomes):
            self.emitted[r] += len(outcome.tokens)
        self.drafts.append(tuple(proposal.num_drafts.tolist()))

    def run(self, drafter, steps):
        """Return tokens a second over these steps."""
        tokens, seconds = sum(self.emitted), self.seconds
        for _ in range(steps):
            self.step(drafter)
        return (sum(self.emitted) - tokens) / (self.seconds - seconds)


def adaptive(free, models=(), **options):
    """Return control as a drafter."""
    return AdaptiveDrafter(Control(free, models, **options))


class Fixed:
    """Always so many drafts of one drafter."""

    def __init__(self, drafter, count):
        self.drafter, self.count = drafter, count

    def propose(self, requests, budget):
        drafts = self.drafter.propose(requests, budget).drafts()
        return Proposal.of([draft.keep(range(self.count)) for draft in drafts])

    def observe(self, outcomes):
        pass


def stairs(rows):
    return 0.1 * (1 + 0.5 * ((rows - 1) // 8))


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("verify", [lambda rows: 0.1, stairs, lambda rows: 0.02 * rows])
def test_as_good_as_the_best_fixed_number_of_drafts(chance, batch, verify):
    """And so never much slower than plain decoding, which is one of them."""
    fixed = [World(batch, verify).run(Fixed(Guesser("free", chance), k), 400) for k in range(K + 1)]
    world = World(batch, verify)
    drafter = adaptive({"free": Guesser("free", chance)}, clock=world.clock)
    world.run(drafter, 60)
    assert world.run(drafter, 400) >= 0.95 * max(fixed)


def test_requests_are_served_by_who_serves_them_best():
    """Two free drafters, each right about one half of the requests."""
    good, bad = Guesser("a", 0.9), Guesser("b", 0.9, seed=1)

    class Half(Guesser):
        def __init__(self, name, mine):
            super().__init__(name, 0.0)
            self.mine = mine

        def propose(self, requests, budget):
            drafts = []
            for r, most in zip(requests, budget.max_drafts, strict=True):
                hit = 0.9 if r.id % 2 == self.mine else 0.1
                right = [self.rng.random() < hit for _ in range(most)]
                tokens = [r.text(i) if yes else -1 for i, yes in enumerate(right)]
                drafts.append(chain(tokens, confidences=[0.5] * most))
            return Proposal.of(drafts)

    world = World(4, stairs)
    drafter = adaptive({"a": Half("a", 0), "b": Half("b", 1)}, clock=world.clock)
    world.run(drafter, 60)
    assert [drafter.used(r) for r in world.requests] == ["a", "b", "a", "b"]
    assert good.asked == bad.asked == 0


def test_a_change_of_text_is_followed():
    """Prose, then a long copy: how many steps until the drafts are long again."""
    free = Guesser("free", 0.05)
    world = World(1, lambda rows: 0.02 * (4 + rows))
    drafter = adaptive({"free": free}, clock=world.clock)
    world.run(drafter, 100)
    assert sum(d[0] for d in world.drafts[-20:]) <= 20
    free.chance = 0.97
    world.run(drafter, 30)
    assert world.drafts[-1][0] >= 4


def test_unknown_batch_sizes_start_plain():
    world = World(3)
    drafter = adaptive({"free": Guesser("free", 0.9)}, clock=world.clock)
    world.run(drafter, 2)
    assert world.drafts[0] == (0, 0, 0)
    assert sum(world.drafts[1]) > 0


def test_a_drafter_without_confidence_is_calibrated_too():
    world = World(1, lambda rows: 0.05 * (4 + rows))
    drafter = adaptive({"free": Guesser("free", 0.1, known=False)}, clock=world.clock)
    world.run(drafter, 100)
    assert sum(d[0] for d in world.drafts[-20:]) <= 20


def test_requests_that_end_are_forgotten():
    world = World(2)
    model = Guesser("model", 0.5, passes=world.draft_passes)
    drafter = adaptive({"free": Guesser("free", 0.9)}, [model], clock=world.clock)
    drafter.start(world.requests)
    world.run(drafter, 5)
    assert drafter.control.models["model"]._idle
    drafter.stop(world.requests)
    assert not drafter.control.models["model"]._idle
    assert not drafter.control.acceptance._rows


@pytest.mark.parametrize(("pass_seconds", "wanted"), [(0.01, True), (0.2, False)])
def test_a_model_drafts_where_it_is_worth_its_passes(pass_seconds, wanted):
    world = World(1, lambda rows: 0.1, pass_seconds)
    model = Guesser("model", 0.85, passes=world.draft_passes)
    drafter = adaptive({"free": Guesser("free", 0.1)}, [model], clock=world.clock)
    world.run(drafter, 100)
    asked = model.asked
    world.run(drafter, 256)
    share = (model.asked - asked) / 256
    assert share > 0.9 if wanted else share < 0.05  # tried again now and then
    plain = 1 / 0.1
    assert world.run(drafter, 256) > (2 * plain if wanted else 0.97 * plain)


def test_a_model_that_has_become_good_is_found_again():
    """It rests while it is bad; its optimistic estimate grows until it is tried again."""
    world = World(2, lambda rows: 0.1, 0.02)
    model = Guesser("model", 0.1, passes=world.draft_passes)
    drafter = adaptive({"free": Guesser("free", 0.05)}, [model], clock=world.clock)
    world.run(drafter, 100)
    asked = model.asked
    world.run(drafter, 200)
    assert model.asked - asked <= 10
    model.chance = 0.95
    world.run(drafter, 200)
    assert world.run(drafter, 50) > 2 * 2 / 0.1


class Behind(Guesser):
    """Has to read three chunks of the second request before it drafts for it."""

    def __init__(self, *args, chunks=3, **options):
        super().__init__(*args, **options)
        self.chunks, self.asked_for, self.queued = chunks, set(), 0.0

    def unread(self, request):
        return 1500 if not self.ready(request) else 1

    def ready(self, request):
        return request.id != 1 or self.chunks == 0

    def catch_up(self, requests):
        assert [request.id for request in requests] in ([], [1])
        self.chunks -= len(requests)
        self.queued += 0.05 * len(requests)
        return 512 * len(requests)

    def propose(self, requests, budget):
        asked = {r.id for r, k in zip(requests, budget.max_drafts, strict=True) if k}
        assert all(self.ready(r) for r in requests if r.id in asked)
        self.asked_for |= asked
        return super().propose(requests, budget)


@pytest.mark.parametrize(("chance", "chunks"), [(0.9, 0), (0.0, 3)])
def test_a_model_catches_up_where_it_would_be_worth_it(chance, chunks):
    """It does not draft before; nobody reads for a request that others serve better."""
    world = World(2, lambda rows: 0.1, 0.01 if chance else 0.2)
    model = Behind("model", chance, passes=world.draft_passes)
    drafter = adaptive({"free": Guesser("free", 0.1)}, [model], clock=world.clock)
    drafter.control.models["model"].cost.passes.observe(2, world.draft)
    world.run(drafter, 40)
    assert model.chunks == chunks
    assert (1 in model.asked_for) == (chunks == 0)


def test_the_time_of_catching_up_is_not_taken_for_that_of_other_passes():
    """On a GPU nobody waits for it but the next pass of the target, which then looks slow."""

    def verify(rows):
        waiting, model.queued = model.queued, 0.0
        return 0.1 + waiting

    world = World(2, verify, 0.01)
    model = Behind("model", 0.9, passes=world.draft_passes, chunks=10)
    drafter = adaptive({"free": Guesser("free", 0.6)}, [model], clock=world.clock)
    drafter.control.models["model"].cost.passes.observe(2, world.draft)
    world.run(drafter, 40)
    assert model.chunks == 0
    assert drafter.control.cost.verify.seconds(2) < 0.12
    assert drafter.control.cost.verify.seconds(8) < 0.12
    assert drafter.control.slowdown_guard.trips == 0


def test_plain_decoding_is_measured_again_where_little_is_won():
    """The machine was slow when it last decoded plainly; now drafts that win little lose."""
    slow = {"on": True}
    world = World(4, lambda rows: 0.1 if rows > 4 or slow["on"] else 0.05)
    drafter = adaptive({"free": Guesser("free", 0.12)}, clock=world.clock)
    world.run(drafter, 60)
    assert sum(sum(d) > 0 for d in world.drafts[-30:]) >= 25  # rows are free, so drafts pay
    slow["on"] = False
    world.run(drafter, 100)
    assert sum(sum(d) > 0 for d in world.drafts[-30:]) <= 6


def test_what_drafters_say_is_joined_into_a_tree():
    """Each is right about one half of the text: together they are always right."""

    class Half(Guesser):
        def propose(self, requests, budget):
            drafts = []
            for r, most in zip(requests, budget.max_drafts, strict=True):
                wrong = self.rng.random() < 0.5
                drafts.append(chain([-1 - self.known if wrong else r.text(0)] if most else []))
            return Proposal.of(drafts)

    def run(trees):
        world = World(2)
        free = {"a": Half("a", 0, seed=1, known=0), "b": Half("b", 0, seed=2, known=1)}
        drafter = adaptive(free, clock=world.clock)
        world.trees = trees
        world.run(drafter, 100)
        return world.run(drafter, 400), world.drafts

    joined, drafts = run(True)
    single, _ = run(False)
    assert max(map(max, drafts)) == 2
    assert joined == pytest.approx(2 * 1.75 / 0.1, rel=0.1)
    assert single == pytest.approx(2 * 1.5 / 0.1, rel=0.1)


def test_a_tree_has_no_more_drafts_than_are_allowed():
    world = World(1)
    free = {name: Guesser(name, 0.5, seed=i) for i, name in enumerate("abc")}
    drafter = adaptive(free, clock=world.clock)
    world.trees = True
    world.run(drafter, 50)
    assert max(d[0] for d in world.drafts) == K


def test_the_slowdown_guard_has_the_last_word():
    """Drafts whose time is not learned, by a fault of the estimates: they stop all the same."""
    world = World(1)
    free = Guesser("free", 0.9)
    drafter = adaptive({"free": free}, clock=world.clock)
    drafter.control.cost.cpu.observe = lambda requests, seconds: None
    free.passes = lambda count: world.draft_passes(100)  # two seconds for what was to be free
    world.run(drafter, 400)
    assert drafter.control.slowdown_guard.trips > 0
    assert sum(d[0] > 0 for d in world.drafts[-200:]) < 40


class Overlapped(World):
    """An engine that need not wait for drafts: control makes them before a launch, or after it.

    exposed: seconds for which the device waits if they are made before
    """

    exposed = 0.03

    def propose(self, control, budget):
        decision = self.decide_early(control)
        self.early = decision is not None
        if self.early:
            assert control.scores_unused("")
            control.score_unused(self.requests, budget, Feasible())
        else:
            self.seconds += self.exposed
            decision = control.decide(self.requests, budget, Feasible())
        self.launched = decision
        is_plain = isinstance(decision, Plain)
        return Proposal.empty(len(self.requests)) if is_plain else decision.proposal

    def observe(self, control, outcomes):
        control.observe(Report(Outcomes.of(outcomes), self.launched, self.early, self.seconds))

    def decide_early(self, control):
        return control.decide_early(self.requests, np.full(len(self.requests), K), Feasible())

    def is_asleep(self, control):
        return isinstance(self.decide_early(control), Plain)


def served(world, free, models=(), launches_early=True):
    """Return control for an engine that may launch plain steps early."""
    limits = Limits(launches_early=launches_early)
    return Control({"free": free}, models, clock=world.clock, limits=limits)


@pytest.mark.parametrize("batch", [1, 8])
def test_nobody_waits_for_drafts_that_are_never_right(batch):
    world = Overlapped(batch)
    control = served(world, Guesser("free", 0.05))
    world.run(control, 60)
    plain = batch / 0.1
    assert world.run(control, 400) >= 0.97 * plain
    assert world.is_asleep(control)
    # the twin: control that cannot sleep pays for its drafts in every step
    twin = Overlapped(batch)
    sleepless = served(twin, Guesser("free", 0.05), launches_early=False)
    assert twin.run(sleepless, 400) < 0.85 * plain


def test_who_sleeps_wakes_up_when_drafts_become_right():
    world, guesser = Overlapped(4), Guesser("free", 0.05)
    control = served(world, guesser)
    world.run(control, 200)
    assert world.is_asleep(control)
    guesser.chance = 0.95
    world.run(control, 60)
    assert not world.is_asleep(control)
    best = World(4).run(Fixed(Guesser("free", 0.95), K), 400)
    assert world.run(control, 200) > 0.7 * best  # it waits 0.03 of each 0.13 seconds


def test_a_model_that_may_be_worth_it_is_waited_for():
    world = Overlapped(1)
    model = Guesser("model", 0.9, passes=world.draft_passes)
    control = served(world, Guesser("free", 0.0), [model])
    world.run(control, 300)
    assert world.run(control, 200) > 1.5 * (1 / 0.1)


def test_plain_decoding_is_that_of_steps_launched_early():
    """Drafts that beat only a step that waits for them are not used."""
    world = Overlapped(1)
    # two passes of 0.02 and a wait of 0.03 in 0.17 seconds bring 1.5 tokens: 0.113 for each
    model = Guesser("model", 0.4, passes=world.draft_passes)
    control = served(world, Guesser("free", 0.0), [model])
    world.run(control, 200)
    assert control.cost.plain(0, 1) == pytest.approx(0.1, rel=0.1)
    assert world.run(control, 600) > 0.97 * (1 / 0.1)
    assert control.cost.waiting(0, 1) == pytest.approx(world.exposed, rel=0.5)


def test_asleep_a_model_that_is_no_use_is_tried_seldom():
    world = Overlapped(4)
    model = Guesser("model", 0.02, passes=world.draft_passes)
    control = served(world, Guesser("free", 0.0), [model])
    world.run(control, 200)
    asked = model.asked
    assert world.run(control, 1000) >= (1 - 2 * FREE_SHARE) * 4 / 0.1
    assert model.asked - asked > 0


@pytest.mark.parametrize("batch", [1, 4])
def test_of_several_models_the_one_that_pays_is_called(batch):
    """And another one when it has become better. Neither is forgotten."""
    world = World(batch)
    one, other = (
        Guesser(name, chance, passes=world.draft_passes)
        for name, chance in (("one", 0.9), ("other", 0.3))
    )
    drafter = adaptive({"free": Guesser("free", 0.0)}, [one, other], clock=world.clock)
    alone = World(batch)
    single = Guesser("one", 0.9, passes=alone.draft_passes)
    only = adaptive({"free": Guesser("free", 0.0)}, [single], clock=alone.clock)
    for drafters in ((world, drafter), (alone, only)):
        drafters[0].run(drafters[1], 100)
    assert world.run(drafter, 400) > 0.93 * alone.run(only, 400)
    one.chance, other.chance = 0.1, 0.9
    world.run(drafter, 300)
    before = one.asked, other.asked
    world.run(drafter, 200)
    assert other.asked - before[1] > 3 * (one.asked - before[0])


def test_models_of_the_same_name_are_refused():
    model = Guesser("model", 0.5)
    with pytest.raises(ValueError, match="different names"):
        Control({}, [model, model])
    with pytest.raises(ValueError, match="different names"):
        Control({"model": model}, [model])


@pytest.mark.parametrize("asleep", [True, False])
def test_a_request_may_be_taken_away_while_its_step_is_under_way(asleep):
    world = World(2)
    drafter = adaptive({"free": Guesser("free", 0.9)}, clock=world.clock)
    world.run(drafter, 20)
    control = drafter.control
    before = control.cost.verify.seconds(2)
    budget = Budget((K, K), "match", KeyedCoins(), False)
    (control.score_unused if asleep else control.decide)(world.requests, budget, Feasible())
    world.seconds += 5.0
    left = world.requests[1]
    drafter.observe([Outcome(left, (left.text(0),), (0,), 0, 0, None)])
    control.meanwhile()
    assert control.cost.verify.seconds(2) == before


def test_an_account_may_spend_what_is_saved_and_a_share_of_all_time():
    def step(seconds, tokens, without=0.0):
        passes = Passes(without=without)
        return Step(0.0, 1, 100, seconds=seconds, tokens=tokens, passes=passes)

    account = Account()
    assert not account.is_overdrawn  # a new model is tried at once
    while not account.is_overdrawn:
        account.observe(step(3.0, 1, without=1.0), 1.0)  # two seconds lost
    below, steps = -account.balance, 0
    while account.is_overdrawn:
        account.observe(step(1.0, 1), 1.0)
        steps += 1
    assert steps == pytest.approx(below / FREE_SHARE, abs=1)
    account.observe(step(1.0, 11, without=1.0), 1.0)  # ten seconds saved
    for _ in range(4):
        account.observe(step(3.0, 1, without=1.0), 1.0)
        assert not account.is_overdrawn
    for _ in range(100):
        account.observe(step(1.0, 11, without=1.0), 1.0)
    assert account.balance == MAX_CREDIT
    for _ in range(10):
        account.observe(step(1000.0, 1, without=1.0), 1.0)  # the machine stood still
    for _ in range(round(MAX_DEBT / FREE_SHARE) - 1):
        account.observe(step(1.0, 1), 1.0)
        assert account.is_overdrawn
    for _ in range(2):
        account.observe(step(1.0, 1), 1.0)
    assert not account.is_overdrawn


@pytest.mark.parametrize("sizes", [[], [0, 8], [8, -1], [8, "16"], "8", [8.5]])
def test_row_buckets_are_numbers_of_rows(sizes):
    with pytest.raises(ValueError, match="row_buckets"):
        adaptive_control(None, row_buckets=sizes)


class Foresees(AheadDrafter):
    """A draft server that is always right."""

    def __init__(self):
        super().__init__("none.sock")
        self.guesser = Guesser("ahead", 1.0)

    def start(self, requests):
        pass

    stop = observe = start

    def propose(self, requests, budget):
        return self.guesser.propose(requests, budget)


def test_what_a_draft_server_foresees_says_nothing_of_lookups():
    """Else the device drafts in vain, and the draft server is not asked."""
    learned = []
    for free in ({}, {"ahead": Foresees()}):
        world = World(2)
        drafter = adaptive({"suffix": Guesser("suffix", 0.0)} | free, clock=world.clock)
        acceptance, device = drafter.control.acceptance, drafter.control.device
        world.run(drafter, 60)
        rows = acceptance.rows([0, 1])
        lookups = acceptance["suffix"].first.of(rows, np.array([0.8, 0.8]))
        learned.append([lookups.tolist(), device.arms[NAME].survival(rows, rows + K).tolist()])
        assert sum(map(sum, world.drafts[30:])) > 300 or not free
    assert learned[0] == learned[1]
