"""Plots as SVG, in the colours of the page that they stand in. Needs matplotlib (`[tools]`)."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from html import escape
from typing import Any

from outrider.report.console import printable

__all__ = ["COLOURS", "LINE", "TEXT", "colour", "name_ticks", "new_figure", "plain", "short", "svg"]

# Matplotlib wants colours as numbers; these stand for the page's variables, which may change with
# the reader's theme.
COLOURS = {
    "#010101": "currentColor",
    "#010102": "var(--line)",
    "#010103": "var(--ours)",
    "#010104": "var(--host)",
    "#010105": "var(--torch)",
    "#010106": "var(--good)",
    "#010107": "var(--bad)",
    "#010108": "var(--other)",
}
TEXT, LINE = "#010101", "#010102"

MOST_TICKS = 32
LONGEST_TITLE = 160


def colour(variable: str) -> str:
    """Return the number that stands for a variable of the page, as "--ours"."""
    return next(number for number, name in COLOURS.items() if f"({variable})" in name)


def new_figure(width: float = 4.2, height: float = 3.0) -> tuple[Any, Any]:
    """Return a figure and its axes, in the page's style."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    axes = made.add_subplot()
    axes.grid(color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_color(LINE)
        spine.set_visible(side in ("left", "bottom"))
    axes.tick_params(color=LINE, labelcolor=TEXT, labelsize=9)
    return made, axes


def name_ticks(axes: Any, values: Sequence[int], label: str) -> None:
    """Mark these values, and no others, on the x axis; of very many, some."""
    from matplotlib.ticker import FixedLocator, NullLocator

    values = values[:: -(-len(values) // MOST_TICKS) or 1]
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([short(value) for value in values])
    axes.set_xlabel(label)


def short(number: int) -> str:
    """Return 32768 as 32k."""
    return f"{number // 1024}k" if number and number % 1024 == 0 else str(number)


def plain(text: str, length: int) -> str:
    """Return a text in one line, without control characters, not longer than this."""
    text = printable(" ".join(text[: 2 * length].split()))
    return text if len(text) <= length else text[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


def svg(figure: Any, axes: Any, title: str, salt: str) -> str:
    """Return a figure as SVG for a page.

    title: as plain text; also read to those who do not see it
    salt: ids differ between the plots of a page by it, and not between runs
    """
    import matplotlib as mpl

    title = plain(title, LONGEST_TITLE)
    axes.set_title(title, color=TEXT, fontsize=10, loc="left", parse_math=False)
    for text in (axes.xaxis.label, axes.yaxis.label, *axes.texts):
        text.set_color(TEXT)
        text.set_fontsize(9)
    out = io.StringIO()
    # text stays text
    with (
        mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": printable(salt)}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the browser has glyphs that matplotlib lacks
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    for number, name in COLOURS.items():
        text = text.replace(number, name)
    # its size is the page's business; the ids of groups ("figure_1") would be there many times
    head, rest = text.split(">", 1)
    width, height = (part for part in head.split() if part.startswith(("width=", "height=")))
    head = head.replace(width, 'role="img"').replace(height, f'aria-label="{escape(title)}"')
    start, end = rest.index("<metadata>"), rest.index("</metadata>") + len("</metadata>")
    return f"{head}>{rest[:start]}{rest[end:]}".replace('<g id="', '<g class="')
