"""What was tried, as one HTML page."""

from __future__ import annotations

from html import escape
from typing import Any

from outrider.report import Page, table
from outrider.report.plots import TEXT, colour, name_ticks, new_figure, svg
from outrider.tune.advice import Advice
from outrider.tune.search import PLAIN, Search

__all__ = ["page"]

COLOURS = {"adaptive": "--ours", "model": "--host", "suffix": "--good", "ngram": "--other"}


def page(
    search: Search,
    advice: Advice,
    profile: str,
    made: dict[str, Any],
    subtitle: str,
    interrupted: bool,
) -> str:
    """Return the page. profile: as YAML."""
    gain = search.score(advice.chosen)
    verdict = f"{advice.chosen}: {gain:.2f} times plain" if advice.chosen != PLAIN else "Plain"
    document = Page("Outrider tune", verdict, "good" if gain >= 1 else "other", subtitle)
    if interrupted:
        document.add("<p class='note'>Interrupted: the best of what was tried until then.</p>")
    document.section("The profile", f"<pre>{escape(profile)}</pre>")
    document.section("Times plain, by drafter and K", _plot(search))
    rows = []
    for candidate in search.ranking:
        low, high = search.spread(candidate)
        own = [t for t in search.trials if t.candidate == candidate]
        steps = search.tokens_per_step(candidate)
        same = sum(t.same for t in own)
        rows.append(
            [
                str(candidate),
                f"{search.score(candidate):.2f}",
                f"{low:.2f}\N{EN DASH}{high:.2f}",
                len(own),
                f"{steps:.2f}" if steps else "",
                f"{same}/{sum(t.asked for t in own)}" if own else "",
            ]
        )
    heads = ["", "times plain", "by round", "rounds", "tokens a step", "answers equal"]
    states = {(0, 1): "good"} if rows else {}
    document.section("What was tried", table(heads, rows, states))  # type: ignore[arg-type]
    document.add(
        "<p>Successive halving: in a round all settings that are left answer the same prompts, "
        f"{search.tokens} tokens each; the better half goes on to more rounds. Times plain is the "
        "ratio of the times that plain decoding and a setting took in the rounds that it had. Who "
        "dropped out early was measured less.</p>"
    )
    document.made_with(made)
    return document.html()


def _plot(search: Search) -> str:
    try:
        figure, axes = new_figure(5.6, 3.2)
    except ImportError as error:
        return f"<p>No plot: {escape(str(error))}; pip install 'outrider[tools]'.</p>"
    ks = sorted({c.max_drafts for c in search.ranking if c != PLAIN})
    shown = []
    for drafter, variable in COLOURS.items():
        own = sorted(
            (c for c in search.ranking if c.drafter == drafter), key=lambda c: c.max_drafts
        )
        if not own:
            continue
        shown.append((drafter, variable))
        middle = [search.score(c) for c in own]
        low = [max(0.0, search.score(c) - search.spread(c)[0]) for c in own]
        high = [max(0.0, search.spread(c)[1] - search.score(c)) for c in own]
        axes.errorbar(
            [c.max_drafts for c in own], middle, yerr=[low, high], color=colour(variable),
            marker="o", markersize=5, linewidth=1.6, capsize=3,
        )  # fmt: skip
    axes.axhline(1, color=TEXT, linestyle=(0, (6, 3)), linewidth=1)
    axes.set_ylim(0, None)
    axes.set_ylabel("times plain")
    name_ticks(axes, ks, "K, the most drafts in a step")
    legend = "".join(
        f"<span style='--mark: var({variable})'>{drafter}</span>" for drafter, variable in shown
    )
    drawn = svg(figure, axes, "dashed: plain decoding", "tune")
    return f"<p class='legend'>{legend}</p><figure><div class='panels one'>{drawn}</div></figure>"
