"""The benchmark reckons right, tells no speed where answers differ, and keeps what it has."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from outrider.bench import measure as bench
from outrider.bench import run as command
from outrider.bench.measure import Cell, Parity, Plan, speed_of
from outrider.bench.result import Result, compared, load_result, names
from outrider.bench.workloads import KINDS, prompts
from outrider.cli.main import app
from outrider.clients import Answer, Counts, Query, Token
from outrider.errors import Unsupported, UsageError


def answer(text="a b", start=0.0, first=1.0, last=3.0, tokens=3, logprobs=()):
    between = [(first + (last - first) * i / (tokens - 1), float(i + 1)) for i in range(tokens)]
    return Answer(text, tuple(logprobs), tokens, "length", ((start, 0.0), *between))


class Fake:
    """An engine for error paths: says what it is told to, at a speed of its own."""

    def __init__(self, spec="http://fake", said="a b", seconds=2.0, counts=None, stop_after=None):
        self.spec, self.said, self.seconds, self.stop_after = spec, said, seconds, stop_after
        self._counts, self.asked, self.closed = counts, 0, False

    def ask(self, queries, concurrency=1, *, stream=False, rate=None, heard=None):
        self.asked += 1
        if self.stop_after is not None and self.asked > self.stop_after:
            raise KeyboardInterrupt
        tokens = [Token(t, -0.1, ((t, -0.1), ("z", -3.0))) for t in self.said.split()]
        each = 1 + self.seconds  # one after the other
        return [
            answer(self.said, n * each, n * each + 1, n * each + each, 3, tokens)
            for n in range(len(queries))
        ]

    def counts(self):
        if self._counts is None:
            return None
        scale = self.asked  # as much again in each run
        c = self._counts
        seconds = Counter({"forward": c.seconds["forward"] * scale})
        return Counts(
            c.steps * scale, c.request_steps * scale, 0, c.emitted * scale, seconds=seconds
        )

    def facts(self):
        return {"engine": self.spec, "model": "m"}

    def close(self):
        self.closed = True


@pytest.fixture
def engines(monkeypatch):
    """Return a function that lets these engines be opened by their names."""

    def put(**named):
        monkeypatch.setattr("outrider.clients.open_engine", lambda spec: named[spec])

    return put


def run(tmp_path, specs, as_json=True, **more):
    plan = {"concurrency": [1], "rates": [], "max_tokens": 8, "rounds": 2, "requests": 1}
    plan |= {"chat": False, **more}
    command.run(specs, ["chat"], tmp_path, as_json, **plan)


def test_speed_is_that_of_decoding():
    steady = [answer(start=0, first=1, last=11, tokens=11) for _ in range(2)]
    assert speed_of(steady) == pytest.approx(2.0)
    # the first token is the prefill's, and so is the time until it comes (twin: all by all)
    assert sum(a.count for a in steady) / 11 == pytest.approx(2.0)
    slow = [answer(start=0, first=9, last=19, tokens=11) for _ in range(2)]
    assert speed_of(slow) == pytest.approx(2.0)
    # one after the other: what the second waits for is part of the work
    later = [answer(first=1, last=11, tokens=11), answer(start=11, first=12, last=22, tokens=11)]
    assert speed_of(later) == pytest.approx(21 / 21)
    # of two engines that say the same, the ratio is that of their times
    fast = [answer(start=0, first=1, last=6, tokens=11) for _ in range(2)]
    assert speed_of(fast) / speed_of(steady) == pytest.approx(2.0)


def test_a_result_has_speed_equation_and_report(tmp_path, engines, capsys):
    counts = Counts(steps=10, request_steps=10, emitted=30)
    counts.seconds["forward"] = 2
    engines(plain=Fake("plain"), ours=Fake("ours", seconds=0.5, counts=counts))
    run(tmp_path, ["plain", "ours"])
    found = json.loads(capsys.readouterr().out)
    plain, ours = found["cells"]
    assert ours["times_plain"] == {"median": 4, "min": 4, "max": 4}
    assert plain["times_plain"] is None
    # 3 tokens a step of 200 ms; plain decodes one in 1 s: 3 / (0.2 / 1)
    assert ours["equation"] == {
        "tokens_per_step": 3,
        "step_seconds": 0.2,
        "decode_seconds": 1,
        "speed_up": 15,
    }
    assert found == json.loads((tmp_path / "bench.json").read_text())
    page = (tmp_path / "bench.html").read_text()
    assert "4.00 times plain" in page
    assert "3.00 / 0.20 = 15.00" in page
    HTMLParser().feed(page)


def test_a_narrow_terminal_shows_which_cell_it_was(tmp_path, engines, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    long = "transformers:target#mode=assisted,draft=a-model-of-many-words,dtype=bfloat16"
    engines(**{"plain": Fake("plain"), long: Fake(long, seconds=0.5)})
    run(tmp_path, ["plain", long], as_json=False)
    said = capsys.readouterr().out
    assert "chat, B = 1" in said
    assert "4.00 (4.00-4.00)" in said
    assert "1/1 equal" in said
    assert "mode=assisted," in said


@pytest.mark.parametrize(
    ("said", "holds"), [("a b", True), ("a c", False)], ids=["same", "planted difference"]
)
def test_no_speed_is_told_where_answers_differ(tmp_path, engines, capsys, said, holds):
    engines(plain=Fake("plain"), ours=Fake("ours", said=said, seconds=0.5))
    if holds:
        run(tmp_path, ["plain", "ours"])
    else:
        with pytest.raises(SystemExit, match="1"):
            run(tmp_path, ["plain", "ours"])
    found = json.loads(capsys.readouterr().out)
    assert ("times_plain" in found["cells"][1]) == holds
    assert ("tokens_per_second" in found["cells"][1]) == holds
    page = (tmp_path / "bench.html").read_text()
    assert ("4.00" in page) == holds
    assert ("no speed is told" in page.partition("<h2>")[0]) != holds


@pytest.mark.parametrize(
    ("firsts", "verdicts"),
    [
        (("a b", "a c"), ("numerical tie",)),
        (("a c", "a b"), ("numerical tie",)),  # it was plain that strayed
        (("a b", "a d"), ("wrong",)),
        (("a d", "a b"), ("unsteady",)),
    ],
)
def test_a_difference_that_does_not_come_again_is_judged_by_plain(firsts, verdicts):
    tokens = [
        Token("a", -0.1, (("a", -0.1), ("z", -3.0))),
        Token(" b", -0.7, ((" b", -0.7), (" c", -0.71), (" d", -3.0))),
    ]
    told = answer("a b", logprobs=tokens)
    engines = [Fake(said="unasked"), Fake(said="unasked")]
    for engine in engines:
        engine.ask = lambda queries, concurrency: [told]
    pair = tuple([answer(text)] for text in firsts)
    found = bench._parity(*engines, [Query("p")], 1, pair)
    assert found == Parity(1, 0, verdicts)


def test_a_tie_is_no_mistake():
    assert Parity(4, 3, ("numerical tie",)).holds
    assert Parity(4, 2, ("numerical tie", "numerical tie")).said == "2/4 equal, 2 numerical ties"
    assert not Parity(4, 3, ("wrong",)).holds
    assert not Parity(4, 3, ("unknown",)).holds


def test_ctrl_c_leaves_what_was_measured(tmp_path, engines, capsys):
    ours = Fake("ours", seconds=1.0, stop_after=2)
    engines(plain=Fake("plain"), ours=ours)
    with pytest.raises(SystemExit, match="130"):
        run(tmp_path, ["plain", "ours"], rounds=3)
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["interrupted"]
    assert found["cells"][1]["rounds"] == 1
    assert "Interrupted" in (tmp_path / "bench.html").read_text()
    assert ours.closed


def test_a_server_that_stops_answering_leaves_what_was_measured(tmp_path, engines, monkeypatch):
    ours = Fake("ours")
    engines(plain=Fake("plain"), ours=ours)
    monkeypatch.setattr(ours, "counts", lambda: (_ for _ in ()).throw(Unsupported("gone", fix="x")))
    with pytest.raises(Unsupported, match="gone"):
        run(tmp_path, ["plain", "ours"])
    assert json.loads((tmp_path / "bench.json").read_text())["interrupted"]


def test_two_results_are_compared(tmp_path, engines, capsys):
    for name, seconds in (("old", 1.0), ("new", 0.5)):
        engines(plain=Fake("plain"), ours=Fake("ours", seconds=seconds))
        run(tmp_path / name, ["plain", "ours"])
    old, new = (tmp_path / name / "bench.json" for name in ("old", "new"))
    (one,) = compared(load_result(old), load_result(new))
    assert (one["ratio"], one["clear"]) == (2, True)
    (same,) = compared(load_result(old), load_result(old))
    assert (same["ratio"], same["clear"]) == (1, False)
    done = CliRunner().invoke(app, ["bench", "--compare", str(old), str(new)])
    assert done.exit_code == 0
    assert "2.00" in done.stdout
    empty = tmp_path / "empty.json"
    empty.write_text("")
    done = CliRunner().invoke(app, ["bench", "--compare", str(old), str(empty)])
    assert done.exit_code == 2
    assert "no result" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "change",
    [
        {"concurrency": 10**4000},
        {"concurrency": 0},
        {"rate": 1e300},
        {"workload": "x" * 2000},
        {"times_plain": {"median": 1e-320, "min": 1, "max": 1}},
        {"times_plain": {"median": 1, "min": -1, "max": 1e300}},
    ],
)
def test_a_recorded_result_has_bounds(tmp_path, change):
    spread = {"median": 1.0, "min": 1.0, "max": 1.0}
    cell = {"workload": "w", "concurrency": 1, "rate": None, "engine": 0, "times_plain": spread}
    document = {"outrider_bench": 1, "engines": [{"engine": "e"}], "cells": [cell]}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document))
    load_result(file)
    file.write_text(json.dumps(document | {"cells": [cell | change]}))
    with pytest.raises(UsageError, match=r"is no result of `outrider bench`"):
        load_result(file)


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_counters_that_tell_no_time_make_no_equation(seconds):
    """A server whose steps take no time was a ZeroDivisionError."""
    plan = Plan({"code": ["a"]}, (1,))
    (cell,) = plan.cells
    runs = []
    for engine in (0, 1):
        counts = Counts(steps=10, request_steps=10, emitted=30)
        counts.seconds["forward"] = 1.0 if engine else seconds
        runs.append(bench.Run(engine, cell, 0, 1.0, 6, (), (), counts))
    assert Result({}, [], plan, runs).equation(cell, 1) is None


def test_every_engine_is_first_now_and_then():
    order = []
    plan = Plan({"chat": ["x"]}, concurrency=[1], rounds=2, chat=False)
    three = [Fake(str(e)) for e in range(3)]
    list(bench.measure(three, plan, lambda cell, e, r: order.append((r, e))))
    assert [e for r, e in order if r == 0] == [0, 1, 2]
    assert [e for r, e in order if r == 1] == [1, 2, 0]


def test_names_tell_engines_apart():
    specs = ["http://h:1", "http://h:1#drafter=suffix", "http://h:2"]
    assert names([{"engine": spec} for spec in specs]) == ["plain", "drafter=suffix", "server h:2"]
    ours = {"engine": "http://127.0.0.1:30101", "speculative_algorithm": "OUTRIDER"}
    theirs = {"engine": "http://127.0.0.1:30102", "speculative_algorithm": "EAGLE"}
    plain = {"engine": "http://127.0.0.1:30100"}
    assert names([plain, ours, theirs]) == ["plain", "Outrider :30101", "EAGLE :30102"]
    longer = {**ours, "engine": "http://127.0.0.1:30101#drafter=suffix"}
    assert names([plain, longer]) == ["plain", "Outrider :30101, drafter=suffix"]
    specs = ["transformers:/a/m", "transformers:/a/m#draft=/b/d,mode=assisted"]
    assert names([{"engine": spec} for spec in specs]) == ["plain", "draft=d,mode=assisted"]
    long = "long " * 20_000  # a search from each place would take minutes
    assert names([plain, {"engine": long}]) == ["plain", long]


def test_prompts_of_ones_own(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"messages": [{"role": "user", "content": "two"}]}\n')
    assert bench.workload(str(file), 2) == ["one", "two"]
    lines = tmp_path / "own.txt"
    lines.write_text("one\ntwo\n")
    assert bench.workload(str(lines), 2) == ["one", "two"]
    assert {kind: len(bench.workload(kind, 3)) for kind in KINDS} == dict.fromkeys(KINDS, 3)
    assert len(set(prompts("mixed", 40))) == 40


TINY = "src/outrider/assets/tiny"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://127.0.0.1:9"], "no server answers"),
        (["transformers:nowhere#drafter=ngram"], "no model at"),
        (["transformers:nowhere"], "drafts nothing"),
        ([f"transformers:{TINY}/target", f"transformers:{TINY}/draft"], "different models"),
        ([f"transformers:{TINY}/target#drafter=ngram", "--concurrency", "4"], "--concurrency 1"),
        (["http://h", "--workload", "sonnets"], "choose from"),
        (["http://h", "--workload", "{empty}"], "has no prompts"),
        (["http://h", "--workload", "{broken}"], "line 1"),
        (["http://h", "--concurrency", "many"], "write numbers"),
        ([], "name an engine"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_input_says_what_to_do(tmp_path, arguments, said):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "broken.jsonl").write_text("{\n")
    places = {"empty": tmp_path / "empty.txt", "broken": tmp_path / "broken.jsonl"}
    given = [argument.format(**places) for argument in arguments]
    done = CliRunner().invoke(app, ["bench", *given, "--out", str(tmp_path / "out")])
    assert done.exit_code == (3 if said in ("no server answers", "no model at") else 2)
    assert said in " ".join(done.stderr.replace("│", "").split())


def test_on_a_real_pair(tmp_path, model_dir):
    target, draft = model_dir("tiny-target"), model_dir("tiny-draft")
    file = tmp_path / "own.txt"
    file.write_text("On a misty morning, an outrider rode out\nAt the bridge the toll-keeper\n")
    given = [f"transformers:{target}", f"transformers:{target}#draft={draft},exactness=bitwise"]
    options = ["--concurrency", "1", "--max-tokens", "16", "--rounds", "1", "--requests", "2"]
    options += ["--no-chat", "--json"]
    done = CliRunner().invoke(
        app, ["bench", *given, "--workload", str(file), *options, "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.stderr
    ours = json.loads(done.stdout)["cells"][1]
    assert ours["parity"] == {"asked": 2, "same": 2, "said": "2/2 equal"}
    assert ours["equation"]["tokens_per_step"] > 1.5
    assert ours["counts"]["emitted"] == 30
    assert "<svg" in (tmp_path / "bench.html").read_text()


def test_twin_a_cell_that_has_not_been_measured_has_no_speed():
    plan = Plan({"chat": ["x"]}, concurrency=[1])
    result = Result({}, [{"engine": "a"}, {"engine": "b"}], plan)
    assert result.cells == []
    assert "tokens_per_second" not in result.summary(Cell("chat", 1), 1)


def test_transformers_own_generation_is_measured_one_at_a_time_by_default(tmp_path):
    """It was refused, for the default concurrency has more."""
    pair = f"transformers:{TINY}/target#draft={TINY}/draft"
    options = ["--workload", "prose", "--rounds", "1", "--requests", "1", "--max-tokens", "8"]
    done = CliRunner().invoke(app, ["bench", pair, *options, "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert {cell["concurrency"] for cell in json.loads(done.stdout)["cells"]} == {1}


def test_on_a_phone_no_column_is_out_of_sight():
    """Columns beyond 420 px were cut off: rows become cards there, whose values say their head."""
    from outrider.report import Page, table

    page = Page("Outrider bench", "1.5 times plain")
    page.add(table(["", "times plain", "answers"], [["code", "1.50", "4/4 equal"]]))
    html = page.html()
    assert "<td data-head='times plain'>1.50</td><td data-head='answers'>4/4 equal</td>" in html
    assert ".stack td::before { content: attr(data-head)" in html
