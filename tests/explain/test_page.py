"""The page is well formed, needs nothing else, and says nothing that it was not told."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from io import StringIO

import pytest
from recordings import AHEAD, PROMPT, TREE, letters, recording, step
from rich.console import Console

from outrider.explain import in_process
from outrider.explain.label import label, visible
from outrider.explain.page import page
from outrider.explain.recording import ExplainOptions
from outrider.explain.terminal import show
from outrider.explain.tree import picture
from outrider.explain.walk import make_walk

VOID = {"meta", "br", "wbr"}
KEPT = ("root", "accepted", "own")
NASTY = "<script>alert('x')</script> & \"quoted\" <b>bold</b> \x1b[31m\x00"


class Checker(HTMLParser):
    """Collects what there is; complains about tags that do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.ids: Counter[str] = Counter()
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.links += [value for name, value in attrs if name in ("href", "src", "action")]
        self.ids.update(value for name, value in attrs if name == "id")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def nasty(lists):
    return [NASTY * len(ids) for ids in lists]


@pytest.fixture(scope="module")
def tiny():
    options = ExplainOptions(PROMPT, max_tokens=60, max_drafts=5)
    return make_walk(*in_process.record(options, lambda _: None), {"date": "2026-01-01"})


def test_well_formed_and_self_contained(tiny):
    text = page(tiny)
    found = Checker(text)
    assert max(found.ids.values()) == 1
    for link in found.links:
        assert link.startswith("#")
        assert found.ids[link[1:]] == 1
    assert found.tags["details"] == len(tiny.steps)
    assert not re.search(r"https?:|url\(|@import|<link|<img", text)
    assert tiny.verdict in found.text


def test_every_token_is_there_once(tiny):
    text = page(tiny)
    story = text[text.index("<div class='story'>") : text.index("Tokens in each step")]
    assert story.count("class='t ") == len(tiny.output_ids)
    accepted = sum(one.accepted for one in tiny.steps)
    assert story.count("class='t accepted'") == accepted
    strip = text[text.index("<svg class='strip'") : text.index("Step by step")]
    assert strip.count("rect class='accepted'") == accepted
    assert strip.count("rect class='rejected'") == tiny.totals.drafted - accepted
    pills = text.count('<g class="n-')
    assert pills == sum(1 + len(s.drafts) + (s.own is not None) for s in tiny.steps)


def test_everything_is_escaped():
    """The prompt, the tokens, the drafter's name and the settings are others' words."""
    found = recording(TREE.model_copy(update={"drafter": NASTY}), prompt=NASTY)
    found.settings = dict.fromkeys(("engine", "target", "draft", "drafter"), NASTY)
    text = page(make_walk(found, nasty, {"date": NASTY, "argv": ["outrider", NASTY]}))
    checked = Checker(text)
    assert checked.tags["script"] == 1, "ours"
    assert "<b>bold" not in text
    assert "<b>bold" in checked.text
    walked = text[text.index("The text</h2>") : text.index("Made with</h2>")]
    assert "\x1b" not in walked
    assert "\x00" not in walked
    assert "␛[31m␀" in checked.text


def test_long_walks_are_folded():
    plain = [step(emitted=(9,)) for _ in range(500)]
    text = page(make_walk(recording(*plain), letters, {}))
    assert Checker(text).tags["details"] == 501
    assert "<details class='card' id='step-7' open>" in text
    assert "<details class='card' id='step-8'>" in text
    short = page(make_walk(recording(TREE), letters, {}))
    assert "<details class='card' id='step-1' open>" in short


def test_differences_from_plain_decoding_are_the_headline_s_colour():
    found = recording(TREE)
    assert '<header class="good">' in page(make_walk(found, letters, {}))
    found.plain_ids = [1, 10, 13, 21]
    text = page(make_walk(found, letters, {}))
    assert '<header class="bad">' in text
    assert "equal to plain decoding: 3 of 4" in text


def test_tree_picture():
    """The kept path lies on the first line, and no two places lie on each other."""
    (_, now) = make_walk(recording(TREE), letters, {}).steps
    svg = picture(now, "root")
    places = re.findall(
        r'<g class="n-(\w+)"><rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)".*?<text[^>]*>(.*?)<',
        svg,
    )
    kinds = {name: kind for kind, *_, name in places}
    assert kinds == {
        "root": "root",
        "·t10": "accepted",
        "·t13": "accepted",
        "·t20": "own",
        "·t11": "rejected",
        "·t12": "unreached",
        "·t14": "rejected",
    }
    boxes = [(float(x), float(y), float(w)) for _, x, y, w, _ in places]
    top = min(y for _, y, _ in boxes)
    kept = [y for (kind, *_), (_, y, _) in zip(places, boxes, strict=True) if kind in KEPT]
    assert set(kept) == {top}
    for i, (x, y, width) in enumerate(boxes):
        for x2, y2, width2 in boxes[:i]:
            assert abs(y - y2) >= 26 or x >= x2 + width2 or x2 >= x + width


def test_labels_can_be_seen():
    assert label("") == "◌"
    assert label(" a\n\t") == "·a⏎⇥"
    assert label(" " * 12) == "·\N{MULTIPLICATION SIGN}12"
    assert len(label("long" * 20)) == 24
    assert visible("a\nb\x1b", lines=True) == "a\nb␛"


def printed(walk, **more) -> str:
    console = Console(width=100, file=StringIO(), **more)
    show(walk, console)
    return console.file.getvalue()


def test_terminal(tiny):
    text = printed(tiny)
    drawn = re.search(r"^( +4  model  2/3   had a )b *\n( +)~gre~", text, re.MULTILINE)
    assert len(drawn[1]) == len(drawn[2]) + 1, "what was rejected stands below what was written"
    assert f"{tiny.totals.accepted} of {tiny.totals.drafted} drafts accepted" in text
    (story,) = re.findall(r"the text ─+\n(.*?)\n─", text, re.DOTALL)
    assert story.split() == (tiny.prompt + tiny.text).split()


def test_terminal_in_colour(tiny):
    text = printed(tiny, force_terminal=True, color_system="standard", no_color=False)
    assert "\x1b[9;31mgre\x1b[0m" in text, "red and struck"
    assert "~" not in text


def test_terminal_shows_trees_and_no_control_characters():
    tree = TREE.model_copy(update={"drafter": "[red]me[/]"})
    text = printed(make_walk(recording(tree, prompt=NASTY), letters, {}))
    assert "[red]me[/]" in text
    _, written, *below = (line.rstrip() for line in text[text.index("   0") :].splitlines()[:4])
    start = written.index("t10") - 1
    assert written[start:] == " t10 t13 t20"
    # t14 in place of t10; in place of t13 there was t11, with t12 behind it
    assert [line[start:] for line in below] == ["~t14~", "    ~t11 t12~"]
    assert "\x1b" not in text


def test_hits_and_misses_of_a_draft_server():
    walk = make_walk(recording(*AHEAD), letters, {})
    html, text = page(walk), printed(walk)
    for said in (html, text):
        assert "rafts made ahead: 2 of 4 steps, 1 miss, 1 none" in said
    assert "<span class='kept'>miss</span>" in html
    assert "ahead  1/2 hit" in text
