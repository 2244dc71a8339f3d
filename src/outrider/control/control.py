"""Control: chooses in each step which drafter drafts, for which requests, and how much.

The order of a step:

1. *Free drafters* (the suffix lookup) propose. This takes microseconds. Calibrated acceptance says
   how likely each of their drafts is to be accepted.
2. *A draft model or head* is considered for the requests that the free drafters serve worse: the
   tokens that it is expected to add, against the measured time of its passes (`model_choice`). Of
   several, the one that promises most is called.
3. *The offers are joined* into one tree per request, or one chain if the engine cannot verify trees
   (`plan`).
4. *The drafts with the highest goodput are verified*: tokens per second, by measured times
   (`policy`). Plain decoding is one of the options, and drafting must beat it by a margin.
5. *The step is learned from* while the device runs the next pass (`meanwhile`): its time (`cost`),
   and which drafts were right, used or not (`scoring`).

Values go in and come out (`decision`). The engine says what is feasible, control decides, and the
engine reports what it launched and what was emitted. The target's pass lasts from a decision to its
report, and the draft model's passes are timed inside `decide`.

An engine that launches plain steps early never makes the device wait in them. While drafts do not
pay for their wait, control is *asleep*: it decides early for plain steps, and only scores the
drafts that it would have made, while the device works.

Exploration: a batch size that was never seen starts with a plain step. While drafts gain little,
every PLAIN_CHECK_EVERY-th step is plain. A draft model that is not called has an optimistic
estimate, which grows until it is tried; how much time tries may cost is limited (`model_choice`).
The slowdown guard compares measured totals with plain decoding, whatever was planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.control.acceptance import Acceptance
from outrider.control.cost import StepCost
from outrider.control.curve import ROW_BUCKETS
from outrider.control.decision import (
    CpuDrafts,
    Decision,
    DeviceDrafts,
    Feasible,
    Limits,
    Plain,
    Report,
)
from outrider.control.device import DeviceChoice
from outrider.control.learning import Learning
from outrider.control.model_choice import Call, ModelChoice, PassingDrafter, Situation
from outrider.control.plan import Offer, Plan, join
from outrider.control.policy import NO_INDICES, best_goodput, choose
from outrider.control.step import NO_PASSES, Passes, Pending, Step, drafted_on_device
from outrider.core import Budget, Drafter, Ints, Request
from outrider.drafters import AheadDrafter
from outrider.drafters.states import SharedStates

MARGIN = 0.05
"""Share by which drafting must beat plain decoding, and a step with the model one without."""


@dataclass(frozen=True, eq=False)
class _Choice:
    """Which drafts of the CPU are verified.

    plan: all drafts
    nodes: those that are verified, as indices in the plan
    offers: that the plan was made of
    passes: what a draft model did for the step
    """

    plan: Plan
    nodes: Ints
    offers: Sequence[Offer]
    passes: Passes = NO_PASSES


class Control:
    """Decides, for each step and request, which drafter drafts and how much is verified.

    free: drafters that cost next to nothing, by name
    models: what is known about each of the drafters that cost passes, by name
    margin: share by which a plan must beat a simpler one
    clock: returns seconds, from any origin
    row_buckets: row counts at which time is measured; None for the sizes of the engine's captured
        graphs, if it has any
    on_step: called with each step that is over
    device: chooses drafts of the device; given as whether it may, where it can
    limits: what the engine can do
    cost: the time of a step without drafting
    hidden_layers: what the models read of the target, if they are heads
    """

    def __init__(
        self,
        free: Mapping[str, Drafter],
        models: Iterable[PassingDrafter] | None = None,
        margin: float = MARGIN,
        clock: Callable[[], float] = time.perf_counter,
        row_buckets: Sequence[int] | None = None,
        on_step: Callable[[Step], None] | None = None,
        device: bool = True,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        if row_buckets is None:
            row_buckets = self.limits.graph_sizes or ROW_BUCKETS
        self.acceptance, self.cost = Acceptance(), StepCost(row_buckets, self.limits)
        self.free, self.clock, self._margin = dict(free), clock, margin
        for name in self.free:
            self.acceptance.add(name)
        self.device = DeviceChoice(self.acceptance, self.cost, margin, device)
        passing = list(models or ())
        self.models = {
            drafter.name: ModelChoice(drafter, self.acceptance, self.cost, margin, clock)
            for drafter in passing
        }
        if len(self.models) < len(passing) or self.models.keys() & self.free.keys():
            raise ValueError(f"drafters need different names: {[d.name for d in passing]}")
        self._drafters: dict[str, Drafter] = self.free | {model.name: model for model in passing}
        self._states = SharedStates(self._drafters)
        self.hidden_layers = self._states.layers
        lookups = {n for n, d in self.free.items() if not isinstance(d, AheadDrafter)}
        self._learning = Learning(
            self.acceptance, self.cost, self.device, self.models, lookups, on_step
        )
        self.slowdown_guard = self._learning.slowdown_guard
        self._is_asleep = False
        self._pending: Pending | None = None  # the step that is under way
        self._observed: float | None = None  # when the last outcome came, if nothing came between

    # -- requests

    def start(self, requests: Sequence[Request]) -> None:
        """Introduce the requests to every drafter."""
        if requests:
            self._observed = None  # their prompts were prefilled
        for drafter in self._drafters.values():
            drafter.start(requests)

    def stop(self, requests: Sequence[Request]) -> None:
        """Forget the requests, here and in every drafter."""
        self._learning.learn()
        for drafter in self._drafters.values():
            drafter.stop(requests)
        for request in requests:
            self.acceptance.forget(request.id)
            for model in self.models.values():
                model.forget(request)

    # -- before serving

    def limit_vocabulary(self, vocab_size: int) -> None:
        """Let drafters leave out drafts beyond the target's vocabulary."""
        for drafter in self.free.values():
            if isinstance(drafter, AheadDrafter):
                drafter.limit_vocabulary(vocab_size)

    def calibrate(self, rows: int, seconds: float, draft_seconds: Sequence[float]) -> None:
        """Learn how long a pass of so many rows takes.

        seconds: of the target
        draft_seconds: of each model, as far as they were measured, in the order of `models`
        """
        self.cost.observe(rows, 0, seconds)
        for model, taken in zip(self.models.values(), draft_seconds, strict=False):
            model.calibrate(rows, taken)

    def add_to_device(self, names: Iterable[str]) -> None:
        """Let these models draft on the device too, where that is feasible."""
        for name in names:
            self.device.add(self.models[name])

    # -- a step

    def decide_early(self, requests: Sequence[Request]) -> Plain | DeviceDrafts | None:
        """Return what is decided without the last outcome; None if the outcome is needed.

        It changes nothing.
        """
        if (drafts := self.device.drafts(requests)) is not None:
            return drafts
        return Plain() if self._is_asleep else None

    def decide(self, requests: Sequence[Request], budget: Budget, feasible: Feasible) -> Decision:
        """Return what is expected to emit the most tokens per second."""
        begun = self._begin(requests, feasible)
        offers = self._free_offers(requests, budget, begun.rows)
        chosen = self._choose(requests, budget, feasible, begun, offers)
        nodes = chosen.nodes
        proposal = chosen.plan.tree.take(nodes) if len(nodes) else None
        self._pending = replace(
            begun, offers=chosen.offers, passes=chosen.passes, proposed=self.clock()
        )
        if proposal is None:
            return self.device.drafts(requests) or Plain()
        padded = self.cost.prefers_padded(
            proposal.num_rows, begun.context, begun.requests, feasible.padded_width
        )
        return CpuDrafts(proposal, chosen.plan.names(nodes, chosen.offers), padded)

    def score_unused(self, requests: Sequence[Request], budget: Budget, feasible: Feasible) -> None:
        """Make the drafts of a step that was launched without them, while the device works.

        They are only scored against the emitted tokens. Control wakes up if they would have gained
        more than the waits for them cost.
        """
        batch, begun = len(requests), self._begin(requests, feasible)
        offers = self._free_offers(requests, budget, begun.rows)
        self._pending = replace(begun, offers=offers, proposed=begun.t)
        if not self._may_draft(batch):
            self.device.stop()
            return
        now = self._situation(requests, budget, feasible, begun, join(offers, budget))
        seconds = now.seconds.copy()
        # a step with drafts waits, and so does the step after it
        seconds[batch + 1 :] += self.cost.waiting(begun.context, batch)
        now = replace(now, seconds=seconds)
        # the step emits a token for the first place: the next step could verify the others
        later = now.plan.survival[now.plan.tree.depths > 1]
        plain = batch / float(seconds[batch])
        best = best_goodput(later, batch, seconds)
        wakes = bool(best > (1 + self._margin) * plain)
        if self.device.choose(now, best):
            wakes = False
            seconds = seconds.copy()
            seconds[batch] = batch / self.device.goodput  # a model has to beat this
            now = replace(now, seconds=seconds)
        for model in self.models.values():
            if model.name == self.device.active:
                continue  # it drafts already
            model.estimate(now)
            wakes = wakes or model.wake(now)
        if wakes:
            self.device.stop()
        self._is_asleep = not wakes and not self.device.active

    def observe(self, report: Report) -> None:
        """Show every drafter what was emitted. Control learns from the step in `meanwhile`."""
        self._learning.learn()
        self._observed, outcomes = report.ended, report.outcomes
        pending, self._pending = self._pending, None
        if drafter := drafted_on_device(report):
            self._learning.keep_device_outcomes(outcomes, drafter)
        # if a request was taken away meanwhile, nothing is learned from the step
        if pending is not None and pending.requests == len(outcomes.requests):
            self._learning.keep(pending.done(report))
        for name, each in self._drafters.items():
            each.observe(self._states.of(name, outcomes))

    def meanwhile(self) -> None:
        """Do what can wait: learn from the last step, and let drafters do theirs."""
        self._learning.learn()
        self.cost.refresh()
        for model in self.models.values():
            model.refresh()
        for drafter in self.free.values():
            if (work := getattr(drafter, "meanwhile", None)) is not None:
                work()

    # -- deciding

    def _begin(self, requests: Sequence[Request], feasible: Feasible) -> Pending:
        self._pending = None
        context, before = sum([request.length for request in requests]), self._observed
        begun = Pending(
            t=self.clock() if before is None else before,
            requests=len(requests),
            context=context,
            follows=before is not None,
            rows=self.acceptance.rows([request.id for request in requests]),
            padded_width=feasible.padded_width,
        )
        if not self._has_seen(len(requests)):
            self._learning.learn()  # the step that is not learned from yet may have been the first
        return begun

    def _has_seen(self, batch: int) -> bool:
        """Say whether the time of a plain step of so many requests is known."""
        return self.cost.verify.has_seen(batch) or self.cost.early.has_seen(batch)

    def _may_draft(self, batch: int) -> bool:
        """Say whether a step of so many requests may have drafts."""
        return not self.slowdown_guard.is_tripped and self._has_seen(batch)

    def _free_offers(self, requests: Sequence[Request], budget: Budget, rows: Ints) -> list[Offer]:
        """Return what the free drafters propose, if drafts are allowed."""
        if self.slowdown_guard.is_tripped:
            return []
        return [
            Offer.of(name, drafter.propose(requests, budget), self.acceptance[name], rows)
            for name, drafter in self.free.items()
        ]

    def _situation(
        self,
        requests: Sequence[Request],
        budget: Budget,
        feasible: Feasible,
        begun: Pending,
        plan: Plan,
    ) -> Situation:
        rows = len(requests) + int(budget.max_drafts.sum())
        seconds = self.cost.table(rows, begun.context, len(requests), feasible.padded_width)
        return Situation(requests, begun.rows, begun.context, budget, feasible, plan, seconds)

    def _choose(
        self,
        requests: Sequence[Request],
        budget: Budget,
        feasible: Feasible,
        begun: Pending,
        offers: Sequence[Offer],
    ) -> _Choice:
        """Return the drafts to verify. The draft model may have added to those of the offers."""
        batch, plan = len(requests), join(offers, budget)
        self._is_asleep = self.limits.launches_early
        if not self._may_draft(batch):
            self.device.stop()
            return _Choice(plan, NO_INDICES, offers)
        now = self._situation(requests, budget, feasible, begun, plan)
        best = choose(plan.tree, plan.survival, now.seconds, self._margin)
        goodput = best.goodput
        if self.device.choose(now, goodput):
            goodput = self.device.goodput
        model, call = self._promising(now, goodput), Call(goodput, NO_INDICES)
        if model is not None:
            call = model.call(now, goodput)
        if len(call.users):
            self.device.stop()
        plain = _Choice(plan, NO_INDICES, offers, call.passes)
        if self.device.active:
            self._is_asleep = False
            return plain
        checks, bucket = self._learning.plain_checks, self.cost.verify.row_bucket(batch)
        checks.count(bucket)
        if checks.is_due(bucket, call.goodput, batch, now.seconds):
            return plain
        self._is_asleep = self._is_asleep and not len(best.nodes) and not len(call.users)
        if model is None or not len(call.users):
            return replace(plain, nodes=best.nodes)
        drafts, passes = model.draft(now, call)
        # the model's offer goes first: a draft that others propose too is counted as its own
        offer = Offer.of(model.name, drafts, self.acceptance[model.name], begun.rows)
        offers = [offer, *offers]
        plan = join(offers, budget)
        # the model has run, but its time is part of the step
        best = choose(plan.tree, plan.survival, now.seconds + passes.seconds)
        return _Choice(plan, best.nodes, offers, passes)

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
