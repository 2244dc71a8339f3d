"""Learning from steps whose outcome is known: their times, and which of their drafts were right.

It waits until the device is busy again: see `Control.meanwhile`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from outrider.control.acceptance import Acceptance
from outrider.control.cost import StepCost
from outrider.control.decision import Report
from outrider.control.device import NAME as DEVICE
from outrider.control.device import DeviceChoice
from outrider.control.model_choice import ModelChoice
from outrider.control.scoring import score
from outrider.control.slowdown import SlowdownGuard
from outrider.control.step import Pending, Step, drafted_on_device, early_step

PLAIN_CHECK_EVERY, SMALL_GAIN = 16, 1.2
"""While a plan promises less than SMALL_GAIN times plain decoding, every PLAIN_CHECK_EVERY-th step
is plain. The time of plain steps must be recent, because plans are compared with it."""


class Learning:
    """Learns from each step, into the parts of control that decide.

    lookups: the free drafters that look drafts up, by name
    on_step: called with each step
    slowdown_guard: also decides
    """

    def __init__(
        self,
        acceptance: Acceptance,
        cost: StepCost,
        device: DeviceChoice,
        models: Mapping[str, ModelChoice],
        lookups: Collection[str],
        on_step: Callable[[Step], None] | None,
    ) -> None:
        self._acceptance, self._cost, self._device = acceptance, cost, device
        self._models, self._lookups, self._on_step = models, lookups, on_step
        self.slowdown_guard = SlowdownGuard()
        self._since_plain: Counter[int] = Counter()  # decisions since a plain step, by row bucket
        # the last step, until it is learned from; None if it was neither decided nor scored
        self._kept: tuple[Pending | None, Report, float | None, int] | None = None

    def is_plain_due(self, batch: int, goodput: float, plain_goodput: float) -> bool:
        """Count a decision, and say whether the step should be plain, to measure that again.

        goodput: that is expected otherwise
        """
        bucket = self._cost.verify.row_bucket(batch)
        self._since_plain[bucket] += 1
        is_small = goodput < SMALL_GAIN * plain_goodput
        return is_small and self._since_plain[bucket] >= PLAIN_CHECK_EVERY

    def keep(
        self, pending: Pending | None, report: Report, began: float | None, context: int
    ) -> None:
        """Keep a step, to learn from it.

        pending: what was known when it was decided or scored; None if it was neither
        began: when the outcome before it was known; None if something came between
        context: tokens of all its requests together
        """
        self._kept = pending, report, began, context

    def learn(self) -> None:
        """Learn from the last step: its time, and which drafts were right, used or not."""
        if self._kept is None:
            return
        (pending, report, began, context), self._kept = self._kept, None
        outcomes, drafter = report.outcomes, drafted_on_device(report)
        self._device.learn(report, drafter)
        rows = self._acceptance.rows([request.id for request in outcomes.requests])
        # if a request was taken away meanwhile, what was known is of others
        if pending is not None and len(pending.now.rows) != len(outcomes.requests):
            pending = None
        if pending is None and (began is None or not report.early):
            return
        if pending is None or report.early:
            step = early_step(report, began, context)
        else:
            step = pending.step(report)
        # passes that catch up are queued before the target's: such a step's time is not its own
        if step is not None and not step.passes.caught_up:
            self._learn_times(step)
            if step.early and step.follows:
                depth = int(outcomes.num_drafts.max(initial=0))
                self._device.learn_time(step, rows, outcomes.num_tokens, depth)
        if step is None:
            return
        plain = self._cost.plain(step.context, step.requests)
        for model in self._models.values():
            model.learn(step, plain)
        if self._on_step is not None:
            self._on_step(step)
        passes = step.passes
        arm = self._device.arms.get(passes.model)
        if passes.count and not passes.caught_up and arm is not None:
            arm.learn_reached(step.tokens / step.seconds)
        for offer in pending.now.offers if pending is not None else ():
            score(offer, self._acceptance[offer.name], rows, outcomes)
            # what drafts on the device learns from its own drafts, if it made any
            name = DEVICE if offer.name in self._lookups else offer.name
            if name in self._device.arms and name != drafter:
                self._device.arms[name].learn_offer(rows, offer, outcomes)

    def _learn_times(self, step: Step) -> None:
        if not step.follows and self._cost.verify.has_seen(step.rows):
            return  # a prefill was queued before it
        if step.on_device not in self._models:  # a head's passes are part of its time
            self._cost.observe(
                step.rows,
                step.context,
                step.target_seconds,
                step.requests,
                step.padded_width,
                step.early,
            )
        if step.follows and not step.early and not step.passes.count:
            self._cost.cpu.observe(step.requests, step.cpu_seconds)
        if step.early or not (step.speculated or self._cost.limits.launches_early):
            self._since_plain[self._cost.verify.row_bucket(step.rows)] = 0
        plain = self._cost.plain(step.context, step.requests) / step.requests
        self.slowdown_guard.observe(step.speculated, step.seconds, step.tokens * plain)
