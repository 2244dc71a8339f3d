"""The pages of every tool: what models, servers and files say in them is text and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import audit, bench, search, selftest, trial, walk
from strategies import STEERS, texts

from outrider.clients import Counts
from outrider.report import Page, table

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
HOSTILE = "'\"><img src=http://evil/x onerror=alert(1)></style><script>alert(1)</script>&lt;b&gt;"

KNOWN = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "footer", "section"),
    *(
        "h1",
        "h2",
        "h3",
        "h4",
        "p",
        "ul",
        "ol",
        "li",
        "dl",
        "div",
        "dt",
        "dd",
        "pre",
        "code",
        "small",
    ),
    *("table", "thead", "tbody", "tr", "th", "td", "details", "summary", "figure", "figcaption"),
    *("span", "b", "i", "s", "em", "br", "a", "svg", "g", "path", "rect", "text", "defs", "use"),
    *("small", "clippath", "tspan", "circle", "line", "polyline"),
}
POLICY = {
    "default-src": "'none'", "style-src": "'unsafe-inline'", "img-src": "data:",
    "base-uri": "'none'", "form-action": "'none'",
}  # fmt: skip


class Read(HTMLParser):
    """Finds what a page would run or load.

    found: tags and attributes that no page of ours has; policy: its CSP; scripts: their texts
    """

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.found, self.policy, self.scripts, self._tag = [], [], [], ""
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self._tag = tag
        if tag == "script" and not attrs:
            self.scripts.append("")
        elif tag not in KNOWN:
            self.found.append(tag)
        named = dict(attrs)
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy.append(named["content"])
        for name, value in attrs:
            if name.startswith("on") or name in ("srcset", "action", "formaction", "background"):
                self.found.append(f"{tag} {name}")
            elif name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.found.append(f"{tag} {name}={value}")
            elif name == "style":
                self._look_at_style(value or "")

    def handle_endtag(self, tag):
        self._tag = ""

    def handle_data(self, data):
        self.text += data
        if self._tag == "script":
            self.scripts[-1] += data
        elif self._tag == "style":
            self._look_at_style(data)

    def _look_at_style(self, style):
        self.found += re.findall(r"@import|expression|url\((?!['\"]?(?:#|data:))", style)


def look_at(html, scripts=0):
    """Check that a page is text, that it loads nothing and runs no script but its own."""
    html.encode()
    assert not STEERS & set(map(ord, html))
    read = Read(html)
    assert read.found == []
    (policy,) = read.policy
    said = dict(part.split(" ", 1) for part in policy.split("; "))
    digests = [hashlib.sha256(one.encode()).digest() for one in read.scripts]
    allowed = [f"'sha256-{base64.b64encode(one).decode()}'" for one in digests] or ["'none'"]
    assert said == POLICY | {"script-src": " ".join(allowed)}
    assert len(read.scripts) == scripts
    # the policy holds for what stands after it
    assert html.index("Content-Security-Policy") < html.index("<title>")
    return read


@pytest.fixture(scope="module", autouse=True)
def first_plots():
    """Load fonts and libraries before the clock of the first input starts."""
    from outrider.audit.page import page

    page(audit("a", "b"))


@given(texts(), texts())
def test_any_page(one, other):
    page = Page(one, other, subtitle=one)
    page.section(other, table([one, other], [[one, other, one]]))
    page.made_with({one: other, "argv": [one], "versions": {other: one}, "n": None})
    look_at(page.html())


@given(texts(), texts())
def test_audit(one, other):
    from outrider.audit.page import page

    look_at(page(audit(one, other)))


@given(texts(), texts(), st.booleans())
def test_bench(one, other, is_broken):
    from outrider.bench.page import page

    look_at(page(bench(one, other, is_broken)))


@given(texts(), texts())
def test_explain(one, other):
    from outrider.explain.page import page

    look_at(page(walk(one, other)), scripts=1)


@given(texts(), texts())
def test_tune(one, other):
    from outrider.tune.advice import advise
    from outrider.tune.page import page

    tried = search(one, other)
    look_at(page(tried, advise(tried), other, {"date": one}, one, bool(other)))


@given(texts(), texts())
def test_trial(one, other):
    from outrider.trial.page import page

    look_at(page(trial(one, other)))


@given(texts(), texts())
def test_selftest(one, other):
    look_at(selftest(one, other).page())


@given(texts())
def test_the_title_of_a_plot_is_text(title):
    """A title with a quote was live HTML; one with a dollar was a formula, and a crash."""
    from outrider.report.plots import new_figure, svg

    figure, axes = new_figure()
    page = Page("a", "b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # others' words would be in a warning
        page.add(svg(figure, axes, title, title))
    look_at(page.html())


@pytest.mark.parametrize("title", [HOSTILE, "p$\\frac$.txt", "$$", "a\\$b$"])
def test_a_title_is_read_as_it_is(title):
    from outrider.bench.page import page

    name = title.replace("\\", "/").rpartition("/")[2]
    read = look_at(page(bench(f"wl/{title}", title)))
    assert name in read.text


def test_a_position_takes_no_memory():
    """A tick for each place up to 300,000,000 took 2.9 GB."""
    import tracemalloc

    from outrider.bench.page import page

    found, place = bench("a", "b"), 300_000_000
    counts = Counts(9, 9, 9, 9, 9)
    counts.accepted_at.update({1: 3, place: 1})
    counts.proposed_at.update({1: 3, place: 1})
    found.runs[1] = type(found.runs[1])(1, found.runs[1].cell, 0, 3.0, 6, (0.1,), (0.1,), counts)
    page(found)  # imports are no part of it
    tracemalloc.start()
    look_at(page(found))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * 2**20


def test_twin_what_a_page_would_load_is_found():
    page = Page("a", "b").html()
    for html in (
        "<img>", "<p onclick=x>", "<a href='http://evil'>", "<p style='background: url(http://e)'>",
        "<style>@import 'x'</style>", "<script>alert(1)</script>", "<svg><image href='http://e'>",
        "<iframe>", "\x1b", "\u202e",
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            look_at(page.replace("</main>", f"{html}</main>"))
    with pytest.raises(ValueError, match="not enough values"):
        look_at(re.sub("<meta http-equiv[^>]*>", "", page))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.html")), ids=lambda path: path.stem)
def test_pages_that_the_docs_show(path):
    look_at(path.read_text(encoding="utf-8"), scripts=int(path.stem.startswith("explain")))
