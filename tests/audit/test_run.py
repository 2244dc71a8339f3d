"""`outrider audit` as it is typed: files, exit codes, bad input, and Ctrl-C."""

from __future__ import annotations

import json
import re
from html import escape

import pytest
from toy import Toy, top_two
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.errors import Unsupported


@pytest.fixture
def run(tmp_path):
    def invoke(*args):
        return CliRunner().invoke(app, ["audit", *map(str, args), "--out", str(tmp_path / "out")])

    return invoke


@pytest.fixture
def written(tmp_path):
    """Return a function that reads the two files."""

    def read():
        out = tmp_path / "out"
        return json.loads((out / "audit.json").read_text()), (out / "audit.html").read_text()

    return read


def test_a_true_engine(run, engines, written):
    engines |= {"plain": Toy(drafts=False), "spec": Toy()}
    done = run("plain", "spec", "--samples", 60, "--max-tokens", 30)
    assert done.exit_code == 0, done.output
    assert "24 of 24" in done.stdout
    assert "Speculation does not change answers here" in done.stdout
    found, page = written()
    assert found["verdict"] == "Speculation does not change answers here"
    assert found["greedy"]["identical"] == 24
    assert found["greedy"]["interval"][0] == pytest.approx(0.862, abs=0.001)
    assert found["law"]["tests"]
    assert {"date", "argv", "versions"} <= set(found["provenance"])
    assert found["settings"]["max_tokens"] == 30
    assert page.count("<svg") == 2 + 4
    # self-contained: nothing is loaded from anywhere
    assert not re.search(r"<(script|link|img)|@import|url\((?!#)", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_wrong_engine(run, engines, written):
    engines |= {"plain": Toy(drafts=False), "spec": Toy(top_two)}
    done = run("plain", "spec", "--samples", 0, "--json")
    assert done.exit_code == 1
    found, page = written()
    assert json.loads(done.stdout) == found
    wrong = [one for one in found["greedy"]["divergences"] if one["verdict"] == "wrong"]
    assert wrong
    assert {"position", "before", "plain", "speculative", "margin", "own_margin"} <= set(wrong[0])
    assert page.count("class='card'") == len(found["greedy"]["divergences"])
    assert "and yet it wrote the other" in page
    # the prompts are code and prose: whatever they say is shown as text
    assert escape(found["greedy"]["divergences"][0]["text"][:30]) in page


def test_prompts_from_a_file(run, engines, tmp_path):
    engines |= {"plain": Toy(drafts=False), "spec": Toy()}
    (tmp_path / "own.txt").write_text("one\n\n  two  \nthree\n")
    lines = [{"prompt": "four"}, {"messages": [{"role": "user", "content": "five"}]}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, count, expected in (
        ("own.txt", (), ["one", "two", "three"]),
        ("own.txt", ("--count", 2), ["one", "two"]),
        ("own.jsonl", (), ["four", "five"]),
    ):
        engines["spec"].asked.clear()
        done = run("plain", "spec", "--samples", 0, "--prompts", tmp_path / name, *count)
        assert done.exit_code == 4, done.output
        assert [query.prompt for query in engines["spec"].asked] == expected


def test_few_tokens_are_not_enough_evidence(run, engines, written, tmp_path):
    """One prompt of 24 tokens had a green verdict."""
    engines |= {"plain": Toy(drafts=False), "spec": Toy()}
    (tmp_path / "own.txt").write_text("one\n")
    few = ("--samples", 0, "--prompts", tmp_path / "own.txt", "--max-tokens", 24)
    done = run("plain", "spec", *few)
    assert done.exit_code == 4
    assert "Not enough evidence (24 drafted tokens of 1 prompt compared" in done.stdout
    assert "raise --count or --max-tokens" in " ".join(done.stdout.split())
    found, page = written()
    assert found["verdict"] == "Not enough evidence"
    assert "a verdict needs 115 tokens of 5 prompts" in page
    done = run("plain", "spec", *few, "--min-prompts", 1, "--min-tokens", 20)
    assert done.exit_code == 0
    # a fault is a fault, however few there are
    engines["spec"] = Toy(top_two)
    assert run("plain", "spec", *few, "--tolerance", 0.01).exit_code == 1


def test_a_verdict_states_its_power(run, engines, written):
    engines |= {"plain": Toy(drafts=False), "spec": Toy()}
    done = run("plain", "spec", "--count", 6, "--max-tokens", 40, "--samples", 0)
    assert done.exit_code == 0
    said = "240 drafted tokens of 6 prompts compared: a fault in 1 of 105 tokens would show in 9"
    assert said in " ".join(done.stdout.split())
    found, page = written()
    assert said in page
    assert found["power"]["one_fault_in"] == 105
    # a fault in 1 of 105 tokens stays unseen in 240 with a chance of one in ten
    assert pytest.approx(0.1, rel=0.01) == (1 - 1 / 105) ** 240


BAD = {
    "": "has no prompts",
    "\n \n": "has no prompts",
    "hello": "not JSON",
    '"hello"': "no prompt",
    '{"prompt": ""}': "no prompt",
    '{"prompt": 3}': "no prompt",
    '{"messages": []}': "several messages",
    '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}': "several",
    '{"messages": [{"role": "system", "content": "a"}]}': "a message of 'system'",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_files(text, run, engines, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    done = run("plain", "spec", "--prompts", path)
    assert done.exit_code == 2
    assert BAD[text] in " ".join(done.stderr.split())
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()


def test_no_such_file(run, tmp_path):
    done = run("plain", "spec", "--prompts", tmp_path / "nowhere.txt")
    assert done.exit_code == 2
    assert "cannot be read" in done.stderr


@pytest.mark.parametrize(
    ("engine", "says", "code"),
    [
        ("http://127.0.0.1:9", "no server answers", 3),
        ("transformers:/no/such/model", "no model at", 3),
        ("nonsense", "names no engine", 2),
    ],
)
def test_bad_engines(engine, says, code, run):
    done = run(engine, engine)
    assert done.exit_code == code
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_bad_options(run):
    for args in (("--workload", "poetry"), ("--count", 1000), ("--count", 0), ("--temperature", 0)):
        assert run("plain", "spec", *args).exit_code == 2


class Named(Toy):
    def facts(self):
        return {"engine": self.spec, "speculative_algorithm": self.spec.partition("#")[2]}


def test_one_engine_alone(run, engines, tmp_path):
    """An Outrider server can be asked to answer without drafts; others cannot."""
    from outrider.audit import run as module

    outrider = Named(spec="#OUTRIDER")
    engines |= {"http://a": outrider, "http://a#max_drafts=0": Toy(drafts=False)}
    assert run("http://a", "--samples", 0).exit_code == 0
    engines |= {"http://a#drafter=suffix,max_drafts=2": outrider}
    engines |= {"http://a#drafter=suffix,max_drafts=0": Toy(drafts=False)}
    assert run("http://a#drafter=suffix,max_drafts=2", "--samples", 0).exit_code == 0
    engines["http://b"] = Named(spec="#EAGLE")
    done = run("http://b", "--samples", 0)
    assert done.exit_code == 2
    assert "name two engines" in " ".join(done.stderr.split())

    assert module.both_modes("transformers:m#mode=assisted,draft=d,dtype=float32") == (
        "transformers:m#dtype=float32", "transformers:m#mode=assisted,draft=d,dtype=float32",
    )  # fmt: skip
    with pytest.raises(Unsupported, match="drafts nothing"):
        module.both_modes("transformers:m")


def test_a_long_prompt_is_skipped_and_said(run, engines, written, tmp_path):
    """It ended the whole audit. Be it the first or another, and whichever engine refuses it."""
    lines = ["x" * 900, *(f"prompt {n}" for n in range(6)), "y" * 300]
    (tmp_path / "own.txt").write_text("\n".join(lines))
    engines |= {"plain": Toy(drafts=False, room=500), "spec": Toy(room=250)}
    done = run("plain", "spec", "--samples", 0, "--prompts", tmp_path / "own.txt")
    assert done.exit_code == 0, done.output
    assert "6 of 6" in done.stdout
    said = "2 of 8 prompts were skipped: an engine refuses them (prompt 1: too long; shorten it)"
    assert said in " ".join(done.stdout.split())
    found, page = written()
    assert set(found["skipped"]) == {"0", "7"}
    assert said in page
    engines["plain"].room = 65
    done = run("plain", "spec", "--samples", 0, "--prompts", tmp_path / "own.txt")
    assert done.exit_code == 3
    assert "every prompt is refused: too long" in done.stderr


# -- ended early


def failing(error, after):
    def fail(number):
        if number >= after:
            raise error

    return fail


def test_ctrl_c_leaves_what_was_heard(run, engines, written):
    engines |= {"plain": Toy(drafts=False), "spec": Toy(fail=failing(KeyboardInterrupt(), 9))}
    done = run("plain", "spec")
    assert done.exit_code == 130
    found, page = written()
    assert found["interrupted"]
    assert found["verdict"] == "Not decided"
    assert found["greedy"]["prompts"] == found["greedy"]["identical"] == 9
    assert "interrupted" in page
    assert "9 of 9" in page


def test_ctrl_c_after_a_fault_was_seen(run, engines, written):
    """What is wrong stays wrong."""
    slow = Toy(top_two, fail=failing(KeyboardInterrupt(), 24))
    engines |= {"plain": Toy(drafts=False), "spec": slow}
    assert run("plain", "spec", "--samples", 10).exit_code == 130
    found, page = written()
    assert found["verdict"] == "Speculation changes answers"
    assert found["law"] is None
    assert "<li>interrupted</li>" in page


def test_ctrl_c_before_anything_was_heard(run, engines, tmp_path):
    engines |= {"plain": Toy(fail=failing(KeyboardInterrupt(), 0)), "spec": Toy()}
    done = run("plain", "spec")
    assert done.exit_code == 130
    assert "interrupted" in done.stderr
    assert not (tmp_path / "out" / "audit.json").exists()


def test_a_server_that_stops_answering(run, engines, written):
    error = Unsupported("http://x stopped answering", fix="look into its log")
    engines |= {"plain": Toy(drafts=False), "spec": Toy(fail=failing(error, 5))}
    done = run("plain", "spec")
    assert done.exit_code == 3
    assert "stopped answering" in done.stdout
    found, _ = written()
    assert not found["interrupted"]
    assert found["greedy"]["prompts"] == 5


def test_without_matplotlib_the_page_says_so(run, engines, written, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    engines |= {"plain": Toy(drafts=False), "spec": Toy()}
    assert run("plain", "spec", "--samples", 30).exit_code == 0
    _, page = written()
    assert "<svg" not in page
    assert page.count("outrider[tools]") == 2
