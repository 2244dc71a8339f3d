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

An engine that launches steps early never makes the device wait in them. Where its device can draft,
each step is decided early: how many drafts each request gets (`device`). Elsewhere early steps are
plain. While drafts of the CPU do not pay for their wait, control is *asleep*: it only scores the
drafts that it would have made, while the device works. It is *awake* while steps wait for drafts.

Exploration: a batch size that was never seen starts with a plain step. While drafts gain little,
every PLAIN_CHECK_EVERY-th step is plain. A draft model that is not called has an optimistic
estimate, which grows until it is tried; how much time tries may cost is limited (`model_choice`).
The slowdown guard compares measured totals with plain decoding, whatever was planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

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
from outrider.control.device import NAME as DEVICE
from outrider.control.device import DeviceChoice
from outrider.control.learning import Learning
from outrider.control.lookups import LazyLookup
from outrider.control.model_choice import Call, ModelChoice, PassingDrafter
from outrider.control.plan import Offer, join
from outrider.control.policy import NO_INDICES, best_goodput, choose
from outrider.control.step import NO_PASSES, Passes, Pending, Situation, Step
from outrider.core import Budget, Drafter, Ints, Request
from outrider.drafters import AheadDrafter
from outrider.drafters.options import check_number
from outrider.drafters.states import SharedStates

OBJECTIVES = ("users", "throughput")
"""What control may aim at."""

SLOWDOWN = 0.02
"""Share by which drafts for some requests may slow others down, unless the profile says more."""

MARGIN = 0.05
"""Share by which drafting must beat plain decoding, and a step with the model one without."""


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
    slowdown: share by which drafts for some requests may slow others down that gain nothing
    objective: "users": no request is slowed down by more than that. "throughput": as many tokens
        per second as possible
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
        slowdown: float = SLOWDOWN,
        objective: str = "users",
    ) -> None:
        if objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {OBJECTIVES}, not {objective!r:.80}")
        check_number("slowdown", slowdown, 0, 1)
        self.limits = limits or Limits()
        if row_buckets is None:
            row_buckets = self.limits.graph_sizes or ROW_BUCKETS
        self.acceptance, self.cost = Acceptance(), StepCost(row_buckets, self.limits)
        self.free: dict[str, Drafter] = {
            name: drafter if isinstance(drafter, AheadDrafter) else LazyLookup(drafter)
            for name, drafter in free.items()
        }
        self.clock, self._margin = clock, margin
        for name in self.free:
            self.acceptance.add(name)
        limit = slowdown if objective == "users" else None
        self.device = DeviceChoice(self.acceptance, self.cost, limit, device)
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
        self._lookups = {n for n, d in self.free.items() if isinstance(d, LazyLookup)}
        self._learning = Learning(
            self.acceptance, self.cost, self.device, self.models, self._lookups, on_step
        )
        self.slowdown_guard = self._learning.slowdown_guard
        # plain steps need not wait; and the next step must wait, for drafts of the CPU
        self._is_asleep = self._is_awake = False
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
        self.forget(requests)
        for request in requests:
            for model in self.models.values():
                model.forget(request)

    def forget(self, requests: Sequence[Request]) -> None:
        """Forget requests that were decided for, also those that were never introduced."""
        for request in requests:
            self.device.forget(self.acceptance.forget(request.id))

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
        if self.limits.launches_early:
            self.cost.early.seed(rows, seconds)
        for model, taken in zip(self.models.values(), draft_seconds, strict=False):
            model.cost.passes.observe(rows, taken)

    def add_to_device(self, names: Iterable[str]) -> None:
        """Let these models draft on the device too, where that is feasible."""
        for name in names:
            self.device.add(self.models[name])

    # -- a step

    def decide_early(
        self, requests: Sequence[Request], most: Ints, feasible: Feasible
    ) -> Plain | DeviceDrafts | None:
        """Return what is decided without the last outcome; None if the outcome is needed.

        most: [B] the most drafts of each request
        """
        if self._is_awake:
            return None
        if self.device.can_draft(feasible):
            return self.device.decide(requests, most, feasible, self.slowdown_guard.is_tripped)
        return Plain() if self.limits.launches_early and self._is_asleep else None

    def decide(self, requests: Sequence[Request], budget: Budget, feasible: Feasible) -> Decision:
        """Return what is expected to emit the most tokens per second."""
        now, nodes, passes = self._choose(self._situation(requests, budget, feasible))
        proposal = now.plan.tree.take(nodes) if len(nodes) else None
        self._pending = Pending(now, self.clock(), passes)
        if proposal is None:
            if not self.device.can_draft(feasible):
                return Plain()
            is_tripped = self.slowdown_guard.is_tripped
            return self.device.decide(requests, budget.max_drafts, feasible, is_tripped)
        rows, width = proposal.num_rows, feasible.padded_width
        padded = self.cost.prefers_padded(rows, now.context, len(requests), width)
        return CpuDrafts(proposal, now.plan.names(nodes, now.offers), padded)

    def scores_unused(self, on_device: str) -> bool:
        """Say whether drafts should be scored that a step is launched without.

        on_device: the drafter that makes drafts in the step; "" if none does
        """
        if self._is_awake:
            return False
        return bool(self.models or self.free.keys() - self._lookups or not on_device)

    def score_unused(self, requests: Sequence[Request], budget: Budget, feasible: Feasible) -> None:
        """Make the drafts of a step that was launched without them, while the device works.

        They are only scored against the emitted tokens. Control wakes up if they would have gained
        more than the waits for them cost.
        """
        now, batch = self._situation(requests, budget, feasible), len(requests)
        self._pending = Pending(now, proposed=now.t)
        if not self._may_draft(batch):
            return
        seconds = now.seconds.copy()
        # a step with drafts waits, and so does the step after it
        seconds[batch + 1 :] += self.cost.waiting(now.context, batch)
        if self.device.can_draft(feasible) and self.device.goodput:
            seconds[batch] = min(seconds[batch], batch / self.device.goodput)  # to be beaten
        now = replace(now, seconds=seconds)
        # the step emits a token for the first place: the next step could verify the others
        later = now.plan.survival[now.plan.tree.depths > 1]
        best = best_goodput(later, batch, seconds)
        wakes = bool(best > (1 + self._margin) * now.plain_goodput)
        for model in self.models.values():
            if model.name == self.device.active:
                continue  # it drafts already
            model.estimate(now)
            wakes = model.wake(now) or wakes
        self._is_awake, self._is_asleep = wakes, not wakes

    def observe(self, report: Report) -> None:
        """Show every drafter what was emitted. Control learns from the step in `meanwhile`."""
        self._learning.learn()
        outcomes = report.outcomes
        context = sum([request.length for request in outcomes.requests])
        self._learning.keep(self._pending, report, self._observed, context)
        self._pending, self._observed = None, report.ended
        for name, drafter in self._drafters.items():
            drafter.observe(self._states.of(name, outcomes))

    def meanwhile(self) -> None:
        """Do what can wait: learn from the last step, and let drafters do theirs."""
        self._learning.learn()
        self.cost.refresh()
        for model in self.models.values():
            model.cost.passes.refresh()
        for drafter in self.free.values():
            if (work := getattr(drafter, "meanwhile", None)) is not None:
                work()

    # -- deciding

    def _situation(
        self, requests: Sequence[Request], budget: Budget, feasible: Feasible
    ) -> Situation:
        """Let the free drafters propose, and return what is known then."""
        self._pending = None
        batch, before = len(requests), self._observed
        began = self.clock() if before is None else before
        context = sum([request.length for request in requests])
        rows = self.acceptance.rows([request.id for request in requests])
        if not self._has_seen(batch):
            self._learning.learn()  # the step that is not learned from yet may have been the first
        free = {} if self.slowdown_guard.is_tripped else self.free
        # what the device would find must be known while it does not look up
        looks_up = not self._is_awake and self.device.active in ("", DEVICE)
        if self.device.can_draft(feasible) and looks_up:
            free = {name: free[name] for name in free.keys() - self._lookups}
        offers = [
            Offer.of(name, drafter.propose(requests, budget), self.acceptance[name], rows)
            for name, drafter in free.items()
        ]
        most_rows = batch + int(budget.max_drafts.sum())
        return Situation(
            t=began,
            follows=before is not None,
            requests=requests,
            rows=rows,
            context=context,
            budget=budget,
            feasible=feasible,
            offers=offers,
            plan=join(offers, budget),
            seconds=self.cost.table(most_rows, context, batch, feasible.padded_width),
        )

    def _has_seen(self, batch: int) -> bool:
        """Say whether the time of a plain step of so many requests is known."""
        return self.cost.verify.has_seen(batch) or self.cost.early.has_seen(batch)

    def _may_draft(self, batch: int) -> bool:
        """Say whether a step of so many requests may have drafts."""
        return not self.slowdown_guard.is_tripped and self._has_seen(batch)

    def _choose(self, now: Situation) -> tuple[Situation, Ints, Passes]:
        """Return the drafts to verify, as indices in the plan, and what a draft model did.

        The situation that is returned has the draft model's offer too.
        """
        on_device = self.device.can_draft(now.feasible)
        self._is_asleep, self._is_awake = self.limits.launches_early, False
        batch = len(now.requests)
        if not self._may_draft(batch):
            return now, NO_INDICES, NO_PASSES
        best = choose(now.plan.tree, now.plan.survival, now.seconds, self._margin)
        goodput = best.goodput
        if on_device:
            self.device.decide(now.requests, now.budget.max_drafts, now.feasible)
            if len(best.nodes) and best.goodput <= (1 + self._margin) * self.device.goodput:
                best = replace(best, nodes=NO_INDICES)
            goodput = max(goodput, self.device.goodput)
        model, call = self._promising(now, goodput), Call(goodput, NO_INDICES)
        if model is not None:
            call = model.call(now, goodput)
        if not len(call.users) and not len(best.nodes):
            return now, NO_INDICES, call.passes
        if self._learning.is_plain_due(batch, call.goodput, now.plain_goodput):
            return now, NO_INDICES, call.passes
        self._is_asleep, self._is_awake = False, True
        if model is None or not len(call.users):
            return now, best.nodes, call.passes
        drafts, passes = model.draft(now, call)
        # the model's offer goes first: a draft that others propose too is counted as its own
        offer = Offer.of(model.name, drafts, self.acceptance[model.name], now.rows)
        offers = [offer, *now.offers]
        now = replace(now, offers=offers, plan=join(offers, now.budget))
        # the model has run, but its time is part of the step
        best = choose(now.plan.tree, now.plan.survival, now.seconds + passes.seconds)
        return now, best.nodes, passes

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
