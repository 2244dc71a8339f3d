"""Prometheus counters, in the engine's own registry. They count what the CPU knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.control.cost import StepCost
from outrider.core import Outcomes, at_least
from outrider.serving.values import Settled

PREFIX = "outrider:"

COUNTERS: dict[str, tuple[str, ...]] = {
    "verify_steps": ("Verify passes.",),
    "verify_rows": ("Rows of verify passes: last tokens and drafts.",),
    "tree_steps": ("Verify passes in which drafts branched.",),
    "device_steps": ("Verify passes with drafts that the device made.",),
    "emitted_tokens": ("Tokens emitted by verify passes.",),
    "request_steps": ("Requests of verify passes, by who drafted; none if nobody.", "drafter"),
    "draft_tokens": ("Draft tokens proposed.", "drafter"),
    "accepted_draft_tokens": ("Draft tokens emitted.", "drafter"),
    "proposed_at": ("Requests of verify passes with a draft at this position.", "position"),
    "accepted_at": ("Accepted drafts by position in the block.", "position"),
    "fallbacks": ("Requests that a step served without drafts, by reason.", "reason"),
    "foreseen": ("Requests of steps that asked a draft server, by what it had.", "found"),
    "step_seconds": ("Time of decode steps, by part, as the host's clock saw it.", "part"),
    "compared_seconds": ("Time of decode steps of which a plain step's time is known.",),
    "plain_seconds": ("Time that plain steps would have taken for the tokens of those steps.",),
}
"""Each counter: what it counts, and its own label if it has one. `_total` is added to its name."""

HISTOGRAM = "request_drafts"
"""How many drafts a request had in a step."""

BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)

FROM_THE_START: dict[str, tuple[str, ...]] = {
    "request_steps": ("none",),
    "fallbacks": (
        "error",
        "timeout",
        "garbage",
        "resting",
        "prefill",
        "catching_up",
        "grammar",
        "processor",
        "rows",
        "slots",
        "device",
    ),
    "foreseen": ("hit", "miss", "end", "none"),
    "step_seconds": ("scheduler", "draft_forward", "draft", "forward", "verify", "host"),
}
"""Series that are there at 0 before they count: what a series begins with, a rate does not see."""

MIN_PLAIN_STEPS, WINDOW = 4, 32
"""Plain steps of a batch size before their mean is used, and about how many make the mean."""


class Metrics:
    """Counts what speculation did. SGLang's `/metrics` shows it, with `--enable-metrics`.

    labels: of all series
    control: what the adaptive drafter knows of the time of passes, if there is one
    """

    def __init__(self, labels: Mapping[str, str], control: StepCost | None = None) -> None:
        # after SGLang has said where the processes share their counters
        from prometheus_client import Counter as Metric
        from prometheus_client import Histogram

        self._labels = dict(labels)
        self._counters: dict[str, Any] = {
            name: Metric(PREFIX + name, text, [*self._labels, *own])
            for name, (text, *own) in COUNTERS.items()
        }
        self._series: dict[tuple[str, str], Any] = {}
        histogram = Histogram(
            PREFIX + HISTOGRAM, "Drafts of a request in a step.", [*self._labels], buckets=BUCKETS
        )
        self._drafts = histogram.labels(**self._labels)
        self._counted: Counter[tuple[str, str]] = Counter()
        self._control = control
        self._plain: dict[int, tuple[int, float]] = {}  # plain steps and their mean, by requests
        for name, (_, *own) in COUNTERS.items():
            for of in FROM_THE_START.get(name, () if own else ("",)):
                self._add(name, 0, of)

    def record(self, settled: Settled) -> None:
        """Count one step, and its time."""
        outcomes, proposal = settled.outcomes, settled.proposal
        drafts, accepted = outcomes.num_drafts, outcomes.num_accepted_drafts
        self._add("verify_steps", 1)
        self._add("verify_rows", proposal.num_rows)
        self._add("tree_steps", not proposal.is_chain)
        self._add("device_steps", bool(settled.launched.device_drafter) and bool(drafts.any()))
        self._add("emitted_tokens", len(outcomes.tokens))
        for count, times in enumerate(np.bincount(drafts).tolist()):
            for _ in range(times):
                self._drafts.observe(count)
        drafting = np.flatnonzero(drafts)
        self._add("request_steps", len(drafts) - len(drafting), "none")
        names = np.array(settled.drafter_names())[drafting]
        for name in dict.fromkeys(names.tolist()):
            mine = drafting[names == name]
            self._add("request_steps", len(mine), name)
            self._add("draft_tokens", int(drafts[mine].sum()), name)
            self._add("accepted_draft_tokens", int(accepted[mine].sum()), name)
        # several drafts of a tree stand at one position, and one of them can be accepted
        deepest = np.zeros(len(drafts), np.int64)
        np.maximum.at(deepest, proposal.owners, proposal.depths)
        for depth, count in at_least(deepest).items():
            self._add("proposed_at", count, str(depth))
            self._add("accepted_at", int((accepted >= depth).sum()), str(depth))
        self._record_times(settled.launched.clock.parts, outcomes)

    def _record_times(self, parts: Mapping[str, float], outcomes: Outcomes) -> None:
        """Count the seconds of one step, by part, beside what plain steps would have taken."""
        for part, seconds in parts.items():
            self._add("step_seconds", seconds, part)
        spent, batch = sum(parts.values()), len(outcomes)
        if not outcomes.num_drafts.any():
            seen, mean = self._plain.get(batch, (0, 0.0))
            own = spent - parts.get("draft", 0.0) - parts.get("draft_forward", 0.0)
            # a plain mean: the sums that it is compared with have their slow steps too
            self._plain[batch] = seen + 1, mean + (own - mean) / min(seen + 1, WINDOW)
        plain = self._plain_step(outcomes, parts.get("scheduler", 0.0))
        if plain is not None:
            self._add("compared_seconds", spent)
            self._add("plain_seconds", plain * len(outcomes.tokens) / batch)

    def totals(self, name: str, totals: Mapping[str, int]) -> None:
        """Count what is new in these totals of a counter, by its own label."""
        for of, total in totals.items():
            self._add(name, total - self._counted[name, of], of)
            self._counted[name, of] = total

    def _plain_step(self, outcomes: Outcomes, scheduler: float) -> float | None:
        """Return how long a step without drafts takes; None if it is not known.

        The best witnesses are steps of as many requests that had no drafts. Without them, control's
        estimate stands in; of the scheduler's time, which it does not see, this step's is taken.
        """
        batch = len(outcomes)
        seen, mean = self._plain.get(batch, (0, 0.0))
        if seen >= MIN_PLAIN_STEPS:
            return mean
        if self._control is not None and self._control.verify.has_seen(batch):
            context = sum(request.length for request in outcomes.requests)
            return float(self._control.table(batch, context, batch)[-1]) + scheduler
        return None

    def _add(self, name: str, amount: float, of: str = "") -> None:
        """Add to a counter. of: the value of its own label"""
        if (name, of) not in self._series:
            _, *own = COUNTERS[name]
            labels = {**self._labels, **dict.fromkeys(own, of)}
            self._series[name, of] = self._counters[name].labels(**labels)
        self._series[name, of].inc(amount)
