"""Prometheus counters, in SGLang's own registry. Host integers only: nothing waits for a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core import Law, Outcome, Proposal


class Metrics:
    """Counts what speculation did. SGLang's `/metrics` shows it, with `--enable-metrics`."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        # after SGLang has said where the processes share their counters
        from prometheus_client import Counter as Metric

        self._labels = dict(labels)

        def metric(name: str, text: str, *more: str) -> Any:
            return Metric(f"outrider:{name}", text, [*self._labels, *more])

        self._steps = metric("verify_steps", "Verify passes.")
        self._rows = metric("verify_rows", "Rows of verify passes: last tokens and drafts.")
        self._trees = metric("tree_steps", "Verify passes in which drafts branched.")
        self._emitted = metric("emitted_tokens", "Tokens emitted by verify passes.")
        self._drafts = metric("draft_tokens", "Draft tokens proposed.", "drafter")
        self._accepted = metric("accepted_draft_tokens", "Draft tokens emitted.", "drafter")
        self._at = metric("accepted_at", "Accepted drafts by position in the block.", "position")
        self._fallbacks = metric(
            "fallbacks", "Requests that a step served without drafts, by reason.", "reason"
        )
        self._seconds = metric(
            "step_seconds", "Time of decode steps, by part, as the host's clock saw it.", "part"
        )
        self._told: Counter[str] = Counter()

    def record(
        self, outcomes: Sequence[Outcome], proposal: Proposal[Law], drafters: Sequence[str]
    ) -> None:
        """Count one step. drafters: who drafted for each request."""
        self._steps.labels(**self._labels).inc()
        self._rows.labels(**self._labels).inc(proposal.num_rows)
        self._trees.labels(**self._labels).inc(not proposal.is_chain)
        self._emitted.labels(**self._labels).inc(sum(len(o.tokens) for o in outcomes))
        for outcome, drafter in zip(outcomes, drafters, strict=True):
            if outcome.num_drafts:
                own = {**self._labels, "drafter": drafter}
                self._drafts.labels(**own).inc(outcome.num_drafts)
                self._accepted.labels(**own).inc(outcome.num_accepted_drafts)
            for position in range(1, outcome.num_accepted_drafts + 1):
                self._at.labels(**self._labels, position=str(position)).inc()

    def times(self, parts: Mapping[str, float]) -> None:
        """Count the seconds of one step, by part."""
        for part, seconds in parts.items():
            self._seconds.labels(**self._labels, part=part).inc(seconds)

    def fallbacks(self, totals: Mapping[str, int]) -> None:
        """Count what is new in these totals, by reason."""
        for reason, total in totals.items():
            self._fallbacks.labels(**self._labels, reason=reason).inc(total - self._told[reason])
            self._told[reason] = total
