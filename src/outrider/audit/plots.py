"""The plots of an audit's page, and tokens as readers see them. Needs matplotlib (`[tools]`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.audit.distribution import DistributionTest
from outrider.report.console import printable

__all__ = ["cut", "histogram", "outcomes", "visible"]

EDGES = [10.0**n for n in range(-6, 2)]
LABELS = [f"\N{LESS-THAN OR EQUAL TO} {edge:g}" for edge in EDGES] + ["more"]
SHOWN = 8
"""Outcomes in a plot."""


def histogram(
    sides: Sequence[tuple[str, Sequence[float]]], title: str, line: float | None = None
) -> str:
    """Return shares of values by decade, as SVG.

    sides: the page's colour of each side, and its values
    line: a value to mark
    """
    from outrider.report import plots

    figure, axes = plots.new_figure(4.6, 2.6)
    width = 0.8 / len(sides)
    for i, (variable, values) in enumerate(sides):
        counts = [0] * len(LABELS)
        for value in values:
            counts[sum(value > edge for edge in EDGES)] += 1
        shares = [count / max(1, len(values)) for count in counts]
        places = [x + (i - (len(sides) - 1) / 2) * width for x in range(len(LABELS))]
        axes.bar(places, shares, width, color=plots.colour(variable))
    axes.set_xticks(range(len(LABELS)), LABELS)
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_ylabel("share of tokens")
    if line:
        place = math.log10(line / EDGES[0]) + 0.5
        axes.axvline(place, color=plots.colour("--other"), linestyle="--", linewidth=1.2)
    return plots.svg(figure, axes, title, f"audit {title}")


def outcomes(test: DistributionTest) -> str:
    """Return how often each outcome came from both engines, as SVG."""
    from outrider.report import plots

    cells = test.cells[:SHOWN]
    n, m = (sum(getattr(c, side) for c in test.cells) for side in ("plain", "speculative"))
    figure, axes = plots.new_figure(4.6, 0.9 + 0.32 * len(cells))
    rows = range(len(cells))
    for shift, variable, shares in (
        (-0.2, "--host", [cell.plain / n for cell in cells]),
        (0.2, "--ours", [cell.speculative / m for cell in cells]),
    ):
        axes.barh([row + shift for row in rows], shares, 0.38, color=plots.colour(variable))
    axes.set_yticks(rows, [_label(cell.outcome) for cell in cells])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=5)
    title = f"prompt {(test.prompt or 0) + 1}, {test.way}: corrected p {test.corrected:.2g}"
    return plots.svg(figure, axes, title, f"audit sampling {test.prompt}")


def _label(outcome: tuple[str, ...] | None) -> str:
    if outcome is None:
        return "all others"
    return printable(cut(visible("".join(outcome)) or "(nothing)", 22)).replace("$", r"\$")


def visible(text: str) -> str:
    """Return a token with its blanks to be seen."""
    shown = text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace("\t", "\\t")
    blanks = len(shown) - len(shown.lstrip(" "))
    return "\N{OPEN BOX}" * blanks + shown[blanks:]


def cut(text: str, length: int) -> str:
    """Return a text in one line, not longer than this."""
    flat = " ".join(text.split("\n"))
    return flat if len(flat) <= length else flat[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"
