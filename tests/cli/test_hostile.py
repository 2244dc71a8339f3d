"""What models, servers and files say steers neither a terminal nor a page."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from outrider.audit.result import Heard, Result, Settings
from outrider.explain.label import label, visible
from outrider.report import Page, table
from outrider.report.console import complain, printable

HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x9b31md\u202ee\x7f\rf</script><script>alert(1)</script>"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(print_it):
    console = Console(file=io.StringIO(), width=200, color_system=None)
    print_it(console)
    return console.file.getvalue()


@pytest.mark.parametrize("show", [visible, label, printable])
def test_words_are_made_visible(show):
    assert STEERS.search(HOSTILE)
    assert not STEERS.search(show(HOSTILE))
    assert visible("a\n\tb", lines=True) == printable("a\n\tb") == "a\n\tb"


def test_a_complaint_does_not_steer_the_terminal():
    assert not STEERS.search(shown(lambda console: complain(console, ValueError(HOSTILE))))


def test_an_audit_that_a_server_stopped():
    from outrider.audit.page import page
    from outrider.audit.run import show

    facts = {"plain": {"engine": HOSTILE}, "speculative": {"engine": HOSTILE}}
    made = {"date": "today", "argv": ["outrider", HOSTILE]}
    result = Result(Settings(), [HOSTILE], [], Heard(), facts, made, stopped=HOSTILE)
    assert not STEERS.search(shown(lambda console: show(result, console)))
    assert "<script" not in page(result)


def test_a_page():
    made = Page(HOSTILE, HOSTILE, subtitle=HOSTILE)
    made.section(HOSTILE, table([HOSTILE], [[HOSTILE]]))
    made.made_with({HOSTILE: HOSTILE, "argv": [HOSTILE], "versions": {HOSTILE: HOSTILE}})
    assert "<script" not in made.html()
    assert "</script" not in made.html()


def test_an_explained_text():
    """The one page that has a script of its own."""
    from outrider.explain.page import page
    from outrider.explain.recording import Recording, StepRecord
    from outrider.explain.terminal import show
    from outrider.explain.walk import make_walk

    recording = Recording(HOSTILE, [1])
    recording.settings = {"target": HOSTILE, "engine": HOSTILE, "drafter": HOSTILE}
    recording.steps = [
        StepRecord(drafter="", drafts=(), parents=(), kept=(), emitted=(2,)),
        StepRecord(drafter=HOSTILE, drafts=(3, 4), parents=(-1, 0), kept=(0,), emitted=(3, 5)),
    ]
    recording.output_ids = [2, 3, 5]
    walk = make_walk(recording, lambda lists: [HOSTILE * len(ids) for ids in lists], {})
    html = page(walk)
    assert html.count("<script") == html.count("</script") == 1
    assert "alert(1)</script>" not in html
    assert not STEERS.search(shown(lambda console: show(walk, console)))
