"""A made-up engine whose device can look drafts up, and whose CPU may have a draft model.

Time is counted: a pass of so many rows as requests takes a second.
"""

from __future__ import annotations

import numpy as np

from outrider.control import Control, Limits
from outrider.control.decision import CpuDrafts, DeviceDrafts, Feasible, Report
from outrider.control.device import NAME
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

K = 8
DEEPEST, PASS_SECONDS = 4, 0.05
WRONG = -1


class Passes:
    """What control asks of a drafter that runs passes: always ready, with one token unread."""

    def start(self, requests):
        """Do nothing."""

    stop = observe = start

    def unread(self, request):
        return 1

    def ready(self, request):
        return True

    def catch_up(self, requests):
        return 0


class Model(Passes):
    """A draft model of the CPU. right: the chance that a draft is right if the one before it is"""

    name = "model"

    def __init__(self, world, right):
        self.world, self.right, self.asked = world, right, 0

    def propose(self, requests, budget):
        self.asked += 1
        widths = np.minimum(budget.max_drafts, DEEPEST)
        self.world.now += PASS_SECONDS * int(widths.max())
        made = self.world.drafts(self.right)
        return Proposal.of([chain(row[:n]) for row, n in zip(made, widths, strict=True)])


class Lookup:
    """Finds on the CPU what the device would find."""

    name = "lookup"

    def __init__(self, world):
        self.world, self.asked = world, 0

    def start(self, requests):
        """Do nothing."""

    stop = observe = start

    def propose(self, requests, budget):
        self.asked += 1
        made = self.world.drafts(self.world.lookups)
        return Proposal.of([chain(row[:n]) for row, n in zip(made, budget.max_drafts, strict=True)])


class World:
    """Requests, and drafters that are right with known chances.

    lookups: the chance that a draft of the device is right if the one before it is, of all
        requests or of each
    model: the same of a draft model, if there is one
    wait: seconds of a step that is not launched early
    row: seconds of a further row
    """

    def __init__(self, lookups, batch=1, model=None, wait=0.3, row=0.004, **options):
        self.rng, self.now = np.random.default_rng(0), 0.0
        self.lookups, self.wait, self.row, self.batch = lookups, wait, row, batch
        self.model = None if model is None else Model(self, model)
        limits = Limits(launches_early=True)
        self.lookup, models = Lookup(self), [self.model] if self.model else []
        self.control = Control(
            {"lookup": self.lookup}, models, clock=lambda: self.now, limits=limits, **options
        )
        self.feasible = Feasible(frozenset([NAME]))
        for rows in (1, 2, 4, 8, 16, 32, 64, 128):
            self.control.calibrate(rows, self.seconds(rows), [PASS_SECONDS])
        sampling = SamplingParams(max_tokens=10**6)
        self.requests = [Request(i, (1, 2, 3), sampling, 0) for i in range(batch)]
        self.control.start(self.requests)
        self.budget = Budget(np.full(batch, K), "match", KeyedCoins(), trees=False)
        self.text = self._next()

    def seconds(self, rows):
        return 1.0 + self.row * max(0, rows - self.batch)

    def _next(self):
        return self.rng.integers(0, 30_000, (self.batch, K + 1))

    def drafts(self, right):
        """Return drafts of the coming text, [B, K]. right: the chance of each"""
        hits = self.rng.random((self.batch, K)) < np.broadcast_to(right, self.batch)[:, None]
        return np.where(hits, self.text[:, :K], WRONG)

    def step(self):
        """Make one step. Return how many drafts each request had, and whether it was early."""
        control, self.text = self.control, self._next()
        decision = control.decide_early(self.requests, self.budget.max_drafts, self.feasible)
        early = decision is not None
        if not early:
            self.now += self.wait
            decision = control.decide(self.requests, self.budget, self.feasible)
        elif control.scores_unused(getattr(decision, "drafter", "")):
            control.score_unused(self.requests, self.budget, self.feasible)
        widths, made, drafts = np.zeros(self.batch, np.int64), None, None
        if isinstance(decision, CpuDrafts):
            drafts, widths = decision.proposal.drafts(), decision.proposal.num_drafts
            drafts = [list(draft.tokens) for draft in drafts]
        elif isinstance(decision, DeviceDrafts):
            made, widths = self.drafts(self.lookups)[:, : decision.width], decision.num_drafts
            drafts = [row[:n] for row, n in zip(made.tolist(), widths, strict=True)]
        self.now += self.seconds(self.batch + int(widths.sum()))
        outcomes = []
        for r, request in enumerate(self.requests):
            own = drafts[r] if drafts else []
            wrong = [i for i, token in enumerate(own) if token != self.text[r, i]]
            right = wrong[0] if wrong else len(own)
            tokens = tuple(self.text[r, : right + 1].tolist())
            outcomes.append(
                Outcome(request, tokens, tuple(range(right + 1)), len(own), right, None)
            )
        outcomes = Outcomes.of(outcomes)
        control.observe(Report(outcomes, decision, early, self.now, made))
        outcomes.apply()
        control.meanwhile()
        return widths, early

    def run(self, steps):
        """Return the drafts of each request, the share of early steps, and tokens per second."""
        began = self.now, sum(len(request.output) for request in self.requests)
        made = [self.step() for _ in range(steps)]
        tokens = sum(len(request.output) for request in self.requests) - began[1]
        early = sum(is_early for _, is_early in made) / steps
        return np.array([widths for widths, _ in made]), early, tokens / (self.now - began[0])
