"""Same tokens: token by token, not by the size of the vocabulary."""

from __future__ import annotations

import importlib.util
import json

import pytest
from paper import TINY

from outrider.doctor import tokens
from outrider.doctor.model import read_model

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

LIBRARIES = ["transformers", "tokenizers"]


@pytest.fixture(params=LIBRARIES)
def library(request, monkeypatch):
    """Let the check see this library, and not the one above it."""
    missing = LIBRARIES[: LIBRARIES.index(request.param)]
    look = importlib.util.find_spec
    monkeypatch.setattr(
        tokens.importlib.util, "find_spec", lambda name: None if name in missing else look(name)
    )
    if request.param == "transformers":
        pytest.importorskip("transformers")
    return request.param


def check(draft, target=TINY / "target"):
    return list(tokens.check_tokens(read_model(str(target)), read_model(str(draft))))


def swap_two(content):
    vocab = content["model"]["vocab"]
    vocab["ing"], vocab["rid"] = vocab["rid"], vocab["ing"]


def other_merges(content):
    content["model"]["merges"].reverse()


def test_the_tiny_pair_is_one_family(library):
    found = check(TINY / "draft")
    assert {finding.level for finding in found} == {"ok"}
    assert "each of 512 ids" in found[0].what


def test_twin_two_tokens_swapped_are_found_though_sizes_are_equal(library, tiny_copy):
    path = tiny_copy("draft", "tokenizer.json", swap_two)
    sizes = {len(json.loads((p / "tokenizer.json").read_text())["model"]["vocab"])
             for p in (TINY / "target", path)}  # fmt: skip
    assert len(sizes) == 1
    (finding,) = check(path)
    assert finding.level == "problem"
    assert "differs from the target's in 2 tokens" in finding.what
    assert "'ing'" in finding.what
    assert "'rid'" in finding.what


def test_the_same_tokens_cut_otherwise(library, tiny_copy):
    found = check(tiny_copy("draft", "tokenizer.json", other_merges))
    (bad,) = (finding for finding in found if finding.level == "warning")
    assert "cut text differently: code, whitespace" in bad.what


def test_special_tokens_that_differ(tiny_copy):
    pytest.importorskip("transformers")
    path = tiny_copy("draft", "tokenizer_config.json", lambda c: c.update(eos_token="."))
    found = check(path)
    (note,) = (finding for finding in found if finding.level == "note")
    assert note.what.startswith("special tokens differ: eos_token: ")


def test_chat_templates(tiny_copy, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    same = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
    other = "{% for m in messages %}{{ m['role'] }}{{ m['content'] }}{% endfor %}"

    def with_template(which, template):
        path = tiny_copy(which, "tokenizer_config.json", lambda c: c.update(chat_template=template))
        return path.rename(tmp_path / f"{which}{abs(hash(template))}")

    target = with_template("target", plain)
    last = [check(with_template("draft", text), target)[-1] for text in (plain, same, other)]
    assert [finding.level for finding in last] == ["ok", "ok", "note"]
    assert "no chat template" in check(TINY / "draft", target)[-1].what


def test_without_a_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tokens.importlib.util, "find_spec", lambda name: None)
    (finding,) = check(TINY / "draft")
    assert (finding.level, finding.fix) == ("warning", tokens.INSTALL)


@pytest.mark.parametrize("content", [None, "{"])
def test_a_tokenizer_that_cannot_be_read(library, tiny_copy, content):
    path = tiny_copy("draft", "config.json", lambda c: None)
    (path / "tokenizer.json").unlink()
    if content is not None:
        (path / "tokenizer.json").write_text(content)
    (path / "tokenizer_config.json").unlink()
    (finding,) = check(path)
    assert finding.level == "warning"
    assert "were not compared" in finding.what


def test_a_draft_that_lacks_tokens(tiny_copy):
    """Hosts take it: what it does not know it never drafts."""

    def forget(content):
        model = content["model"]
        kept = {token: i for token, i in model["vocab"].items() if i < 400}
        model["vocab"] = kept
        model["merges"] = [m for m in model["merges"] if "".join(m) in kept]

    found = check(tiny_copy("draft", "tokenizer.json", forget))
    assert any("lacks 112 of the target's 512 tokens" in f.what for f in found)
