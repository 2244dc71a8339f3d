"""The adaptive drafter: chooses in each step who drafts, for which requests, and how much.

The order of a step:

1. *Free drafters* (the suffix lookup) propose. This takes microseconds. Calibrated acceptance says
   how likely each of their drafts is to be accepted.
2. *A draft model or head* is considered for the requests that the free drafters serve worse: the
   tokens that it is expected to add, against the measured time of its passes (`model_choice`). Of
   several, the one that promises most is called.
3. *The offers are joined* into one tree per request, or one chain if the host cannot verify trees
   (`plan`).
4. *The drafts with the highest goodput are verified*: tokens per second, by measured times
   (`policy`). Plain decoding is one of the options, and drafting must beat it by a margin.
5. *The step is learned from* while the device runs the next pass (`meanwhile`): its time (`cost`),
   and which drafts were right, used or not (`scoring`).

The host need not report times. The target's pass lasts from a proposal to its outcome, and the
draft model's passes are timed inside `propose`.

A host that can launch plain steps ahead never makes the device wait in them. While drafts do not
pay for their wait, control is *asleep*: the host launches plain steps, and control only looks for
drafts while the device works.

Exploration: a batch size that was never seen starts with a plain step. While drafts gain little,
every CHECK-th step is plain. A draft model that is not called has an optimistic estimate, which
grows until it is tried; how much time tries may cost is limited (`model_choice`). The slowdown
guard compares measured totals with plain decoding, whatever was planned.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.control.acceptance import Acceptance
from outrider.control.cost import StepCost
from outrider.control.curve import ROW_BUCKETS
from outrider.control.device import NAME as DEVICE
from outrider.control.device import DeviceChoice
from outrider.control.model_choice import ModelChoice, PassingDrafter, Situation
from outrider.control.plan import Offer, Plan, join
from outrider.control.policy import NO_INDICES, best_goodput, choose
from outrider.control.scoring import score
from outrider.control.slowdown import SlowdownGuard
from outrider.control.step import Done, Proposed, Step, TraceFile
from outrider.core import Budget, Drafter, Floats, Ints, Outcome, Outcomes, Proposal, Request
from outrider.drafters import AheadDrafter, SuffixDrafter
from outrider.drafters.states import SharedStates

MARGIN = 0.05
"""Share by which drafting must beat plain decoding, and a step with the model one without."""

CHECK, CLOSE = 16, 1.2
"""While a plan promises less than CLOSE times plain decoding, every CHECK-th step is plain. The
time of plain steps must be recent, because plans are compared with it."""


class AdaptiveDrafter:
    """Chooses, for each request and step, who drafts and how much is verified.

    free: drafters that cost next to nothing, by name
    model: a drafter that costs passes, several of them with different names, or None
    margin: share by which a plan must beat a simpler one
    clock: returns seconds, from any origin
    row_buckets: sizes of the host's captured graphs, if it has any
    on_step: called with each step that is over
    device: decides whether the device makes the drafts; given as whether it may, where it can
    models: what is known about each of the drafters that cost passes, by name
    padded: whether the last proposal should be verified by a padded pass: see `StepCost`
    hidden_layers: what the models read of the target, if they are heads
    is_asleep: whether drafts gain less than the wait for them costs. A host that launches ahead
        (`cost.launches_ahead`) then launches plain steps, and calls `look` while the device works
    """

    name = "adaptive"

    def __init__(
        self,
        free: Mapping[str, Drafter],
        model: PassingDrafter | Sequence[PassingDrafter] | None = None,
        margin: float = MARGIN,
        clock: Callable[[], float] = time.perf_counter,
        row_buckets: Sequence[int] = ROW_BUCKETS,
        on_step: Callable[[Step], None] | None = None,
        device: bool = True,
    ) -> None:
        self.acceptance, self.cost = Acceptance(), StepCost(row_buckets)
        self.slowdown_guard = SlowdownGuard()
        self.is_asleep, self.padded = False, False
        self.free, self._margin, self._clock = dict(free), margin, clock
        self._on_step = on_step
        for name in self.free:
            self.acceptance.add(name)
        self._lookups = {n for n, d in self.free.items() if not isinstance(d, AheadDrafter)}
        self.device = DeviceChoice(self.acceptance, self.cost, margin) if device else None
        passing = _several(model)
        self.models = {
            drafter.name: ModelChoice(drafter, self.acceptance, self.cost, margin, clock)
            for drafter in passing
        }
        if len(self.models) < len(passing) or self.models.keys() & self.free.keys():
            raise ValueError(f"drafters need different names: {[d.name for d in passing]}")
        self._drafters: dict[str, Drafter] = self.free | {model.name: model for model in passing}
        self._states = SharedStates(self._drafters)
        self.hidden_layers = self._states.layers
        self._since_plain: Counter[int] = Counter()  # steps since a plain one, by row bucket
        # the step that is under way, the one before it, and the one that is not learned from yet
        self._step: Step | None = None
        self._offers: list[Offer] = []
        self._rows: Ints = NO_INDICES
        self._last = Proposed((), Proposal.empty(0), NO_INDICES, ())
        self._done: Done | None = None
        # of a step, to learn from: what it did, and who drafted
        self._drafted_on_device: tuple[Outcomes, str] | None = None
        self._observed: float | None = None  # when the last outcome came, if nothing came between

    def start(self, requests: Sequence[Request]) -> None:
        """Introduce the requests to every drafter."""
        if requests:
            self._observed = None  # their prompts were read
        for drafter in self._drafters.values():
            drafter.start(requests)

    def limit_vocabulary(self, vocab_size: int) -> None:
        """Tell the drafters that can leave out drafts beyond the target's vocabulary."""
        for drafter in self.free.values():
            if isinstance(drafter, AheadDrafter):
                drafter.limit_vocabulary(vocab_size)

    def stop(self, requests: Sequence[Request]) -> None:
        """Forget the requests, here and in every drafter."""
        self._learn()
        for drafter in self._drafters.values():
            drafter.stop(requests)
        for request in requests:
            self.acceptance.forget(request.id)
            for model in self.models.values():
                model.forget(request)

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Return the drafts that are expected to emit the most tokens per second."""
        step = self._begin(requests)
        self._ask_free(requests, budget)
        plan, nodes = self._choose(requests, budget, join(self._offers, budget), step)
        proposal: Proposal = Proposal.empty(len(requests))
        if len(nodes):
            proposal = plan.tree.take(nodes)
        self._last = Proposed(requests, proposal, plan.sources[nodes], self._offers)
        step.rows, step.proposed = proposal.num_rows, self._clock()
        self.padded = self.cost.prefers_padded(step.rows, step.context, step.requests)
        return proposal

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Tell every drafter what was emitted. Control learns from the step in `meanwhile`."""
        self._learn()
        self._observed = now = self._clock()
        done = Outcomes.of(outcomes)
        step, self._step = self._step, None
        on_device = done.num_drafts.any() and (step is None or not step.speculated)
        if self.device is not None and on_device:
            self._drafted_on_device = done, self.device.drafted
        # if a request was taken away meanwhile, nothing is learned from the step
        if step is not None and step.requests == len(done.requests):
            step.seconds, step.tokens = now - step.t, len(done.tokens)
            if self.device is not None and on_device:
                step.rows += int(done.num_drafts.sum())
                step.on_device = self.device.drafted
            step.padded = self.padded and step.speculated and not step.on_device
            self._done = Done(step, self._offers, self._rows, done)
            if self._on_step is not None:
                step.drafters = Counter(name for name in self._last.names() if name)
        for name, drafter in self._drafters.items():
            drafter.observe(self._states.of(name, done))

    def meanwhile(self) -> None:
        """Do what can wait: learn from the last step, and let drafters do theirs."""
        self._learn()
        self.cost.refresh()
        for model in self.models.values():
            model.cost.passes.refresh()
        for drafter in self.free.values():
            if (work := getattr(drafter, "meanwhile", None)) is not None:
                work()

    def _learn(self) -> None:
        """Learn from the last step: its time, and which drafts were right, used or not."""
        if self.device is not None and self._drafted_on_device is not None:
            self.device.learn(*self._drafted_on_device)
            self._drafted_on_device = None
        if self._done is None:
            return
        done, self._done = self._done, None
        # passes that catch up are queued before the target's: such a step's time is not its own
        if not done.step.caught_up:
            self._learn_times(done.step)
        plain = self.cost.plain(done.step.context, done.step.requests)
        for model in self.models.values():
            model.learn(done.step, plain)
        if self._on_step is not None:
            self._on_step(done.step)
        step = done.step
        if self.device is not None and step.on_device and step.ahead:
            self.device.learn_time(step, int(done.outcomes.num_drafts.max()))
        if self.device is not None and not done.step.caught_up:
            self.device.learn_reached(step)
        for offer in done.offers:
            score(offer, self.acceptance[offer.name], done.rows, done.outcomes)
            if self.device is not None:
                arm = DEVICE if offer.name in self._lookups else offer.name
                if arm != step.on_device:  # it learns from its own drafts
                    self.device.learn_from(arm, offer, done.rows, done.outcomes)

    def look(self, requests: Sequence[Request], budget: Budget) -> None:
        """Make the drafts of a step that was launched without them, while the device works.

        They are only scored against the emitted tokens. Control wakes up if they would have gained
        more than the waits for them cost.
        """
        batch, step = len(requests), self._begin(requests)
        step.ahead = step.follows
        self._ask_free(requests, budget)
        plan = join(self._offers, budget)
        self._last = Proposed(requests, Proposal.empty(batch), NO_INDICES, self._offers)
        step.rows, step.proposed = batch, step.t
        if self.slowdown_guard.is_tripped or not self._has_seen(batch):
            self._stop_device()
            return
        now = self._situation(requests, budget, plan, step)
        # a step with drafts waits, and so does the step after it
        now.seconds[batch + 1 :] += self.cost.waiting(step.context, batch)
        # the step emits a token for the first place: the next step could verify the others
        later = plan.survival[plan.tree.depths > 1]
        plain = batch / float(now.seconds[batch])
        best = best_goodput(later, batch, now.seconds)
        should_wake = best > (1 + self._margin) * plain
        if self.device is not None and self.device.is_best(now, step.context, best):
            should_wake = False
            now.seconds[batch] = batch / self.device.goodput  # a model has to beat this
        for model in self.models.values():
            if model.name == self._on_device:
                continue  # it drafts already
            model.estimate(now)
            should_wake = should_wake or model.should_wake(now)
        if should_wake:
            self._stop_device()
        self.is_asleep = not should_wake and not self._on_device

    def used(self, request: Request) -> str:
        """Return who drafted for a request in the last step; "" if nobody did."""
        names = zip(self._last.requests, self._last.names(), strict=True)
        return next((name for other, name in names if other is request), "")

    def used_by(self, requests: Sequence[Request]) -> list[str]:
        """Return who drafted for each of the last step's requests; "" if nobody did."""
        if self._last.requests is requests:
            return self._last.names()
        return [self.used(request) for request in requests]

    def _begin(self, requests: Sequence[Request]) -> Step:
        context, before = sum([request.length for request in requests]), self._observed
        t = self._clock() if before is None else before
        self._step = step = Step(t, len(requests), context, follows=before is not None)
        self._rows = self.acceptance.rows([request.id for request in requests])
        self._offers = []
        if not self._has_seen(step.requests):
            self._learn()  # the step that is not learned from yet may have been the first
        return step

    def _has_seen(self, batch: int) -> bool:
        """Say whether the time of a plain step of so many requests is known."""
        return self.cost.verify.has_seen(batch) or self.cost.ahead.has_seen(batch)

    def _ask_free(self, requests: Sequence[Request], budget: Budget) -> None:
        if not self.slowdown_guard.is_tripped:
            for name, drafter in self.free.items():
                self._offers.append(self._offer(name, drafter.propose(requests, budget)))

    def _offer(self, name: str, drafts: Proposal) -> Offer:
        """Return the offer made of a drafter's proposal, with the chance of each draft."""
        known, rows, sure = self.acceptance[name], self._rows[drafts.owners], drafts.confidences
        chances = known.first.of(rows, sure)
        if not drafts.is_chain:
            beside = drafts.ranks.nonzero()[0]
            chances[beside] = known.sibling.of(rows[beside], sure[beside])
        return Offer(name, drafts, chances)

    def _situation(
        self, requests: Sequence[Request], budget: Budget, plan: Plan, step: Step
    ) -> Situation:
        most_rows = len(requests) + int(budget.max_drafts.sum())
        seconds = self.cost.table(most_rows, step.context, len(requests))
        return Situation(requests, self._rows, budget, plan, seconds)

    def _choose(
        self, requests: Sequence[Request], budget: Budget, plan: Plan, step: Step
    ) -> tuple[Plan, Ints]:
        """Return the drafts to verify, and their plan: the draft model may have added to it."""
        batch = len(requests)
        self.is_asleep = self.cost.launches_ahead
        if self.slowdown_guard.is_tripped or not self._has_seen(batch):
            self._stop_device()
            return plan, NO_INDICES
        now = self._situation(requests, budget, plan, step)
        best = choose(plan.tree, plan.survival, now.seconds, self._margin)
        goodput, users = best.goodput, NO_INDICES
        if self.device is not None and self.device.is_best(now, step.context, goodput):
            goodput = self.device.goodput
        model = self._promising(now, goodput)
        if model is not None:
            goodput, users = model.users(now, goodput, step)
        if len(users):
            self._stop_device()
        if self._on_device:
            self.is_asleep = False
            return plan, NO_INDICES
        if self._must_check_plain(goodput, batch, now.seconds):
            return plan, NO_INDICES
        self.is_asleep = self.is_asleep and not len(best.nodes) and not len(users)
        if model is not None and len(users):
            drafts = model.draft(now, users, goodput, step)
            # the model's offer goes first: a draft that others propose too is counted as its own
            self._offers.insert(0, self._offer(model.name, drafts))
            plan = join(self._offers, budget)
            # the model has run, but its time is part of the step
            best = choose(plan.tree, plan.survival, now.seconds + step.drafted)
        return plan, best.nodes

    @property
    def _on_device(self) -> str:
        """Who drafts on the device; "" if nobody does."""
        return self.device.drafter if self.device is not None and self.device.widths else ""

    def _stop_device(self) -> None:
        if self.device is not None:
            self.device.stop()

    def _promising(self, now: Situation, without: float) -> ModelChoice | None:
        """Return the draft model that may bring the most, if there is any.

        without: goodput without one
        """
        models = list(self.models.values())
        for model in models:
            model.estimate(now)
        if len(models) < 2:
            return models[0] if models else None
        return max(models, key=lambda model: model.bid(now, without))  # of equals the first

    def _must_check_plain(self, goodput: float, batch: int, seconds: Floats) -> bool:
        """Say whether the step should be plain, to measure plain decoding again."""
        bucket = self.cost.verify.row_bucket(batch)
        self._since_plain[bucket] += 1
        is_close = goodput * float(seconds[batch]) < CLOSE * batch
        return is_close and self._since_plain[bucket] >= CHECK

    def _learn_times(self, step: Step) -> None:
        if step.on_device not in self.models:  # a head's passes are part of its time
            given = step.rows, step.context, step.target_seconds, step.requests, step.padded
            self.cost.observe(*given, step.ahead)
        if step.follows and not step.ahead and not step.draft_passes:
            self.cost.host.observe(step.requests, step.host_seconds)
        if step.ahead or not (step.speculated or self.cost.launches_ahead):
            self._since_plain[self.cost.verify.row_bucket(step.rows)] = 0
        plain = self.cost.plain(step.context, step.requests) / step.requests
        self.slowdown_guard.observe(step.speculated, step.seconds, step.tokens * plain)


def _several(model: PassingDrafter | Sequence[PassingDrafter] | None) -> list[PassingDrafter]:
    if model is None:
        return []
    return list(model) if isinstance(model, Sequence) else [model]


def adaptive_drafter(
    model: PassingDrafter | Sequence[PassingDrafter] | None = None,
    trace: str | Path | None = None,
    ahead: str | Path | bool | None = None,
    **options: Any,
) -> AdaptiveDrafter:
    """Return an adaptive drafter over the suffix lookup and, if given, draft models and heads.

    The suffix lookup has no thresholds of its own here. Control learns which drafts to verify.

    trace: a file to which each step is appended, as one line of JSON
    ahead: the socket of a draft server, or true for the one where it is by default. What it has
        foreseen costs a step no time.
    options: of `AdaptiveDrafter`. `knots` is the former name of `row_buckets`, and still accepted.
    """
    if "knots" in options:
        if "row_buckets" in options:
            raise ValueError("knots is the former name of row_buckets: give row_buckets only")
        options["row_buckets"] = options.pop("knots")
    if trace is not None:
        options["on_step"] = TraceFile(trace)
    free: dict[str, Drafter] = {"suffix": SuffixDrafter(min_vote=0.0, min_match=2)}
    if ahead is not None and ahead is not False:
        free[AheadDrafter.name] = AheadDrafter(None if ahead is True else ahead)
    return AdaptiveDrafter(free, model, **options)
