"""How many drafts of the device each request gets: learned from what was accepted, and compared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import worlds

from outrider.control import Limits, adaptive_control
from outrider.control.acceptance import POOL_MEMORY, PRIOR_WEIGHT, REQUEST_MEMORY, UNKNOWN, Chances
from outrider.control.decision import CpuDrafts, DeviceDrafts, Feasible, Plain, Report
from outrider.control.device import (
    ALL,
    DEPTH_BUCKETS,
    FEW,
    MADE,
    MANY,
    MAX_DRAFTS,
    NAME,
    NEW,
    NO_DRAFTS,
    NOISE_TOKENS,
    PLAIN_CHECK_EVERY,
    PRIORS,
    Arm,
)
from outrider.control.plan import Offer
from outrider.core import (
    Budget,
    FinishReason,
    KeyedCoins,
    Outcome,
    Outcomes,
    Proposal,
    Request,
    SamplingParams,
    match,
    settle,
)

WIDE = 12


class Clock:
    """Stands still until it is moved."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def chains(drafts, widths):
    """Return the first of these drafts, so many for each request."""
    owners = np.repeat(np.arange(len(widths)), widths)
    places = np.concatenate([np.arange(width) for width in widths]).astype(np.int64)
    return Proposal.unclaimed(drafts[owners, places], widths, places - 1)


class Head(worlds.Passes):
    """A head.

    right: the chance that a draft is right if the one before it is
    deepest: how many drafts the CPU makes with it
    """

    name, deepest = "head", 6

    def __init__(self, right, rng, clock):
        self.right, self.rng, self.clock, self.asked = right, rng, clock, 0

    def make_passes(self, count):
        """Let a twentieth of a plain step go by for each."""
        self.clock.now += 0.05 * count

    def propose(self, requests, budget):
        self.asked += 1
        widths = np.minimum(budget.max_drafts, self.deepest)
        self.make_passes(int(widths.max()))
        return chains(self.rng.integers(0, 30_000, (len(widths), self.deepest)), widths)


class Device:
    """An engine whose device can draft: texts in which a share of its drafts is right.

    right: the chance that a draft is right if the one before it is, of all requests or of each
    wait: what a step costs that is not launched early, in plain steps
    row: what a further row costs, in plain steps
    head: the same chance of a head's drafts, if there is a head
    ready: whether it could draft on the device
    max_rows: of a pass
    is_timed: whether control knows how long passes take
    decisions: of all steps
    """

    def __init__(
        self,
        right,
        batch=1,
        wait=0.3,
        row=0.004,
        is_possible=True,
        head=None,
        ready=True,
        max_rows=1 << 30,
        is_timed=True,
        **options,
    ):
        self.rng, self.clock = np.random.default_rng(0), Clock()
        self.right, self.wait, self.row, self.batch = right, wait, row, batch
        self.head = None if head is None else Head(head, self.rng, self.clock)
        limits = Limits(launches_early=True)
        self.control = adaptive_control(self.head, clock=self.clock, limits=limits, **options)
        self.control.add_to_device(self.control.models)
        names = [NAME, *(["head"] if ready else [])] if is_possible else []
        self.feasible, self.drafter = Feasible(frozenset(names), max_rows=max_rows), ""
        for rows in (1, 2, 4, 8, 16, 32, 64, 128) if is_timed else ():
            self.control.calibrate(rows, self.seconds(rows), [])
        texts = [tuple(self.rng.integers(0, 30_000, 64).tolist()) for _ in range(batch)]
        sampling = SamplingParams(max_tokens=10**6)
        self.requests = [
            Request(id=i, prompt=text, sampling=sampling, seed=0) for i, text in enumerate(texts)
        ]
        self.control.start(self.requests)
        self.budget = Budget(np.full(batch, WIDE), "match", KeyedCoins(), trees=False)
        self.decisions = []

    def seconds(self, rows):
        return 1.0 + self.row * (rows - self.batch)

    def decide(self):
        """Return what control decides, and whether that was early."""
        control, most = self.control, self.budget.max_drafts
        decision = control.decide_early(self.requests, most, self.feasible)
        if decision is None:
            self.clock.now += self.wait
            return control.decide(self.requests, self.budget, self.feasible), False
        on_device = decision.drafter if isinstance(decision, DeviceDrafts) else ""
        if control.scores_unused(on_device):
            control.score_unused(self.requests, self.budget, self.feasible)
        return decision, True

    def step(self):
        """Make one step. Return how many drafts each request had, and whether it was early."""
        decision, early = self.decide()
        self.decisions.append(decision)
        widths, drafts, right = np.zeros(self.batch, np.int64), Proposal.empty(self.batch), 0.0
        self.drafter, made = "", None
        if isinstance(decision, CpuDrafts):
            drafts, right = decision.proposal, self.right if self.head is None else self.head.right
        elif isinstance(decision, DeviceDrafts):
            widths, right = decision.num_drafts, self.right
            self.drafter = decision.drafter if widths.any() else ""
            made = self.rng.integers(0, 30_000, (self.batch, decision.width))
            drafts = chains(made, widths)
            if self.drafter == "head":
                self.head.make_passes(decision.width)
                right = self.head.right
        emitted = torch.from_numpy(self.rng.integers(30_000, 60_000, drafts.num_rows))
        chances = np.broadcast_to(right, self.batch)
        hits = self.rng.random(len(drafts.owners)) < chances[drafts.owners]
        emitted[drafts.parent_rows[hits]] = drafts.tokens[hits]
        if made is not None:  # what follows the last verified draft may be the next one
            more = np.flatnonzero(
                (widths < made.shape[1]) & (self.rng.random(self.batch) < chances)
            )
            emitted[drafts.root_rows[more] + widths[more]] = torch.from_numpy(
                made[more, widths[more]]
            )
        self.clock.now += self.seconds(drafts.num_rows)
        done = settle(self.requests, drafts, match(emitted, drafts))
        self.control.observe(Report(Outcomes.of(done), decision, early, self.clock.now, made))
        done.apply()
        self.control.meanwhile()
        return widths, early

    def run(self, steps):
        """Return the drafts of each request, the share of early steps, and tokens per second."""
        began = self.clock.now, sum(len(request.output) for request in self.requests)
        made = [self.step() for _ in range(steps)]
        tokens = sum(len(request.output) for request in self.requests) - began[1]
        early = sum(is_early for _, is_early in made) / steps
        return np.array([w for w, _ in made]), early, tokens / (self.clock.now - began[0])


def test_good_drafts_make_it_draft_and_launches_do_not_wait():
    device = Device(right=0.8)
    device.run(20)
    widths, early, speed = device.run(200)
    assert widths.mean() > 4
    assert early == 1
    assert speed > 3.0


@pytest.mark.parametrize(("head", "batch"), [(None, 1), (0.02, 1), (0.02, 4)])
def test_bad_drafts_cost_next_to_nothing(head, batch):
    device = Device(right=0.0, row=0.05, head=head, batch=batch)
    device.run(50)
    widths, _, speed = device.run(400)
    assert (widths > 0).mean() < 0.1
    assert speed > 0.97 * batch


def test_each_request_gets_what_its_own_drafts_are_worth():
    right = np.array([0.9, 0.9, 0.0, 0.0])
    device = Device(right, batch=4, row=0.05, objective="throughput")
    device.run(100)
    widths, _, speed = device.run(100)
    assert widths[:, :2].mean() > 3 * widths[:, 2:].mean() + 1
    assert speed > 6.0


def tokens_of_each(device, steps):
    """Return how many tokens each request emits, of those that plain decoding would have."""
    before = np.array([len(request.output) for request in device.requests])
    began = device.clock.now
    device.run(steps)
    after = np.array([len(request.output) for request in device.requests])
    return (after - before) / (device.clock.now - began)


@pytest.mark.parametrize(("options", "least"), [({}, 0.95), ({"slowdown": 0.1}, 0.88)])
def test_requests_that_gain_nothing_are_hardly_slowed_down(options, least):
    device = Device(right=np.array([0.9, 0.9, 0.0, 0.0]), batch=4, row=0.01, **options)
    device.run(100)
    found = tokens_of_each(device, 200)
    assert (found[2:] > least).all()
    assert (found[:2] > 1.3).all()


def test_twin_for_throughput_they_are():
    device = Device(right=np.array([0.9, 0.9, 0, 0]), batch=4, row=0.01, objective="throughput")
    device.run(100)
    found = tokens_of_each(device, 200)
    assert (found[2:] < 0.9).all()
    assert found.sum() > 6


def test_it_is_tried_again_when_the_text_changes():
    """A draft is made for each request in every step: the first good one is seen."""
    device = Device(right=0.0, row=0.05)
    device.run(150)
    device.right = 0.9
    device.run(20)
    widths, early, _ = device.run(50)
    assert widths.mean() > 4
    assert early == 1


def test_twin_if_nothing_were_made_without_rows_it_is_not(monkeypatch):
    device = Device(right=0.0, row=0.05)
    device.run(150)
    device.right = 0.9
    observe = device.control.observe
    device.control.observe = lambda report: observe(
        Report(report.outcomes, report.decision, report.early, report.ended, None)
    )
    widths, _, _ = device.run(70)
    assert not widths.any()


def test_it_drafts_for_large_batches_too():
    device = Device(right=0.8, batch=48, row=0.002)
    device.run(50)
    widths, early, speed = device.run(50)
    assert widths.mean() > 2
    assert early == 1
    assert speed > 1.5 * 48


@pytest.mark.parametrize("options", [{"is_possible": False}, {"device": False}])
def test_where_it_cannot_or_must_not(options):
    device = Device(right=0.9, **options)
    widths, _, _ = device.run(60)
    assert not widths.any()
    assert not any(isinstance(decision, DeviceDrafts) for decision in device.decisions)


def test_it_keeps_to_the_rows_of_a_pass():
    device = Device(right=0.9, batch=4, row=0.0, max_rows=10)
    widths, _, _ = device.run(100)
    assert widths.sum(1).max() == 6
    widths, _, _ = Device(right=0.9, batch=4, row=0.0, max_rows=4).run(10)
    assert not widths.any()


def test_it_keeps_to_what_requests_allow():
    device = Device(right=0.95, batch=3, row=0.0)
    device.budget = Budget(np.array([0, 2, 40]), "match", KeyedCoins(), trees=False)
    widths, _, _ = device.run(100)
    assert widths.max(0).tolist() == [0, 2, MAX_DRAFTS]


def test_no_drafts_are_verified_before_a_time_is_known():
    device = Device(right=0.9, batch=2, is_timed=False)
    assert device.step()[0].tolist() == [0, 0]
    device.run(3)
    assert device.run(20)[0].any()


def test_no_drafts_are_verified_while_the_slowdown_guard_says_so():
    device = Device(right=0.9)
    device.run(20)
    guard = device.control.slowdown_guard
    guard._left = 5
    widths, early, _ = device.run(5)
    assert not widths.any()
    assert early == 1, "the steps are of the device still"
    assert device.decisions[-1].width == MADE
    assert not guard.is_tripped
    assert device.run(5)[0].any()


@pytest.mark.parametrize(("right", "row", "is_measured"), [(0.3, 0.1, True), (0.9, 0.004, False)])
def test_plain_steps_are_measured_while_drafts_gain_little(right, row, is_measured):
    device = Device(right=right, row=row)
    device.run(20)
    device.right = right
    widths, _, _ = device.run(2 * PLAIN_CHECK_EVERY)
    plain = (widths.sum(1) == 0).sum()
    assert (plain > 0) == is_measured


def test_as_many_are_made_as_are_verified_and_some_without_rows():
    device = Device(right=np.array([0.95, 0.0]), batch=2, row=0.01)
    device.run(60)
    for decision in device.decisions:
        deepest = decision.num_drafts.max()
        assert decision.width == max(MADE, deepest)


def test_a_request_that_takes_the_row_of_another_begins_anew():
    device = Device(right=0.9)
    device.run(30)
    choice, (row,) = device.control.device, device.control.acceptance.rows([0])
    arm = choice.arms[NAME]
    choice._balance[row] = 9.0
    assert arm.state[row] != NEW
    device.control.stop(device.requests)
    assert arm.state[row] == NEW
    assert choice._balance[row] == 0.0
    assert device.control.acceptance.rows(["another"]).tolist() == [row]


def test_a_request_that_lost_time_lately_is_waited_for_less():
    """By chance it may lack a few tokens."""
    device = Device(right=0.9, batch=2, row=0.05)
    device.run(20)
    choice, most = device.control.device, device.budget.max_drafts
    rows = device.control.acceptance.rows([0, 1])

    def drafts(lost):
        choice._balance[rows] = 0.0, -lost
        return int(choice.decide(device.requests, most, device.feasible).num_drafts.sum())

    assert drafts(0) == drafts(NOISE_TOKENS) > 0
    assert drafts(NOISE_TOKENS + 300) < drafts(0)


@pytest.mark.parametrize(
    ("options", "fault"),
    [({"objective": "speed"}, "objective"), ({"slowdown": -0.1}, "slowdown"),
     ({"slowdown": 2}, "slowdown")],
)  # fmt: skip
def test_options_are_checked(options, fault):
    with pytest.raises((ValueError, TypeError), match=fault):
        adaptive_control(**options)


# -- with a head


def test_a_good_head_drafts_on_the_device():
    device = Device(right=0.0, head=0.8)
    device.run(50)
    asked = device.head.asked
    widths, early, speed = device.run(200)
    assert device.drafter == "head"
    assert 4 < widths.mean() < 12
    assert early > 0.95
    assert device.head.asked < asked + 5
    assert speed > 2.7  # 3.1 is the most, with 8 drafts


def test_a_head_makes_no_more_drafts_than_are_verified():
    """Each costs a pass."""
    device = Device(right=0.0, head=0.8, batch=2)
    device.run(100)
    own = [decision for decision in device.decisions if getattr(decision, "drafter", "") == "head"]
    assert len(own) > 50
    assert all(decision.width == decision.num_drafts.max() for decision in own)


def test_a_head_drafts_deeper_than_the_cpu_has_seen():
    device = Device(right=0.0, head=0.6)
    device.head.deepest = 2
    device.run(100)
    widths, early, speed = device.run(100)
    assert widths.mean() > 2.5
    assert early > 0.9
    assert speed > 1.5


def test_a_head_that_could_not_is_asked_by_the_cpu():
    device = Device(right=0.0, head=0.8, ready=False)
    device.run(50)
    asked = device.head.asked
    widths, _, speed = device.run(100)
    assert device.head.asked > asked + 80
    assert not widths.any()
    assert 2.0 < speed < 2.7


def test_the_better_one_of_head_and_lookup_drafts():
    for right, head in ((0.95, 0.1), (0.3, 0.9)):
        device = Device(right=right, head=head)
        device.run(300)
        widths, early, _ = device.run(100)
        assert (device.drafter == "head") == (head > right)
        assert widths.mean() > 3
        assert early > 0.9


# -- which drafts are scored that a step is launched without


@pytest.mark.parametrize(
    ("head", "on_device", "scored"),
    [(None, "", True), (None, NAME, False), (0.5, NAME, True), (0.5, "head", True)],
)
def test_unused_drafts_are_scored_if_others_may_draft(head, on_device, scored):
    control = Device(right=0.5, head=head).control
    assert control.scores_unused(on_device) == scored
    control._is_awake = True
    assert not control.scores_unused(on_device)


def test_lookups_index_texts_when_they_are_asked_for_drafts():
    device = Device(right=0.5, batch=2)
    known = device.control.free["suffix"]._known
    device.run(20)
    assert not known, "the device looks up"
    device.feasible = Feasible()
    device.run(3)
    assert known == {0, 1}
    device.control.stop(device.requests[:1])
    assert known == {1}
    device.control.stop(device.requests[1:])
    assert not known


# -- what a way to draft learns from a step, beside one request after the other


class SlowArm:
    """Learns as `Arm` does, request by request and draft by draft.

    state: of each request, by its row
    """

    def __init__(self, capacity, ends_count=False, unverified_counts=True):
        self.tries = np.full(PRIORS.size, PRIOR_WEIGHT)
        self.hits = PRIOR_WEIGHT * PRIORS.ravel()
        self.share = PRIORS.ravel().copy()
        self.shift, self.learnt = np.zeros(capacity), np.zeros(capacity)
        self.state = np.full(capacity, NEW)
        self.ends_count, self.unverified_counts = ends_count, unverified_counts

    def tested(self, outcome, made):
        """Return of each draft that was compared whether it was right."""
        if outcome.finish_reason is not None and not self.ends_count:
            return []
        accepted, verified = outcome.num_accepted_drafts, outcome.num_drafts
        found = [True] * accepted
        if accepted == len(outcome.tokens):  # it ended at a draft
            return found
        if accepted < verified:
            found.append(False)
        elif verified < len(made) and self.unverified_counts:
            found.append(made[verified] == outcome.tokens[accepted])
        return found

    def learn(self, rows, outcomes, made):
        compared = [self.tested(o, m) for o, m in zip(outcomes, made.tolist(), strict=True)]
        tries, hits = np.zeros(PRIORS.size), np.zeros(PRIORS.size)
        for row, found in zip(rows.tolist(), compared, strict=True):
            known = surprise = 0.0
            for depth, hit in enumerate(found):
                bucket = (
                    PRIORS.shape[1] * self.state[row] + DEPTH_BUCKETS[min(depth, MAX_DRAFTS - 1)]
                )
                odds = self.share[bucket] / (1 - self.share[bucket]) * np.exp(self.shift[row])
                chance = odds / (1 + odds)
                known, surprise = known + chance * (1 - chance), surprise + hit - chance
                tries[bucket], hits[bucket] = tries[bucket] + 1, hits[bucket] + hit
            self.learnt[row] = self.learnt[row] * 0.5 ** (len(found) / REQUEST_MEMORY) + known
            self.shift[row] += surprise / (UNKNOWN + self.learnt[row])
            if found:
                right = sum(found)
                several = ALL if right == len(found) else MANY
                self.state[row] = NO_DRAFTS if not right else FEW if right <= 3 else several
        keep = 0.5 ** (tries / POOL_MEMORY)
        self.tries, self.hits = self.tries * keep + tries, self.hits * keep + hits
        self.share = np.clip(self.hits / self.tries, 0.02, 0.98)


def outcomes_of(rng, batch, verifies_all=False):
    """Make a step up: its outcomes, and the drafts that the device made."""
    width, found = int(rng.integers(1, MAX_DRAFTS + 3)), []
    made = rng.integers(0, 2, (batch, width))
    for number, drafts in enumerate(made.tolist()):
        verified = width if verifies_all else int(rng.integers(0, width + 1))
        accepted = verified if rng.random() < 0.5 else int(rng.integers(0, verified + 1))
        follows = 1 - drafts[accepted] if accepted < verified else int(rng.integers(0, 2))
        tokens, reason = (*drafts[:accepted], follows), None
        if rng.random() < 0.2:  # it ends within what was emitted
            tokens = tokens[: int(rng.integers(1, len(tokens) + 1))]
            accepted, reason = min(accepted, len(tokens)), FinishReason.STOP
        request = Request(number, (1, 2), SamplingParams(), seed=0)
        where = tuple(range(len(tokens)))
        found.append(Outcome(request, tokens, where, verified, accepted, reason))
    return Outcomes.of(found), made


def learned(seed, **faults):
    """Let both learn from the same random steps, of changing requests."""
    rng, capacity = np.random.default_rng(seed), 9
    arm, slow = Arm(NAME, Chances(capacity, PRIORS.ravel())), SlowArm(capacity, **faults)
    for _ in range(30):
        rows = rng.permutation(capacity)[: rng.integers(1, capacity + 1)]
        outcomes, made = outcomes_of(rng, len(rows))
        arm.learn(rows, Report(outcomes, Plain(), early=True, ended=0.0, made=made))
        slow.learn(rows, outcomes, made)
    return arm, slow


def same(arm, slow):
    chances = arm.chances
    everyone = np.arange(len(slow.state))
    return (
        np.array_equal(arm._state_of(everyone), slow.state)
        and np.allclose(chances._tries, slow.tries)
        and np.allclose(chances._hits, slow.hits)
        and np.allclose(chances._shift, slow.shift)
        and np.allclose(chances._learnt, slow.learnt)
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_step_is_learned_from_as_by_one_request_after_the_other(seed):
    assert same(*learned(seed))


@pytest.mark.parametrize("fault", [{"ends_count": True}, {"unverified_counts": False}])
def test_twin_other_drafts_that_are_compared_are_seen(fault):
    assert not any(same(*learned(seed, **fault)) for seed in range(5))


def test_survival_falls_with_depth_and_ends_at_what_a_request_allows():
    arm, _ = learned(0)
    most = np.array([0, 3, 40])
    survival = arm.survival(np.array([2, 5, 7]), most)
    assert survival.shape == (3, MAX_DRAFTS)
    assert (np.diff(survival, axis=1) <= 0).all()
    assert [(row > 0).sum() for row in survival] == [0, 3, MAX_DRAFTS]


def test_a_head_learns_from_drafts_of_the_cpu_as_from_those_of_the_device():
    """Otherwise it would never draft there: the priors are those of lookups."""
    rng, rows = np.random.default_rng(0), np.array([2, 0, 3])
    of_device, of_cpu = (Arm("head", Chances(4, PRIORS.ravel())) for _ in range(2))
    for _ in range(20):
        outcomes, made = outcomes_of(rng, len(rows), verifies_all=True)
        of_device.learn(rows, Report(outcomes, Plain(), early=True, ended=0.0, made=made))
        drafts = chains(made, outcomes.num_drafts)
        of_cpu.learn_offer(rows, Offer("head", drafts, np.ones(made.size)), outcomes)
    assert np.array_equal(of_device.state, of_cpu.state)
    assert (of_cpu.state[rows] != NEW).all()
    for name in ("_tries", "_hits", "_shift", "_learnt"):
        assert np.allclose(getattr(of_device.chances, name), getattr(of_cpu.chances, name))


def test_requests_that_a_head_did_not_draft_for_are_as_they_were():
    rng, arm = np.random.default_rng(0), Arm("head", Chances(3, PRIORS.ravel()), head=object())
    outcomes, made = outcomes_of(rng, 2, verifies_all=True)
    arm.learn_offer(np.array([0, 1]), Offer("head", chains(made, [0, 1]), np.ones(1)), outcomes)
    assert (arm.state[0] == NEW, arm.state[1] == NEW) == (True, False)
    assert (arm.chances._learnt > 0).tolist() == [False, True, False]
