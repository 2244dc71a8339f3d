"""A drafter of another package is found by its name, and changes no answer."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

import outrider
from outrider.core import Budget, KeyedCoins, Outcome, Request, SamplingParams
from outrider.drafters import ModelDrafter, NgramDrafter, SuffixDrafter, make_drafter
from outrider.drafters.registry import OURS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "bigram_drafter"
PAGE = (ROOT / "docs" / "drafters.md").read_text()


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """What `pip install examples/bigram_drafter` would leave, for the time of a test."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "outrider_bigram-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (module,) = EXAMPLE.glob("*.py")
    (tmp_path / module.name).write_text(module.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(module.stem, None)


def test_it_is_not_there_unless_installed():
    with pytest.raises(outrider.Unsupported, match="or install it"):
        make_drafter("bigram", {})


@pytest.mark.usefixtures("installed")
def test_it_is_found_with_its_options():
    assert make_drafter("bigram", {"min_share": 0.9}).name == "bigram"
    with pytest.raises(outrider.Unsupported, match="min_share"):
        make_drafter("bigram", {"min_share": 2})
    with pytest.raises(outrider.Unsupported, match=r"choose one of ahead, bigram,.* ngram,"):
        make_drafter("trigram", {})


@pytest.mark.parametrize("name", OURS)
def test_the_page_lists_every_drafter(name):
    rows = re.findall(rf"^\| `{name}`", PAGE, re.MULTILINE)
    assert len(rows) >= 1 + bool(inspect.signature(OURS[name]).parameters)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("ngram", {"min_n": 2.5}, "min_n must be a whole number from 1"),
        ("ngram", {"min_n": True}, "min_n"),
        ("ngram", {"min_n": "3"}, "min_n"),
        ("ngram", {"max_n": float("inf")}, "max_n"),
        ("ngram", {"max_n": 10**30}, "max_n"),
        ("ngram", {"min_n": 5, "max_n": 3}, "need min_n <= max_n, not 5 and 3"),
        ("suffix", {"min_match": 2.5}, "min_match"),
        ("suffix", {"min_match": 10**30, "max_match": 10**31}, "min_match"),
        ("suffix", {"max_match": 2**64}, "max_match"),
        ("suffix", {"width": 2.0}, "width must be a whole number from 1 to 8"),
        ("suffix", {"min_vote": "0.5"}, "min_vote must be a number from 0 to 1"),
        ("suffix", {"min_vote": 10**400}, "min_vote"),
        ("suffix", {"shared_tokens": -1}, "shared_tokens"),
        ("ahead", {"wait": "1"}, "wait must be a number of at least 0"),
        ("ahead", {"wait": float("nan")}, "wait"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(name, options, named):
    with pytest.raises(outrider.Unsupported) as refused:
        make_drafter(name, options)
    message = str(refused.value)
    assert named in message.split("; ", 1)[1]
    assert "\n" not in message


@pytest.mark.usefixtures("installed")
def test_it_drafts_what_followed_most_often():
    drafter = make_drafter("bigram", {"min_share": 0.6})
    request = Request(0, (1, 2, 3, 1, 2, 4, 1, 2, 3, 1), SamplingParams(), 0)
    budget = Budget((5,), "match", KeyedCoins())
    drafter.start([request])
    found = drafter.propose([request], budget)
    assert found.tokens.tolist() == [2, 3, 1, 2, 3]
    assert found.confidences == pytest.approx([1, 2 / 3, 1, 1, 2 / 3])
    outcome = Outcome(request, (2, 4, 4), (0, 1, 2), 5, 1, None)
    drafter.observe([outcome])
    outcome.apply()
    assert drafter.propose([request], budget).num_drafts == (0,)  # 4 went on as 1, then as 4
    drafter.stop([request])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "T=0.7"])
def test_the_answer_is_that_of_plain_decoding(load, tokenizer, sampling):
    target, tok = load("tiny-target"), tokenizer("tiny-target")
    prompts = [tok.encode(text) for text in ("The outrider", "At the bridge the toll-keeper")]
    options = {"sampling": sampling | {"max_tokens": 80}, "exactness": "bitwise"}
    plain = outrider.generate(target, prompts, drafter="none", **options)
    done = outrider.generate(target, prompts, drafter="bigram", **options)
    assert done.outputs == plain.outputs
    assert done.stats.accepted > 0
    assert not done.stats.fallbacks


def test_what_the_page_shows_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    options, adaptive = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(options, "drafters.md", "exec"), {})
    assert capsys.readouterr().out.endswith("Counter()\n")
    exec(compile(adaptive, "drafters.md", "exec"), {})
    assert capsys.readouterr().out.strip()
    (declared,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert declared in (EXAMPLE / "pyproject.toml").read_text()


@pytest.mark.parametrize("drafter", [NgramDrafter, SuffixDrafter, ModelDrafter])
def test_the_page_has_every_option_and_its_default(drafter):
    options = inspect.signature(drafter).parameters.values()
    expected = {f"{o.name}={o.default}" for o in options if o.default is not o.empty}
    row = re.search(rf"^\| `{drafter.name}` \| (.*=.*) \|$", PAGE, re.MULTILINE).group(1)
    assert set(re.findall(r"`(\w+=[^`]+)`", row)) == expected


def test_files_that_the_page_names_exist():
    named = re.findall(r"`((?:src|tests|benchmarks|examples)/[\w./]+)`", PAGE)
    named += [f"docs/{link}" for link in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", PAGE)]
    assert named
    for name in named:
        assert (ROOT / name).exists(), name
