"""What a step reports to the outside: counters, traces, and records for single requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from outrider.core import ROOT, Outcome
from outrider.serving.metrics import Metrics
from outrider.serving.pool import Pool
from outrider.serving.tracing import Tracer
from outrider.serving.values import ServedRequest, Settled


class Telemetry:
    """Counts and traces steps that are over.

    metrics, tracer: None if they are not wanted
    """

    def __init__(
        self, pool: Pool, metrics: Metrics | None = None, tracer: Tracer | None = None
    ) -> None:
        self._pool, self._metrics, self._tracer = pool, metrics, tracer
        self._settled: deque[Settled] = deque()

    def record_later(self, settled: Settled) -> None:
        """Keep a step until `record` is called."""
        if self._metrics is not None or self._tracer is not None:
            self._settled.append(settled)

    def record(self) -> None:
        """Count and trace the steps that were kept."""
        while self._settled:
            settled = self._settled.popleft()
            if self._metrics is not None:
                self._metrics.record(settled)
                self._metrics.totals("fallbacks", self._pool.fallback_totals())
                self._metrics.totals("foreseen", self._pool.foreseen_totals())
            if self._tracer is not None:
                self._tracer.step(settled)


def explained(settled: Settled) -> Iterator[tuple[ServedRequest, Outcome, dict[str, Any]]]:
    """Return the record of a step for each request that asks for one.

    It names the drafter, the tree of drafts, the path that was kept, and the tokens emitted.
    parents: the index of each draft's parent, -1 for the request's last token
    kept: the indices of the accepted drafts, whose tokens `emitted` begins with
    foreseen: what a draft server had, if one was asked: see `AheadDrafter`
    """
    drafts, foreseen = settled.proposal.drafts(), settled.launched.foreseen
    for outcome, draft, name in zip(settled.outcomes, drafts, settled.drafter_names(), strict=True):
        request = outcome.request
        assert isinstance(request, ServedRequest)
        if not request.explain:
            continue
        kept = [row - 1 for row in outcome.rows[1:]]
        if len(kept) < outcome.num_accepted_drafts:  # the request ended with a draft: it has no row
            last = (outcome.tokens[-1], kept[-1] if kept else ROOT)
            kept.append([*zip(draft.tokens, draft.parents, strict=True)].index(last))
        record = {
            "drafter": name,
            "drafts": list(draft.tokens),
            "parents": list(draft.parents),
            "kept": kept,
            "emitted": list(outcome.tokens),
            "foreseen": foreseen.get(request.id),
        }
        yield request, outcome, record
