"""The walk as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib.resources import files

from outrider.explain.label import LONE_BYTES, label, visible
from outrider.explain.tree import picture
from outrider.explain.walk import Draft, Emitted, Walk, WalkStep
from outrider.report import Page

__all__ = ["page"]

OPEN, FIRST = 40, 8
"""Walks of so many steps are unfolded; of longer ones, the first few."""

SURE = 0.9
"""Above this probability the target's alternatives are not worth a look."""

HOW_TO_READ = (
    "In each step the drafter guesses how the text goes on, and one pass of the target checks all "
    "guesses at once, and adds a token of its own. "
    "<b class='accepted'>Green</b> tokens were drafted, and are what the target would have "
    "written; <b class='own'>amber</b> ones the target wrote itself; <s class='rejected'>struck"
    "</s> drafts it would not have written, and they are no part of the text. "
    "Point at a token, or tap it, to see its step and what else the target considered there."
)

KEYS = {
    "root": "the last token before",
    "accepted": "accepted draft",
    "own": "the target's own token",
    "rejected": "rejected draft",
    "unreached": "not reached",
}
"""What the colours of a picture mean."""

ENDINGS = {
    "prompt": "The target reads the prompt, and writes the first token.",
    "plain": "Nobody drafted; the target writes one token, as in plain decoding.",
    "bonus": "Accepted to the end of a path, and one token more: the <em>bonus</em>.",
    "ended": "The text ends with an accepted draft.",
}


def page(walk: Walk) -> str:
    """Return the page. Whatever prompt and models say in it is escaped."""
    style = files("outrider.explain").joinpath("explain.css").read_text(encoding="utf-8")
    settings = walk.settings
    who = " and ".join(dict.fromkeys(step.drafter for step in walk.steps if step.drafter))
    draft = f" ({settings['draft']})" if settings.get("draft") else ""
    about = (
        f"{settings.get('target')}; drafts by {who or 'nobody'}{draft}; {settings.get('engine')}"
    )
    made = Page(
        "Outrider explain",
        walk.verdict,
        "bad" if walk.plain is not None and not walk.plain.equal else "good",
        f"{about}, {str(walk.provenance.get('date', ''))[:10]}",
        style,
        _SCRIPT,
    )
    made.add(*_figures(walk), f"<p class='how'>{HOW_TO_READ}</p>")
    made.section("The text", "".join(_story(walk)))  # every space in it counts
    made.section("Tokens in each step", *_strip(walk))
    made.section("Step by step", *_cards(walk))
    made.made_with({**{k: v for k, v in settings.items() if v is not None}, **walk.provenance})
    return made.html()


def _figures(walk: Walk) -> Iterator[str]:
    """Yield the equation, and the rest of what there is to count."""
    t = walk.totals
    terms = (
        ("all", t.tokens_per_pass, "tokens a pass"),
        ("own", t.tokens_per_pass - t.accepted_per_pass, "the target's own"),
        ("accepted", t.accepted_per_pass, "accepted drafts"),
    )
    yield "<div class='equation'>"
    for sign, (kind, value, name) in zip(("", "=", "+"), terms, strict=True):
        yield f"<i>{sign}</i>" if sign else ""
        yield f"<span class='{kind}'><b>{value:.2f}</b>{name}</span>"
    yield "</div><p class='facts'>"
    facts = [walk.counted] if t.decode_passes else []
    facts += [f"{t.accepted} of {t.drafted} drafts accepted ({t.acceptance_rate:.0%})"]
    facts.append(f"plain decoding would have taken {t.tokens} passes, one for each token")
    if walk.plain is not None:
        facts.append(f"equal to plain decoding: {walk.plain.same} of {walk.plain.total} tokens")
    if walk.foreseen:
        facts.append(walk.foreseen)
    if walk.seconds is not None:
        facts.append(f"{walk.seconds:.1f}\N{NO-BREAK SPACE}s")
    said = "; ".join(facts)
    yield f"{said[0].upper()}{said[1:]}.</p>"


# -- the text


def _story(walk: Walk) -> Iterator[str]:
    yield "<div class='story'>"
    yield f"<span class='prompt'>{escape(visible(walk.prompt, lines=True))}</span>"
    for step in walk.steps:
        yield f"<span class='step' data-step='step-{step.number}'>"
        for token in step.emitted:
            kind = "own" if token.draft is None else "accepted"
            text = escape(visible(token.text, lines=True)) or LONE_BYTES
            # a line break alone would be nothing to point at
            text = text.replace("\n", "<i>⏎</i>\n")
            yield f"<span class='t {kind}' tabindex='0'>{text}{_tip(step, token)}</span>"
        yield "</span>"
    yield "</div>"


def _tip(step: WalkStep, token: Emitted) -> str:
    """Return what appears when a token is pointed at."""
    if token.draft is not None:
        who = f" by {visible(step.drafter)}" if step.drafter else ""
        said = f"accepted draft {token.draft + 1} of {len(step.drafts)}{who}"
    else:
        said = {
            "prompt": "the target's own, from reading the prompt",
            "plain": "the target's own, without drafts",
            "bonus": "the target's own, after accepted drafts",
            "recovered": "the target's own, in place of a rejected draft",
        }.get(step.ending, "the target's own")
    return (
        f"<span class='tip'><span><b>{escape(label(token.text))}</b> step {step.number}: "
        f"{escape(said)}</span>{_opinion(step, token)}</span>"
    )


def _opinion(step: WalkStep, token: Emitted) -> str:
    """Return what the target considered at a token's place, with its probabilities."""
    if not token.alternatives:
        return ""
    rivals = {} if token.draft is not None else {d.id: d for d in _rivals(step)}
    rows = [(one.id, one.text, one.probability) for one in token.alternatives]
    if token.probability is not None and all(id_ != token.id for id_, _, _ in rows):
        rows.append((token.id, token.text, token.probability))
    out = ["<span class='opinion'>"]
    for id_, text, probability in rows:
        kind = "rejected" if id_ in rivals else ""
        if id_ == token.id:
            kind = "own" if token.draft is None else "accepted"
        out.append(
            f"<span class='{kind}'><code>{escape(label(text))}</code>"
            f"<i style='--p:{probability:.3f}'></i><b>{_percent(probability)}</b></span>"
        )
    return "".join([*out, "</span>"])


def _rivals(step: WalkStep) -> list[Draft]:
    """Return the drafts that stood where the target's own token stands."""
    kept = [token.draft for token in step.emitted if token.draft is not None]
    last = kept[-1] if kept else -1
    return [one for one in step.drafts if one.parent == last and one.fate == "rejected"]


def _percent(probability: float) -> str:
    if probability < 0.001:
        return "&lt; 0.1 %"
    return f"{100 * probability:.0f} %" if probability >= 0.0995 else f"{100 * probability:.1f} %"


# -- tokens in each step


def _strip(walk: Walk) -> Iterator[str]:
    """Yield a bar for each step, of a square for each token: what it emitted, and what it lost."""
    count = len(walk.steps)
    up = max(len(step.emitted) for step in walk.steps)
    down = max(len(step.drafts) - step.accepted for step in walk.steps)
    height = 10 * (up + down) + 4
    yield (
        f"<figure><div class='scroll'><svg class='strip' viewBox='0 0 {10 * count} {height}' "
        f"preserveAspectRatio='none' style='height:{min(220, 1.3 * height):.0f}px;"
        f"max-width:{28 * count}px;min-width:{5 * count}px' role='img' "
        f"aria-label='tokens in each step, at most {up}'>"
    )
    for step in walk.steps:
        x, lost = 10 * step.number, len(step.drafts) - step.accepted
        title = (
            f"step {step.number}: {len(step.emitted)} tokens, "
            f"{step.accepted} of {len(step.drafts)} drafts accepted"
        )
        yield f"<a href='#step-{step.number}'><title>{title}</title>"
        yield f"<rect class='hit' x='{x}' y='0' width='10' height='{height}'/>"
        for i, token in enumerate(step.emitted):
            kind = "own" if token.draft is None else "accepted"
            yield _square(kind, x, 10 * (up - 1 - i))
        for i in range(lost):
            yield _square("rejected", x, 10 * (up + i) + 4)
        yield "</a>"
    yield (
        f"<path d='M0 {10 * up + 2}H{10 * count}'/></svg></div><figcaption>A column for each step, "
        f"and a square for each token: above the line what was emitted (at most {up}), below it "
        "what was drafted in vain. Select a column to go to its step.</figcaption></figure>"
    )


def _square(kind: str, x: int, y: int) -> str:
    return f"<rect class='{kind}' x='{x + 1}' y='{y + 1}' width='8' height='8'/>"


# -- step by step


def _cards(walk: Walk) -> Iterator[str]:
    yield "<p class='keys'>"
    yield from (f"<span class='{kind}'>{name}</span>" for kind, name in KEYS.items())
    yield "</p>"
    shown = len(walk.steps) if len(walk.steps) <= OPEN else FIRST
    root = "prompt"
    for step in walk.steps:
        is_open = " open" if step.number < shown else ""
        yield f"<details class='card' id='step-{step.number}'{is_open}><summary>"
        yield f"<span class='number'>{step.number}</span>"
        who = step.drafter or ("plain" if step.number else "prompt")
        yield f"<span class='who'>{escape(visible(who))}</span>"
        yield f"<span class='kept'>{step.tally}</span>"
        yield f"<span class='line'>{_line(step)}</span></summary>"
        yield f"<div class='body'><div><div class='scroll'>{picture(step, root)}</div>"
        yield f"<p>{_outcome(step)}</p></div>"
        if step.own is not None and _is_open(step):
            yield _opinion(step, step.own)
        yield "</div></details>"
        root = step.emitted[-1].text


def _is_open(step: WalkStep) -> bool:
    """Say whether there was something to decide where the target's own token stands."""
    sure = max((one.probability for one in step.emitted[-1].alternatives), default=1.0)
    return step.ending == "recovered" or sure < SURE


def _line(step: WalkStep) -> str:
    """Return a step in one line: what it emitted, and what it lost."""
    out = []
    for token in step.emitted:
        kind = "own" if token.draft is None else "accepted"
        out.append(f"<span class='{kind}'>{escape(visible(token.text))}</span>")
    for run in step.lost():
        text = "".join(visible(step.drafts[i].text) or LONE_BYTES for i in run).strip(" ")
        out.append(f"  <s class='rejected'>{escape(text)}</s>")
    return "".join(out)


def _outcome(step: WalkStep) -> str:
    """Return in words how a step ended."""
    if step.ending != "recovered" or step.own is None:
        said = ENDINGS[step.ending]
    else:
        drafts = " and ".join(
            f"<s class='rejected'>{escape(label(one.text))}</s>" for one in _rivals(step)
        )
        said = (
            f"Drafted was {drafts}; the target writes "
            f"<b class='own'>{escape(label(step.own.text))}</b> instead, the <em>recovered</em> "
            "token."
        )
    if step.seconds is not None:
        said += f" <small>{1000 * step.seconds:,.0f} ms</small>"
    return said


# Without it the page works too: it only unfolds the step that was selected.
_SCRIPT = """
const unfold = () => {
  const card = document.getElementById(location.hash.slice(1));
  if (card instanceof HTMLDetailsElement) { card.open = true; card.scrollIntoView(); }
};
addEventListener("hashchange", unfold);
unfold();
for (const step of document.querySelectorAll(".story .step"))
  step.addEventListener("click", (event) => {
    if (event.pointerType === "mouse") location.hash = step.dataset.step;
  });
const cards = [...document.querySelectorAll("details.card")];
const all = document.createElement("button");
all.textContent = "Fold or unfold all";
all.onclick = () => { const open = !cards[0].open; for (const card of cards) card.open = open; };
cards[0].before(all);
"""
