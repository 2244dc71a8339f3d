"""An audit as one HTML page: the verdict, the divergences side by side, the distributions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from outrider.audit.compare import Divergence
from outrider.audit.distribution import SIGNIFICANT, DistributionResult
from outrider.audit.plots import cut, histogram, outcomes, visible
from outrider.audit.result import CHANGED, SAME, TIES, Agreement, Result, summary
from outrider.clients import Answer, Token
from outrider.report import Page, table
from outrider.report.page import State

__all__ = ["page"]

SHOWN_BEFORE, SHOWN_AFTER = 320, 12
"""Characters before a divergence, and tokens after it."""

STATES: dict[str, State] = {"numerical tie": "other", "wrong": "bad", "unknown": "other"}
VERDICT_STATES: dict[str, State] = {SAME: "good", TIES: "good", CHANGED: "bad"}


def page(result: Result) -> str:
    """Return the page."""
    plain, speculative = (result.facts.get(side, {}) for side in ("plain", "speculative"))
    shown = Page(
        "Outrider audit",
        result.verdict,
        VERDICT_STATES.get(result.verdict, "other"),
        f"{speculative.get('engine')} against {plain.get('engine')}, {result.provenance['date']}",
        style=files("outrider.audit").joinpath("page.css").read_text(encoding="utf-8"),
    )
    said = [result.reason, *result.notes]
    shown.add("<ul class='notes'>", *(f"<li>{escape(one)}</li>" for one in said), "</ul>")
    shown.section("Greedy answers", *_greedy(result))
    if result.greedy.divergences:
        shown.section("Where they part", *_divergences(result))
    if result.sampling is not None and result.sampling.tests:
        shown.section("Sampled answers", *_sampled(result, result.sampling))
    shown.section("What was asked", *_asked(result))
    shown.made_with(
        {
            **{name: dict(facts) for name, facts in result.facts.items()},
            **{name: value for name, value in result.provenance.items() if value is not None},
        }
    )
    return shown.html()


# -- greedy


def _greedy(result: Result) -> Iterator[str]:
    sides = {"speculative": result.greedy, "plain again (control)": result.control}
    rows = [[name, *_row(found)] for name, found in sides.items() if len(found)]
    heads = ["against plain", "identical answers", "95 % interval", "tokens before they part"]
    yield table([*heads, "drift: median", "99 %", "largest"], rows)
    tolerance = result.tolerance
    yield (
        f"<p class='wide'>A divergence is a <b>numerical tie</b> if the plain engine finds the two "
        f"tokens within {tolerance.value:.3g} of each other in logprob "
        f"({escape(tolerance.why)}), and <b>wrong</b> if not. Drift is the difference of logprobs "
        "on tokens that agree; noise is that of margins, the distance to the runner-up.</p>"
    )
    counts = result.greedy_counts
    if counts is not None:
        yield (
            f"<p>{counts.drafted:,.0f} tokens were drafted meanwhile, and "
            f"{counts.accepted:,.0f} of them accepted.</p>"
        )
    yield from _drift_plots(result)


def _row(found: Agreement) -> Iterator[str]:
    low, high = found.interval
    yield f"{found.identical} of {len(found)}"
    yield f"{low:.0%} \N{EN DASH} {high:.0%}"
    yield f"{found.agreed:,} of {found.tokens:,}"
    drift = summary(found.drifts)
    yield from (f"{drift[key]:.2g}" for key in ("median", "p99", "max")) if drift else ("",) * 3


def _divergences(result: Result) -> Iterator[str]:
    worst_first = sorted(
        result.greedy.divergences.items(),
        key=lambda item: (result.verdicts[item[0]] != "wrong", -(item[1].margin or 0.0)),
    )
    for n, divergence in worst_first:
        yield from _card(result, n, divergence)


def _card(result: Result, n: int, one: Divergence) -> Iterator[str]:
    verdict = result.verdicts[n]
    place = "" if one.position is None else f", token {one.position + 1}"
    yield f"<div class='card'><h3>Prompt {n + 1}{place}: "
    yield f"<span class='{STATES[verdict]}'>{verdict}</span></h3>"
    yield f"<p class='prompt'>{escape(cut(result.prompts[n], 160))}</p>"
    yield f"<p>{escape(_judged(one, result.tolerance.value))}</p><div class='sides'>"
    sides = (
        ("plain", "--host", one.plain, result.heard.plain[n]),
        ("speculative", "--ours", one.speculative, result.heard.speculative[n]),
    )
    names = {token.text for _, _, token, _ in sides if token is not None}
    for name, colour, token, answer in sides:
        yield f"<div style='--mark: var({colour})'><h4>{name}</h4>"
        yield f"<p class='said'>{_said(one, token, answer)}</p>"
        if token is not None and token.top:
            yield from _alternatives(token, names)
        yield "</div>"
    yield "</div></div>"


def _said(one: Divergence, token: Token | None, answer: Answer) -> str:
    """Return what an engine wrote around a divergence."""
    before = one.before[-SHOWN_BEFORE:]
    said = ("\N{HORIZONTAL ELLIPSIS}" if len(before) < len(one.before) else "") + escape(before)
    if one.position is None:
        return f"{said}<i>{escape(answer.text[len(one.before) :][:120])}</i>"
    rest = "".join(after.text for after in answer.tokens[one.position + 1 :][:SHOWN_AFTER])
    here = visible(token.text) if token else "the end"
    # a line that ends here still ends
    broken = "\n" if token and token.text.endswith("\n") else ""
    return f"{said}<b>{escape(here)}</b><i>{broken}{escape(rest)}</i>"


def _judged(one: Divergence, tolerance: float) -> str:
    """Say in words what the margin is."""
    if one.plain is None and one.speculative is None:
        return "Without tokens and logprobs this cannot be judged."
    if one.plain is None or one.speculative is None:
        return "One answer ends here; how likely the end was is not told."
    if one.margin is None:
        return "Without logprobs this cannot be judged."
    ours, theirs = (
        f"\N{LEFT DOUBLE QUOTATION MARK}{visible(token.text)}\N{RIGHT DOUBLE QUOTATION MARK}"
        for token in (one.plain, one.speculative)
    )
    least = "at least " if one.at_least else ""
    said = (
        f"The plain engine finds {ours} {least}{_times(one.margin)} as likely as {theirs} "
        f"(margin {least}{one.margin:.3g}, tolerated {max(tolerance, one.spacing):.3g})."
    )
    if one.own_margin is not None and one.own_margin < 0:
        said += (
            f" So does the speculative engine itself ({_times(-one.own_margin)}), and yet it wrote "
            "the other."
        )
    if one.spacing:
        said += f" Its logits lie {one.spacing:g} apart here."
    return said


def _times(margin: float) -> str:
    return f"{math.exp(min(margin, 50)):,.3g} times"


def _alternatives(token: Token, names: set[str]) -> Iterator[str]:
    """Yield the likeliest tokens as bars; the two in question in colour."""
    yield "<div class='bars'>"
    for text, value in token.top:
        p = math.exp(min(0.0, value))
        mark = " ours" if text in names else ""
        yield f"<code>{escape(visible(text))}</code>"
        yield f"<span class='bar{mark}' style='width: {100 * p:.1f}%'></span>"
        yield f"<span class='number'>{p:.1%}</span>"
    yield "</div>"


def _drift_plots(result: Result) -> Iterator[str]:
    sides = [("speculative", "--ours", result.greedy), ("plain again", "--host", result.control)]
    sides = [side for side in sides if side[2].drifts]
    if not sides:
        return
    try:
        drift = histogram([(c, found.drifts) for _, c, found in sides], "drift of logprobs")
        noise = [(c, found.noise) for _, c, found in sides]
        panels = drift + histogram(noise, "noise of margins", result.tolerance.value)
    except ImportError as error:
        yield _no_plots(error)
        return
    yield from _legend([(name, colour) for name, colour, _ in sides])
    yield f"<figure><div class='panels'>{panels}</div><figcaption>On tokens that agree, "
    yield "against plain. Dashed: the tolerance.</figcaption></figure>"


def _legend(entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield "<p class='legend'>"
    for name, colour in entries:
        yield f"<span style='--mark: var({colour})'>{escape(name)}</span>"
    yield "</p>"


def _no_plots(error: ImportError) -> str:
    said = f"no plots: {error}; pip install 'outrider[tools]' and run again"
    return f"<p class='note'>{escape(said)}</p>"


# -- sampled


def _sampled(result: Result, sampling: DistributionResult) -> Iterator[str]:
    settings, (low, high) = result.settings, sampling.detectable
    worst = sampling.worst
    assert worst is not None
    said = (
        f"{settings.samples} answers of each engine to each of {len(sampling.counts)} prompts, at "
        f"temperature {settings.temperature:g}"
    )
    if settings.top_p < 1:
        said += f" and top-p {settings.top_p:g}"
    found = "do not follow one distribution" if sampling.differs else "may follow one distribution"
    yield (
        f"<p class='wide'>{said}: they {found}. The smallest p-value of {len(sampling.tests)} "
        f"chi-square tests is {worst.corrected:.2g} after correction for their number; below "
        f"{SIGNIFICANT:g} counts as a difference. With so many answers, distributions that lie "
        f"{low:.2f} apart (total variation, on average over the prompts; {high:.2f} for long "
        "outcomes) would be told apart in 9 of 10 audits.</p>"
    )
    if result.sampling_counts is not None:
        yield (
            f"<p>{result.sampling_counts.drafted:,.0f} tokens were drafted meanwhile, and "
            f"{result.sampling_counts.accepted:,.0f} of them accepted.</p>"
        )
    numbers = sorted({test.prompt for test in sampling.tests if test.prompt is not None})
    telling = [
        min((t for t in sampling.tests if t.prompt == n), key=lambda test: test.p_value)
        for n in numbers
    ]
    try:
        panels = [outcomes(test) for test in telling]
    except ImportError as error:
        yield _no_plots(error)
    else:
        yield from _legend([("plain", "--host"), ("speculative", "--ours")])
        yield f"<figure><div class='panels'>{''.join(panels)}</div><figcaption>How often each "
        yield "outcome came; for each prompt, the way of looking in which the engines differ most."
        yield "</figcaption></figure>"
    yield "<details><summary>All tests</summary>"
    rows = [
        [
            "all together" if test.prompt is None else f"prompt {test.prompt + 1}",
            test.way,
            f"{test.statistic:.1f}",
            test.freedom,
            f"{test.p_value:.2g}",
            f"{test.corrected:.2g}",
            f"{test.detectable:.2f}",
        ]
        for test in sampling.tests
    ]
    states: dict[tuple[int, int], State] = {
        (r, 5): "bad" for r, test in enumerate(sampling.tests) if test.differs
    }
    heads = ["prompt", "outcome", "chi-square", "freedom", "p", "corrected p", "distance found"]
    yield table(heads, rows, states) + "</details>"


# -- what was asked


def _asked(result: Result) -> Iterator[str]:
    for title, prompts in (("Greedy", result.prompts), ("Sampled", result.sampling_prompts)):
        if prompts:
            yield f"<details><summary>{title}: {len(prompts)} prompts</summary><ol>"
            yield from (f"<li class='prompt'>{escape(cut(p, 300))}</li>" for p in prompts)
            yield "</ol></details>"
    chosen = {name: value for name, value in vars(result.settings).items() if value is not None}
    said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in chosen.items())
    yield f"<p class='prompt'>{escape(said)}</p>"
