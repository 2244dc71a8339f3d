"""What was tried, as one HTML page."""

from __future__ import annotations

from html import escape
from typing import Any

from outrider.report import Page, table
from outrider.report.plots import colour, name_ticks, new_figure, svg
from outrider.tune.advice import Advice
from outrider.tune.search import PLAIN, Candidate, Search

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
    gain = search.gain(advice.chosen)
    verdict = f"{advice.chosen}: {gain:.2f} times plain" if advice.chosen != PLAIN else "Plain"
    document = Page("Outrider tune", verdict, "good" if gain >= 1 else "other", subtitle)
    if interrupted:
        document.add("<p class='note'>Interrupted: the best of what was tried until then.</p>")
    document.section("The profile", f"<pre>{escape(profile)}</pre>")
    document.section("Speed by drafter and K", _plot(search, advice.chosen))
    rows = []
    for candidate in search.ranking:
        low, high = search.spread(candidate)
        own = [t for t in search.trials if t.candidate == candidate]
        steps = search.tokens_per_step(candidate)
        same = sum(t.same for t in own)
        rows.append(
            [
                str(candidate),
                f"{search.score(candidate, advice.chosen):.2f}",
                f"{search.gain(candidate):.2f}",
                f"{low:.2f}\N{EN DASH}{high:.2f}",
                len({t.round for t in own}),
                f"{steps:.2f}" if steps else "",
                f"{same}/{sum(t.asked for t in own)}" if own else "",
            ]
        )
    heads = ["", "of the chosen", "times plain", "by round", "rounds", "tokens a step", "equal"]
    states = {(0, 2): "good"} if rows else {}
    document.section("What was tried", table(heads, rows, states))  # type: ignore[arg-type]
    document.add(
        "<p>Successive halving: in a round all settings that are left answer the same prompts, "
        f"{search.tokens} tokens each; the better half goes on to more rounds. Times plain is the "
        "ratio of the times that plain decoding and a setting took in the rounds that it had. A "
        "round counts by its tokens. It is at most the tokens a step: verifying drafts takes no "
        "less time than decoding without. Of the chosen: the same against the setting that was "
        f"chosen. Noise: {search.noise:.1%}; so much do plain decoding's speeds at the start and "
        "the end of a round differ. Rounds differ: who dropped out early is compared on the first "
        "ones only. Equal: answers that are plain decoding's.</p>"
    )
    document.made_with(made)
    return document.html()


def _plot(search: Search, chosen: Candidate) -> str:
    """Draw each setting's share of the chosen one's speed: unlike times plain, of shared rounds."""
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
        if own:
            shown.append((drafter, variable))
            axes.plot(
                [c.max_drafts for c in own], [search.score(c, chosen) for c in own],
                color=colour(variable), marker="o", markersize=5, linewidth=1.6,
            )  # fmt: skip
    axes.set_ylim(0, 1.08 * max(search.score(c, chosen) for c in search.ranking))
    axes.set_ylabel("share of the chosen's speed")
    name_ticks(axes, ks, "K, the most drafts in a step")
    legend = "".join(
        f"<span style='--mark: var({variable})'>{drafter}</span>" for drafter, variable in shown
    )
    drawn = svg(figure, axes, "on the texts that both had", "tune")
    return f"<p class='legend'>{legend}</p><figure><div class='panels one'>{drawn}</div></figure>"
