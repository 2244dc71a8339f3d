"""Plots of a benchmark as SVG, in the colours of the page that they stand in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.report.plots import TEXT, colour, name_ticks, new_figure, short, svg
from outrider.selftest.bench import Benchmark
from outrider.selftest.contenders import HOST, OURS, TORCH
from outrider.selftest.timing import Measurement

__all__ = ["SERIES", "Panel", "Series", "rates_by_context", "times_by_rows"]


@dataclass(frozen=True)
class Series:
    """How a contender is drawn and called."""

    contender: str
    label: str
    variable: str
    marker: str

    @property
    def colour(self) -> str:
        """Return the number that stands for its colour."""
        return colour(self.variable)


SERIES = (
    Series(OURS, "Outrider", "--ours", "o"),
    Series(HOST, "SGLang's Triton decode", "--host", "s"),
    Series(TORCH, "torch SDPA over gathered keys", "--torch", "^"),
)


@dataclass(frozen=True)
class Panel:
    """One plot: what it shows in words, for readers who do not see it, and the SVG."""

    title: str
    svg: str


def _attention(benchmark: Benchmark, **shape: int) -> Iterable[Measurement]:
    for one in benchmark.measurements:
        if one.operation == "paged_attention" and shape.items() <= one.shape.items():
            yield one


def _values(benchmark: Benchmark, name: str, **shape: int) -> list[int]:
    return sorted({one.shape[name] for one in _attention(benchmark, **shape)})


def rates_by_context(benchmark: Benchmark) -> list[Panel]:
    """Return a panel for each batch: gigabytes a second by context, below the roofline."""
    panels = []
    most = max(_values(benchmark, "rows"), default=1)
    for batch in _values(benchmark, "batch"):
        figure, axes = new_figure()
        axes.yaxis.set_major_formatter("{x:,.0f}")
        for series in SERIES:
            found = sorted(
                (m for m in _attention(benchmark, batch=batch, rows=1)
                 if m.contender == series.contender),
                key=lambda m: m.shape["context"],
            )  # fmt: skip
            _draw_rates(axes, found, series, "-")
        if most > 1:
            ours = [m for m in _attention(benchmark, batch=batch, rows=most) if m.contender == OURS]
            _draw_rates(axes, ours, SERIES[0], ":")
        if benchmark.roofline is not None:
            rate = benchmark.roofline.rate()
            axes.axhline(rate, color=TEXT, linestyle=(0, (6, 3)), linewidth=1)
            axes.annotate(
                f"a copy: {rate:,.0f}", (0.02, rate), xycoords=("axes fraction", "data"),
                xytext=(0, 3), textcoords="offset points",
            )  # fmt: skip
            axes.set_ylim(0, max(axes.get_ylim()[1], rate * 1.15))
        axes.set_xscale("log", base=2)
        name_ticks(axes, _values(benchmark, "context", batch=batch), "context, tokens")
        axes.set_ylabel("GB/s of keys and values")
        title = f"batch {batch}"
        panels.append(Panel(title, svg(figure, axes, title, f"rates-{batch}")))
    return panels


def times_by_rows(benchmark: Benchmark) -> list[Panel]:
    """Return a panel for each batch, at its longest context: time of a step by its rows."""
    panels = []
    for batch in _values(benchmark, "batch"):
        context = max(_values(benchmark, "context", batch=batch))
        figure, axes = new_figure()
        axes.yaxis.set_major_formatter("{x:,.0f}")
        for series in SERIES:
            found = sorted(
                (m for m in _attention(benchmark, batch=batch, context=context)
                 if m.contender == series.contender),
                key=lambda m: m.shape["rows"],
            )  # fmt: skip
            middle = [1000 * m.median for m in found]
            spread = [[1000 * (m.median - m.percentile(0.1)) for m in found],
                      [1000 * (m.percentile(0.9) - m.median) for m in found]]  # fmt: skip
            _draw(axes, [m.shape["rows"] for m in found], middle, spread, series, "-")
        axes.set_ylim(0, axes.get_ylim()[1])
        name_ticks(axes, _values(benchmark, "rows", batch=batch, context=context), "rows, K + 1")
        axes.set_ylabel("µs a step")
        title = f"batch {batch}, context {short(context)}"
        panels.append(Panel(title, svg(figure, axes, title, f"times-{batch}")))
    return panels


def _draw_rates(axes: Any, found: Sequence[Measurement], series: Series, line: str) -> None:
    middle = [m.rate() for m in found]
    # a short time is a high rate: the ends change places
    spread = [[m.rate() - m.rate(0.9) for m in found], [m.rate(0.1) - m.rate() for m in found]]
    _draw(axes, [m.shape["context"] for m in found], middle, spread, series, line)


def _draw(
    axes: Any,
    x: Sequence[int],
    middle: Sequence[float],
    spread: Sequence[Sequence[float]],
    series: Series,
    line: str,
) -> None:
    if x:
        axes.errorbar(
            x, middle, yerr=spread, color=series.colour, marker=series.marker, markersize=5,
            linestyle=line, linewidth=1.6, capsize=3, elinewidth=1,
        )  # fmt: skip
