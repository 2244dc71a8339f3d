"""Learning from steps whose outcome is known: their times, and which of their drafts were right.

It waits until the device is busy again: see `Control.meanwhile`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from outrider.control.acceptance import Acceptance
from outrider.control.cost import StepCost
from outrider.control.device import NAME as DEVICE
from outrider.control.device import DeviceChoice
from outrider.control.model_choice import ModelChoice
from outrider.control.scoring import score
from outrider.control.slowdown import SlowdownGuard
from outrider.control.step import Done, Step
from outrider.core import Floats, Outcomes

PLAIN_CHECK_EVERY, SMALL_GAIN = 16, 1.2
"""While a plan promises less than SMALL_GAIN times plain decoding, every PLAIN_CHECK_EVERY-th step
is plain. The time of plain steps must be recent, because plans are compared with it."""


class PlainChecks:
    """Says when a step should be plain, to measure plain decoding again."""

    def __init__(self) -> None:
        self._steps: Counter[int] = Counter()  # since a plain one, by row bucket

    def count(self, bucket: int) -> None:
        """Count a step of this row bucket."""
        self._steps[bucket] += 1

    def reset(self, bucket: int) -> None:
        """Start again: there was a plain step."""
        self._steps[bucket] = 0

    def is_due(self, bucket: int, goodput: float, batch: int, seconds: Floats) -> bool:
        """Say whether the step should be plain.

        goodput: that is expected otherwise
        seconds: [at least B + 1] time of a step with so many rows
        """
        is_small = goodput * float(seconds[batch]) < SMALL_GAIN * batch
        return is_small and self._steps[bucket] >= PLAIN_CHECK_EVERY


class Learning:
    """Learns from each step, into the parts of control that decide.

    lookups: the free drafters that look drafts up, by name
    on_step: called with each step
    slowdown_guard, plain_checks: which also decide
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
        self.slowdown_guard, self.plain_checks = SlowdownGuard(), PlainChecks()
        # of the last step, until it is learned from
        self._done: Done | None = None
        self._device_outcomes: tuple[Outcomes, str] | None = None  # and the drafter

    def keep(self, done: Done) -> None:
        """Keep a step, to learn from it."""
        self._done = done

    def keep_device_outcomes(self, outcomes: Outcomes, drafter: str) -> None:
        """Keep the outcomes of a step in which the device drafted, to learn from them."""
        self._device_outcomes = outcomes, drafter

    def learn(self) -> None:
        """Learn from the last step: its time, and which drafts were right, used or not."""
        if self._device_outcomes is not None:
            self._device.learn(*self._device_outcomes)
            self._device_outcomes = None
        if self._done is None:
            return
        done, self._done = self._done, None
        step = done.step
        # passes that catch up are queued before the target's: such a step's time is not its own
        if not step.passes.caught_up:
            self._learn_times(step)
        plain = self._cost.plain(step.context, step.requests)
        for model in self._models.values():
            model.learn(step, plain)
        if self._on_step is not None:
            self._on_step(step)
        if step.on_device and step.early:
            self._device.learn_time(step, int(done.outcomes.num_drafts.max()))
        if not step.passes.caught_up:
            self._device.learn_reached(step)
        for offer in done.offers:
            score(offer, self._acceptance[offer.name], done.rows, done.outcomes)
            arm = DEVICE if offer.name in self._lookups else offer.name
            if arm != step.on_device:  # it learns from its own drafts
                self._device.learn_from(arm, offer, done.rows, done.outcomes)

    def _learn_times(self, step: Step) -> None:
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
            self.plain_checks.reset(self._cost.verify.row_bucket(step.rows))
        plain = self._cost.plain(step.context, step.requests) / step.requests
        self.slowdown_guard.observe(step.speculated, step.seconds, step.tokens * plain)
