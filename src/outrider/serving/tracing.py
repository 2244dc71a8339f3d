"""Each step as an OpenTelemetry span, if the profile asks for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from outrider import __version__
from outrider.core import Unsupported
from outrider.serving.clock import StepClock
from outrider.serving.values import Settled

logger = logging.getLogger(__name__)


def check_installed() -> None:
    """Raise Unsupported unless OpenTelemetry is here."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        fix = f"pip install 'outrider[otel]', or leave it out ({error})"
        raise Unsupported("the profile's tracing without OpenTelemetry", fix=fix) from error


class Tracer:
    """Sends each step as a span, `outrider.step`, with a child for each lap of its clock.

    Where to, and how many of them, is said by OpenTelemetry's own variables (OTEL_*). A thread of
    OpenTelemetry's sends them by OTLP over HTTP; what it cannot send, it drops. Other tracing in
    this process, SGLang's own included, is left alone.

    labels: of all spans
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        own = {f"outrider.{name}": value for name, value in labels.items()}
        provider = TracerProvider(resource=Resource.create(own))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer: Any = provider.get_tracer("outrider", __version__)
        self._nothing, self._inside = Context(), trace.set_span_in_context

    def step(self, settled: Settled) -> None:
        """Hand one step over to be sent. A fault ends the tracing, and nothing else."""
        if self._tracer is None:
            return
        try:
            self._spans(settled, settled.launched.clock)
        except Exception as error:
            self._tracer = None
            logger.warning("tracing ends: %s", error)

    def _spans(self, settled: Settled, clock: StepClock) -> None:
        # spans are dated, laps are not; a step is too short for the two clocks to part
        shift = time.time_ns() - time.perf_counter_ns()

        def date(seconds: float) -> int:
            return shift + int(seconds * 1e9)

        outcomes, proposal = settled.outcomes, settled.proposal
        names = zip(settled.drafter_names(), proposal.num_drafts.tolist(), strict=True)
        facts = {
            "requests": proposal.batch_size,
            "rows": proposal.num_rows,
            "drafts": len(proposal.parents),
            "accepted": int(outcomes.num_accepted_drafts.sum()),
            "emitted": len(outcomes.tokens),
            "drafters": sorted({name for name, count in names if count}),
            "tree": not proposal.is_chain,
        }
        step = self._tracer.start_span(
            "outrider.step",
            context=self._nothing,
            start_time=date(clock.laps[0][1]),
            attributes={f"outrider.{name}": fact for name, fact in facts.items()},
        )
        if step.is_recording():
            inside = self._inside(step, self._nothing)
            for part, begin, end in clock.laps:
                passes = clock.parts.get("draft_forward") if part == "draft" else None
                lap = self._tracer.start_span(
                    f"outrider.{part}",
                    context=inside,
                    start_time=date(begin),
                    attributes={"outrider.draft_forward_seconds": passes} if passes else None,
                )
                lap.end(date(end))
        step.end(date(clock.last))
