"""Whether the device should draft: learned from what was accepted, and compared with the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.control import Limits, adaptive_control
from outrider.control.decision import CpuDrafts, DeviceDrafts, Feasible, Report
from outrider.control.device import NAME
from outrider.core import (
    Budget,
    KeyedCoins,
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


def made_up(widths, rng):
    """Return chains of drafts, so many for each request."""
    places = np.concatenate([np.arange(width) for width in widths]).astype(np.int64)
    return Proposal.unclaimed(rng.integers(0, 30_000, len(places)), widths, places - 1)


class Head:
    """A head.

    right: the chance that a draft is right if the one before it is
    deepest: how many drafts the CPU makes with it
    """

    name, deepest = "head", 6

    def __init__(self, right, rng, clock):
        self.right, self.rng, self.clock, self.asked = right, rng, clock, 0

    def start(self, requests):
        """Do nothing."""

    stop = observe = start

    def unread(self, request):
        return 1

    def ready(self, request):
        return True

    def catch_up(self, requests):
        return 0

    def make_passes(self, count):
        """Let a twentieth of a plain step go by for each."""
        self.clock.now += 0.05 * count

    def propose(self, requests, budget):
        self.asked += 1
        widths = np.minimum(budget.max_drafts, self.deepest)
        self.make_passes(int(widths.max()))
        return made_up(widths, self.rng)


class Device:
    """An engine whose device can draft: texts in which a share of its drafts is right.

    right: the chance that a draft is right if the one before it is, of all requests or of each
    wait: what a step costs that is not launched early, in plain steps
    row: what a further row costs, in plain steps
    head: the same chance of a head's drafts, if there is a head
    ready: whether it could draft on the device
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
        **options,
    ):
        self.rng, self.clock = np.random.default_rng(0), Clock()
        self.right, self.wait, self.row, self.batch = right, wait, row, batch
        self.head = None if head is None else Head(head, self.rng, self.clock)
        limits = Limits(launches_early=True)
        self.control = adaptive_control(self.head, clock=self.clock, limits=limits, **options)
        self.control.add_to_device(self.control.models)
        names = [NAME, *(["head"] if ready else [])] if is_possible else []
        self.feasible, self.drafter = Feasible(frozenset(names)), ""
        for rows in (1, 2, 4, 8, 16, 32, 64, 128):
            self.control.calibrate(rows, self.seconds(rows), [])
        texts = [tuple(self.rng.integers(0, 30_000, 64).tolist()) for _ in range(batch)]
        sampling = SamplingParams(max_tokens=10**6)
        self.requests = [
            Request(id=i, prompt=text, sampling=sampling, seed=0) for i, text in enumerate(texts)
        ]
        self.control.start(self.requests)
        self.budget = Budget(np.full(batch, WIDE), "match", KeyedCoins(), trees=False)

    def seconds(self, rows):
        return 1.0 + self.row * (rows - self.batch)

    def step(self):
        """Make one step. Return how many drafts each request had, and whether it was early."""
        control, decision = self.control, self.control.decide_early(self.requests)
        early = decision is not None
        if early:
            control.score_unused(self.requests, self.budget, self.feasible)
        else:
            self.clock.now += self.wait
            decision = control.decide(self.requests, self.budget, self.feasible)
        widths, drafts, right = np.zeros(self.batch, np.int64), Proposal.empty(self.batch), 0.0
        self.drafter = ""
        if isinstance(decision, CpuDrafts):
            drafts, right = decision.proposal, self.right if self.head is None else self.head.right
        elif isinstance(decision, DeviceDrafts):
            widths, self.drafter = decision.num_drafts, decision.drafter
            drafts, right = made_up(widths, self.rng), self.right
            if self.drafter == "head":
                self.head.make_passes(int(widths.max()))
                right = self.head.right
        emitted = torch.from_numpy(self.rng.integers(30_000, 60_000, drafts.num_rows))
        chances = np.broadcast_to(right, self.batch)[drafts.owners]
        hits = self.rng.random(len(chances)) < chances
        emitted[drafts.parent_rows[hits]] = drafts.tokens[hits]
        self.clock.now += self.seconds(drafts.num_rows)
        done = settle(self.requests, drafts, match(emitted, drafts))
        control.observe(Report(Outcomes.of(done), decision, early, self.clock.now))
        done.apply()
        control.meanwhile()
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
    device.run(50)
    widths, early, speed = device.run(200)
    assert widths.mean() > 4
    assert early > 0.95
    assert speed > 3.0


@pytest.mark.parametrize(("head", "batch"), [(None, 1), (0.02, 1), (0.02, 4)])
def test_bad_drafts_cost_next_to_nothing(head, batch):
    device = Device(right=0.0, row=0.05, head=head, batch=batch)
    device.run(50)
    widths, _, speed = device.run(400)
    assert (widths > 0).mean() < 0.1
    assert speed > 0.97 * batch


def test_each_request_gets_what_its_own_drafts_are_worth():
    device = Device(right=np.array([0.9, 0.9, 0.0, 0.0]), batch=4, row=0.05)
    device.run(100)
    widths, _, speed = device.run(100)
    assert widths[:, :2].mean() > 3 * widths[:, 2:].mean() + 1
    assert speed > 6.0


def test_it_is_tried_again_when_the_text_changes():
    device = Device(right=0.0, row=0.05)
    device.run(150)
    device.right = 0.9
    device.run(400)
    widths, _, _ = device.run(50)
    assert widths.mean() > 4


@pytest.mark.parametrize("options", [{"is_possible": False}, {"device": False}, {"batch": 33}])
def test_where_it_cannot_or_must_not(options):
    widths, _, _ = Device(right=0.9, **options).run(60)
    assert not widths.any()


def test_a_good_head_drafts_on_the_device():
    """What it is worth is learned where the CPU drafts with it."""
    device = Device(right=0.0, head=0.8)
    device.run(50)
    asked = device.head.asked
    widths, early, speed = device.run(200)
    assert device.drafter == "head"
    assert 4 < widths.mean() < 12
    assert early > 0.95
    assert device.head.asked < asked + 5
    assert speed > 2.7  # 3.1 is the most, with 8 drafts


def test_a_head_drafts_deeper_than_the_cpu_has_seen():
    """What comes after it is tried."""
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
