"""The result as one JSON document and one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from outrider.report import Page
from outrider.report.plots import short
from outrider.selftest.bench import Benchmark
from outrider.selftest.check import Outcome
from outrider.selftest.plots import SERIES, Panel, rates_by_context, times_by_rows
from outrider.selftest.timing import Measurement

__all__ = ["NO_TIMINGS", "Report", "grade", "spread", "tally"]

NO_TIMINGS = "no timings: this run used Triton's interpreter on CPU"

SECTIONS = {
    "correctness": "Correctness, against plain torch or float64",
    "bitwise": "Bit for bit, a row against itself in other company",
}


@dataclass(frozen=True)
class Report:
    """Everything that a run found. benchmark: None where kernels ran in the interpreter."""

    provenance: dict[str, Any]
    environment: dict[str, Any]
    outcomes: Sequence[Outcome]
    benchmark: Benchmark | None = None

    @property
    def failures(self) -> list[Outcome]:
        """Return the broken promises."""
        return [outcome for outcome in self.outcomes if outcome.failed]

    @property
    def verdict(self) -> str:
        """Return a sentence that says how it went."""
        promised = [outcome for outcome in self.outcomes if outcome.promised]
        if self.failures:
            return f"Failed: {len(self.failures)} of {len(promised)} checks"
        return f"Passed: all {len(promised)} checks"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        benchmark = self.benchmark or Benchmark(notes=[NO_TIMINGS])
        return {
            "passed": not self.failures,
            "verdict": self.verdict,
            "provenance": self.provenance,
            "environment": self.environment,
            "checks": [asdict(outcome) for outcome in self.outcomes],
            "measurements": [one.as_json() for one in benchmark.measurements],
            "notes": benchmark.notes,
        }

    def page(self) -> str:
        """Return the HTML page."""
        where = self.environment["gpu"] or self.environment["device"]
        page = Page(
            "Outrider selftest",
            self.verdict,
            "bad" if self.failures else "good",
            f"{where} ({self.environment['arch']}), {self.provenance['date']}",
        )
        if not self.benchmark:
            page.add(f"<p class='note'>{NO_TIMINGS}</p>")
        page.add(*self._failed(), *self._checks(), *self._timings())
        page.made_with({**self.environment, **self.provenance})
        return page.html()

    def _failed(self) -> Iterator[str]:
        if self.failures:
            yield "<h2>What failed</h2><ul class='failures'>"
            for outcome in self.failures:
                yield f"<li><b>{escape(outcome.name)}</b><br>{escape(outcome.detail)}</li>"
            yield "</ul>"

    def by_kernel(self) -> Iterator[tuple[str, dict[str, list[Outcome]]]]:
        """Yield each kernel with its outcomes by section."""
        for kernel in dict.fromkeys(one.kernel for one in self.outcomes):
            own = [one for one in self.outcomes if one.kernel == kernel]
            yield kernel, {name: [o for o in own if o.section == name] for name in SECTIONS}

    def _checks(self) -> Iterator[str]:
        yield "<h2>Checks</h2><table><thead><tr><th>kernel</th>"
        yield "<th>correctness</th><th>bit for bit</th></tr></thead><tbody>"
        for kernel, sections in self.by_kernel():
            yield f"<tr><td>{escape(kernel)}</td>"
            for own in sections.values():
                yield f"<td class='{grade(own)}'>{tally(own)}</td>"
            yield "</tr>"
        yield "</tbody></table>"
        for section, title in SECTIONS.items():
            own = [one for one in self.outcomes if one.section == section]
            # what failed, and a page that has nothing else to show, is unfolded
            show = " open" if grade(own) == "bad" or self.benchmark is None else ""
            yield f"<details{show}><summary>{title}, {len(own)} checks</summary>"
            yield "<table class='checks'><tbody>"
            yield from (_check(one) for one in own)
            yield "</tbody></table></details>"

    def _timings(self) -> Iterator[str]:
        if self.benchmark is None:
            return
        yield "<h2>Timings</h2>"
        yield from _plots(self.benchmark)
        yield from _tables(self.benchmark)
        if self.benchmark.notes:
            yield "<h3>Notes</h3><ul>"
            yield from (f"<li>{escape(note)}</li>" for note in self.benchmark.notes)
            yield "</ul>"


def grade(outcomes: Sequence[Outcome]) -> str:
    """Return "bad" if one failed, "other" if only one that was not promised did, else "good"."""
    if any(one.failed for one in outcomes):
        return "bad"
    return "good" if all(one.passed for one in outcomes) else "other"


def tally(outcomes: Sequence[Outcome]) -> str:
    """Return how many passed, in words; nothing for none."""
    passed = sum(one.passed for one in outcomes)
    free = sum(not (one.passed or one.promised) for one in outcomes)
    return f"{passed} of {len(outcomes)}{f', {free} not promised' * bool(free)}" if outcomes else ""


def _check(one: Outcome) -> str:
    mark = grade([one])
    word = {"good": "passed", "bad": "failed", "other": "not promised"}[mark]
    return (
        f"<tr><td class='{mark}'>{word}</td><td>{escape(one.name)}"
        f"<small>{escape(one.detail)}</small></td>"
        f"<td class='number'>{one.seconds:.2f} s</td></tr>"
    )


def _plots(benchmark: Benchmark) -> Iterator[str]:
    try:
        rates, times = rates_by_context(benchmark), times_by_rows(benchmark)
    except ImportError as error:
        benchmark.note(f"no plots: {error}; pip install 'outrider[tools]' and run again")
        return
    shown = {m.contender for m in benchmark.measurements if m.operation == "paged_attention"}
    yield "<p class='legend'>"
    for series in SERIES:
        if series.contender in shown:
            yield f"<span style='--mark: var({series.variable})'>{escape(series.label)}</span>"
    yield "</p>"
    yield from _figure(
        "Paged attention: bandwidth",
        rates,
        "Keys and values that a step must read once, over its time: one row a request; dotted, "
        "Outrider with the most rows. Dashed: a large copy on this machine, which reads and "
        "writes; a kernel that only reads may pass it by a little. Bars: 10th to 90th percentile.",
    )
    yield from _figure(
        "Paged attention: what verifying costs",
        times,
        "Time of a step by its rows, K drafts and one: a flat line means that verifying costs what "
        "decoding costs. SGLang's decode kernel takes one row a request, so K + 1 rows are K + 1 "
        "requests for it.",
    )


def _figure(title: str, panels: Sequence[Panel], caption: str) -> Iterator[str]:
    yield f"<h3>{escape(title)}</h3><figure><div class='panels'>"
    yield from (panel.svg for panel in panels)
    yield f"</div><figcaption>{escape(caption)}</figcaption></figure>"


def spread(one: Measurement) -> str:
    """Return a time in µs with its 10th and 90th percentile."""
    low, middle, high = (1000 * one.percentile(share) for share in (0.1, 0.5, 0.9))
    digits = 1 if middle < 100 else 0
    return f"{middle:,.{digits}f} ({low:,.{digits}f}\N{EN DASH}{high:,.{digits}f})"


def _tables(benchmark: Benchmark) -> Iterator[str]:
    top = benchmark.roofline
    if top is not None:
        yield (
            f"<p>A copy of {top.bytes / 2e9:.2f} GB: {top.rate():,.0f} GB/s "
            f"({top.rate(0.9):,.0f}\N{EN DASH}{top.rate(0.1):,.0f}), read and written.</p>"
        )
    yield "<p>Median with the 10th and 90th percentile; GB/s are Outrider's.</p>"
    for operation in ("paged_attention", "sample_match"):
        found = [m for m in benchmark.measurements if m.operation == operation]
        if found:
            yield f"<details><summary>All times of {operation}, in µs</summary>"
            yield from _table(found, top)
            yield "</details>"


def _table(found: Sequence[Measurement], top: Measurement | None) -> Iterator[str]:
    """Return a line for each shape, its contenders beside each other, the first of them ours."""
    contenders = list(dict.fromkeys(one.contender for one in found))
    shapes = list(dict.fromkeys(tuple(one.shape.items()) for one in found))
    heads = [*found[0].shape, *contenders, "GB/s", "of a copy"]
    yield "<div class='scroll'><table><thead><tr>"
    yield "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr></thead><tbody>"
    for shape in shapes:
        here = {one.contender: one for one in found if tuple(one.shape.items()) == shape}
        ours = here.get(contenders[0])
        cells = [short(value) for _, value in shape]
        cells += [spread(here[name]) if name in here else "not measured" for name in contenders]
        cells += [f"{ours.rate():,.0f}" if ours else ""]
        cells += [f"{ours.rate() / top.rate():.0%}" if ours and top else ""]
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"
