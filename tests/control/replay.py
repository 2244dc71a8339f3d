"""Recorded answers played through again: any drafter, any number of drafts, with measured times.

The traces have what a real target wrote and what a real draft model said at every position of it;
suffix and n-gram lookups are run for real. `benchmarks/record_traces.py` made them.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from outrider.control import Limits, adaptive_control
from outrider.control.decision import CpuDrafts, DeviceDrafts, Feasible, Report
from outrider.core import (
    Budget,
    Draft,
    KeyedCoins,
    Outcome,
    Outcomes,
    PointMass,
    Proposal,
    Request,
    SamplingParams,
)
from outrider.drafters import NgramDrafter, SuffixDrafter
from outrider.kernels.ngram_match import ngram_match
from outrider.serving.profile import LOOKUP

FILE = Path(__file__).parent / "traces.json.gz"
MOST = 12
"""Drafts of a request in a step."""

NOTHING = Feasible()

FIXED = ("plain", "suffix 4", "suffix 12", "model 2", "model 4", "model 8")
"""Who drafts, and how much; with the options that they have by default."""


@lru_cache(maxsize=1)
def recorded():
    return json.loads(gzip.decompress(FILE.read_bytes()))


class Times:
    """Seconds of passes, between the measured ones by straight lines, and never falling."""

    def __init__(self, measured: dict[str, float]) -> None:
        self.rows, self.heights = [], []
        for rows, seconds in sorted((int(rows), seconds) for rows, seconds in measured.items()):
            self.rows.append(rows)
            self.heights.append(max([seconds, *self.heights[-1:]]))

    def __call__(self, rows: int) -> float:
        right = bisect_left(self.rows, rows)
        if right == 0:
            return self.heights[0]
        if right == len(self.rows):  # beyond: as steep as from the first to the last
            right -= 1
            left = 0
        else:
            left = right - 1
        (x0, x1), (y0, y1) = (
            (self.rows[left], self.rows[right]),
            (self.heights[left], self.heights[right]),
        )
        return y0 + (y1 - y0) * (rows - x0) / max(1, x1 - x0)


@dataclass
class Player(Request):
    """A request whose answer is known."""

    trace: dict = None
    step = 0

    @property
    def left(self) -> list[int]:
        return self.trace["output"][len(self.output) :]

    def drafts(self) -> list[list[float]]:
        """What the draft model says next."""
        return self.trace["drafts"][len(self.output) - 1]


class RecordedModel:
    """Says what the draft model said; its passes take time. As `ModelDrafter`, with siblings."""

    name = "model"

    def __init__(self, theatre, siblings: bool = False, min_survival: float = 0.6) -> None:
        self.theatre, self.siblings, self.min_survival = theatre, siblings, min_survival
        self.read = {}

    def start(self, requests):
        self.read |= {request.id: request.length - 1 for request in requests}

    def stop(self, requests):
        for request in requests:
            self.read.pop(request.id, None)

    def observe(self, outcomes):
        for outcome in outcomes:
            kept = outcome.request.length + outcome.num_accepted_drafts
            self.read[outcome.request.id] = min(self.read[outcome.request.id], kept)

    def unread(self, request):
        return max(1, request.length - self.read[request.id])

    def ready(self, request):
        return True

    def propose(self, requests, budget):
        depth = [0] * len(requests)
        survival = [1.0] * len(requests)
        share = budget.min_gain / max(1, sum(k > 0 for k in budget.max_drafts))
        least = max(self.min_survival, share / 2)
        while True:
            eager = [
                r
                for r, most in enumerate(budget.max_drafts)
                if depth[r] < min(most, len(requests[r].drafts())) and survival[r] >= least
            ]
            if not eager or sum(survival[r] for r in eager) < budget.min_gain:
                break
            # each reads its last draft, and before that what it has not read
            self.theatre.seconds += self.theatre.draft(
                sum(1 if depth[r] else self.unread(requests[r]) for r in eager)
            )
            for r in eager:
                self.read[requests[r].id] = requests[r].length + depth[r]
                confidence = requests[r].drafts()[depth[r]][1]
                survival[r] *= (
                    budget.chances([requests[r]], [confidence])[0] if budget.chances else confidence
                )
                depth[r] += 1
        return Proposal.of(
            [self.tree(*each) for each in zip(requests, depth, budget.max_drafts, strict=True)]
        )

    def tree(self, request, depth, most):
        said = request.drafts()[:depth]
        siblings = [(i - 1, e) for i, e in enumerate(said)][: (most - depth) * self.siblings]
        return Draft(
            tuple(int(e[0]) for e in said) + tuple(int(e[2]) for _, e in siblings),
            tuple(range(-1, depth - 1)) + tuple(parent for parent, _ in siblings),
            PointMass(),
            tuple(e[1] for e in said) + tuple(e[3] for _, e in siblings),
        )


class Theatre:
    """B requests at a time, one after the other from a list of traces, and a clock."""

    most, trees = MOST, True

    def __init__(self, traces, batch: int, warm: int = 0) -> None:
        self.waiting, self.batch = list(traces), batch
        self.warm = warm  # requests that have to be over before anything counts
        self.verify, self.draft = (Times(recorded()["times"][name]) for name in ("verify", "draft"))
        self.seconds, self.tokens, self.numbers = 0.0, 0, 0
        self.before = 0.0, 0
        self.on_stage: list[Player] = []

    def clock(self) -> float:
        return self.seconds

    def enter(self) -> list[Player]:
        """Fill the batch. Returns who is new; nobody enters when no full batch is left."""
        new = []
        while len(self.on_stage) < self.batch and self.waiting:
            trace = self.waiting.pop(0)
            self.numbers += 1
            new.append(
                Player(
                    id=self.numbers,
                    prompt=tuple(trace["prompt"]),
                    sampling=SamplingParams(),
                    seed=0,
                    output=trace["output"][:1],
                    trace=trace,
                )
            )
            self.on_stage.append(new[-1])
        return new

    def propose(self, drafter, budget):
        """Return what is verified in this step."""
        return drafter.propose(self.on_stage, budget)

    def observe(self, drafter, outcomes):
        """Show the drafter what was emitted."""
        drafter.observe(outcomes)

    @property
    def is_full(self) -> bool:
        return len(self.on_stage) == self.batch

    def play(self, drafter) -> float:
        """Return tokens a second, as long as the batch is full."""
        drafter.start(self.enter())
        while self.is_full:
            most = tuple(min(self.most, len(r.left) - 1) for r in self.on_stage)
            proposal = self.propose(drafter, Budget(most, "match", KeyedCoins(), self.trees))
            self.seconds += self.verify(proposal.num_rows)
            outcomes = []
            for request, draft in zip(self.on_stage, proposal.drafts(), strict=True):
                rows, left = [0], request.left
                for node, (token, parent) in enumerate(
                    zip(draft.tokens, draft.parents, strict=True)
                ):
                    if parent + 1 == rows[-1] and token == left[len(rows) - 1]:
                        rows.append(node + 1)
                tokens = tuple(left[: len(rows)])
                outcomes.append(
                    Outcome(request, tokens, tuple(rows), len(draft.tokens), len(rows) - 1, None)
                )
                self.tokens += len(tokens)
            self.observe(drafter, outcomes)
            for outcome in outcomes:
                outcome.apply()
            gone = [r for r in self.on_stage if len(r.left) < 2]
            self.on_stage = [r for r in self.on_stage if len(r.left) >= 2]
            if 0 < self.warm <= len(gone):
                self.before = self.seconds, self.tokens
            self.warm -= len(gone)
            drafter.stop(gone)
            drafter.start(self.enter())
        seconds, tokens = self.before
        return (self.tokens - tokens) / (self.seconds - seconds)


class Served(Theatre):
    """The same as an engine does it: control decides, and a step is launched and reported.

    made: the drafts that the device made in this step; None if it made none
    """

    launches_early, made = False, None

    def propose(self, control, budget):
        """Return what is verified in this step."""
        self.launched, self.early = self.launch(control, budget)
        return proposal_of(self.launched, self.batch)

    def launch(self, control, budget):
        """Return what is launched, and whether that is early."""
        decision = control.decide(self.on_stage, budget, NOTHING)
        control.meanwhile()
        return decision, False

    def observe(self, control, outcomes):
        """Report the step."""
        done = Outcomes.of(outcomes)
        control.observe(Report(done, self.launched, self.early, self.seconds, self.made))


def proposal_of(decision, batch):
    """Return the drafts that the CPU decided for."""
    return decision.proposal if isinstance(decision, CpuDrafts) else Proposal.empty(batch)


class Overlapped(Served):
    """The same on a device with a GPU's times, by an engine that launches plain steps early.

    Passes take what they do on the paced device (docs/paced.md), a step with drafts waits for the
    CPU, and so does each pass of the draft model. How long was read from runs there.
    """

    most, trees, launches_early = 24, False, True
    max_unread, max_catch_up = 8, 512
    scores_every = 16

    def __init__(self, traces, batch: int, warm: int = 0) -> None:
        super().__init__(traces, batch, warm)
        self.verify = lambda rows: 5.9e-3 + 21e-6 * rows
        self.draft = lambda rows: 2.8e-3 + 3.2e-6 * rows + 80e-6 * batch
        self.wait = 1.0e-3 + 0.1e-3 * min(batch, 16) + 0.03e-3 * max(0, batch - 16)
        self.queued, self.unscored = 0.0, 0

    def launch(self, control, budget):
        """Return what is launched, and whether that is early. Then drafts are scored meanwhile."""
        feasible = self.feasible(control)
        early = self.decide_early(control, budget.max_drafts, feasible)
        if early is None:
            self.seconds += self.wait / 3
            decision = control.decide(self.on_stage, budget, feasible)
            self.seconds += self.wait * 2 / 3 + self.queued
            self.queued = 0.0
            control.meanwhile()
            return decision, False
        control.meanwhile()
        if control.scores_unused(early.drafter if isinstance(early, DeviceDrafts) else ""):
            self.unscored += 1
            if self.unscored * self.scores_every > self.batch:
                self.unscored = 0
                control.score_unused(self.on_stage, budget, feasible)
        return early, True

    def feasible(self, control):
        """Return what can be done in a step."""
        return NOTHING

    def decide_early(self, control, most, feasible):
        """Return what is launched before the last outcome is known; None for nothing."""
        return control.decide_early(self.on_stage, most, feasible)


class OnDevice(Overlapped):
    """The device may draft too: by a lookup, or with the draft model as a head.

    drafter: the one that made drafts on the device in this step; "" if none did
    entered: the requests that the head has drafted for, in each step since it began
    """

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.drafter, self.entered = "", set()

    def feasible(self, control):
        """Return what can be done in a step: all that control may do on the device."""
        return Feasible(frozenset(control.device.arms))

    def decide_early(self, control, most, feasible):
        """Return what is launched before the last outcome is known; None for nothing.

        A head must have drafted for the same requests in the step before.
        """
        decision = super().decide_early(control, most, feasible)
        if isinstance(decision, DeviceDrafts) and decision.drafter in control.models:
            follows = self.drafter == decision.drafter
            if not follows or not {request.id for request in self.on_stage} <= self.entered:
                return None
        return decision

    def propose(self, control, budget):
        """Return what is verified in this step."""
        proposal = super().propose(control, budget)
        self.drafter, self.made = "", None
        if not isinstance(self.launched, DeviceDrafts):
            return proposal
        self.drafter, width = self.launched.drafter, self.launched.width
        if self.drafter in control.models:
            self.made = said_by_head(self.on_stage, width)
            self.seconds += self.draft(self.batch) * width
            self.entered = {request.id for request in self.on_stage}
        else:
            self.made = looked_up(self.on_stage, width)
        widths = np.minimum(self.launched.num_drafts, budget.max_drafts)
        places = np.concatenate([np.arange(width) for width in widths])
        tokens = self.made[np.repeat(np.arange(self.batch), widths), places]
        return Proposal.found(tokens, widths, places - 1, np.ones(len(places)), trees=False)


def looked_up(requests, width):
    """Return what a lookup on the device drafts, [B, width]."""
    texts = [[*request.prompt, *request.output] for request in requests]
    lengths = [len(text) for text in texts]
    tokens = torch.zeros(len(texts), max(lengths), dtype=torch.int64)
    for line, text in zip(tokens, texts, strict=True):
        line[: len(text)] = torch.tensor(text)
    limits = torch.full((len(texts),), width)
    return ngram_match(tokens, torch.tensor(lengths), limits, width, **LOOKUP)[0].numpy()


def said_by_head(requests, width):
    """Return what the draft model drafts as a head, [B, width]; 0 where nothing was recorded."""
    made = np.zeros((len(requests), width), np.int64)
    for line, request in zip(made, requests, strict=True):
        said = [int(each[0]) for each in request.drafts()[:width]]
        line[: len(said)] = said
    return made


class OverlappedModel(RecordedModel):
    """Must catch up with text that it did not read. Nobody waits for that but the next pass."""

    def ready(self, request):
        return self.unread(request) <= Overlapped.max_unread

    def catch_up(self, requests):
        left = Overlapped.max_catch_up
        for request in requests:
            read = min(left, request.length - 1 - self.read[request.id])
            self.read[request.id] += read
            left -= read
        read = Overlapped.max_catch_up - left
        self.theatre.queued += self.theatre.draft(read) if read else 0.0
        return read


def adaptive(theatre, **options):
    """Control that knows how long passes take, as that of a server."""
    model = OverlappedModel if isinstance(theatre, Overlapped) else RecordedModel
    options = {"limits": Limits(launches_early=theatre.launches_early), **options}
    control = adaptive_control(
        model(theatre, siblings=theatre.trees, min_survival=0.0), clock=theatre.clock, **options
    )
    calibrate(control, theatre)
    return control


def calibrate(control, theatre):
    for rows in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128):
        control.calibrate(rows, theatre.verify(rows), [theatre.draft(rows)])


class Fixed:
    """One drafter and so many drafts."""

    def __init__(self, drafter, count) -> None:
        self.drafter, self.count = drafter, count
        self.start, self.stop, self.observe = drafter.start, drafter.stop, drafter.observe

    def propose(self, requests, budget):
        most = tuple(min(self.count, k) for k in budget.max_drafts)
        chains = Budget(most, budget.rule, budget.coins, trees=False)
        drafts = self.drafter.propose(requests, chains).drafts()
        return Proposal.of(
            [d.keep(range(min(k, len(d.tokens)))) for d, k in zip(drafts, most, strict=True)]
        )


class Oracle:
    """Knows what will be accepted: drafts exactly that, of whom it pays to ask.

    In each step it tries all depths of the model and all numbers of drafts that will be accepted,
    and takes what makes the most tokens a second, or, given a price, the most tokens when every
    second costs so many.
    """

    def __init__(self, theatre, free, price: float | None = None) -> None:
        self.theatre, self.free, self.price = theatre, free, price

    def start(self, requests):
        for drafter in self.free:
            drafter.start(requests)

    def stop(self, requests):
        for drafter in self.free:
            drafter.stop(requests)

    def observe(self, outcomes):
        for drafter in self.free:
            drafter.observe(outcomes)

    def propose(self, requests, budget):
        batch = len(requests)
        free = [0] * batch
        for drafter in self.free:
            for r, draft in enumerate(drafter.propose(requests, budget).drafts()):
                free[r] = max(free[r], right(draft.tokens, draft.parents, requests[r].left))
        model = [
            min(right_of_model(r), k) for r, k in zip(requests, budget.max_drafts, strict=True)
        ]
        best, plan = None, None
        for depth in range(max(model) + 1):
            gains = [max(f, min(m, depth)) for f, m in zip(free, model, strict=True)]
            users = sum(min(m, depth) > f for f, m in zip(free, model, strict=True))
            passes = depth * self.theatre.draft(users) if users else 0.0  # it never falls behind
            for rows in range(sum(gains) + 1):
                seconds = self.theatre.verify(batch + rows) + passes
                tokens = batch + rows
                worth = tokens / seconds if self.price is None else tokens - self.price * seconds
                if best is None or worth > best:
                    best, plan = worth, (gains, rows, passes)
        gains, rows, passes = plan
        self.theatre.seconds += passes
        drafts = []
        for request, gain in zip(requests, gains, strict=True):
            count = min(gain, rows)
            rows -= count
            drafts.append(
                Draft(tuple(request.left[:count]), tuple(range(-1, count - 1)), PointMass())
            )
        return Proposal.of(drafts)


def right(tokens, parents, text) -> int:
    """How many drafts of the best path are the text."""
    depths = {-1: 0}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=False)):
        if parent in depths and depths[parent] < len(text) and token == text[depths[parent]]:
            depths[node] = depths[parent] + 1
    return max(depths.values())


def right_of_model(request) -> int:
    """How many drafts of the model are the text, the last of them maybe the next best token."""
    said, text = request.drafts(), request.left
    chain = right([int(e[0]) for e in said], range(-1, MOST), text)
    beside = chain < min(len(said), len(text)) and int(said[chain][2]) == text[chain]
    return chain + beside


def traces_of(kind, batch):
    """The traces of a kind, mixed ones in turn, often enough for a while at this batch."""
    traces = recorded()["traces"]
    own = [t for t in traces if kind in ("mixed", t["kind"])]
    if kind == "mixed":
        own = own[::2] + own[1::2]
    return (own * (4 * batch))[: max(12, 4 * batch)]


def speeds(kind, batch):
    """Tokens a second of every method, once the first requests are over."""
    traces, warm = traces_of(kind, batch), max(4, batch)

    def play(make, stage=Theatre):
        theatre = stage(traces, batch, warm)
        return theatre.play(make(theatre))

    def fixed(name):
        who, _, count = name.partition(" ")
        if who == "suffix":
            return play(lambda theatre: Fixed(SuffixDrafter(), int(count)))
        return play(lambda theatre: Fixed(RecordedModel(theatre), int(count or 0)))

    return {
        **{name: fixed(name) for name in FIXED},
        "adaptive": play(adaptive, Served),
        "oracle": best_oracle(traces, batch, warm),
    }


def best_oracle(traces, batch, warm) -> float:
    """The oracle's speed, at the price at which it is the highest."""

    def play(price=None):
        theatre = Theatre(traces, batch, warm)
        free = [SuffixDrafter(min_vote=0.0), NgramDrafter()]
        return theatre.play(Oracle(theatre, free, price))

    greedy = play()
    return max(greedy, *(play(share * greedy) for share in (0.9, 1.0)))
