"""The search finds what is fast, within its budget, and says why; a profile is one that serves."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.clients import Answer, Counts
from outrider.errors import Unsupported, UsageError
from outrider.tune import run as command
from outrider.tune.advice import advise
from outrider.tune.search import (
    FEWEST,
    MOST,
    PLAIN,
    Candidate,
    Search,
    Traffic,
    Trial,
    available,
    grid,
)

SPEEDS = {
    "none": dict.fromkeys((0, 1), 10.0),
    "suffix": {1: 10.0, 2: 11.0, 4: 11.5, 8: 11.2, 12: 11.0},
    "ngram": {1: 10.0, 2: 10.4, 4: 10.6, 8: 10.3, 12: 10.1},
    "model": {1: 12.0, 2: 14.0, 4: 18.0, 8: 15.0, 12: 12.0},
    "adaptive": {1: 10.0, 2: 13.0, 4: 15.0, 8: 16.0, 12: 16.0},
}


class World:
    """Answers as fast as its table says, give or take some noise, on a clock of its own."""

    def __init__(self, speeds=SPEEDS, noise=0.0, queries=None, clock=None, has=tuple(SPEEDS)):
        self.speeds, self.noise, self.has = speeds, noise, has
        self.queries = queries or {"drafter": "none", "max_drafts": 0}
        self.clock = clock or [0.0]
        self.coins = random.Random(0)
        self.spec = "http://world"
        self.stop_at = float("inf")

    def variant(self, options, salt=None):
        other = World(self.speeds, self.noise, dict(options), self.clock, self.has)
        other.coins, other.stop_at = self.coins, self.stop_at
        return other

    def ask(self, queries, concurrency=1, *, stream=False, rate=None, heard=None):
        if self.queries["drafter"] not in self.has:
            raise Unsupported(f"no {self.queries['drafter']}", fix="none")
        if self.clock[0] > self.stop_at:
            raise KeyboardInterrupt
        start, tokens = self.clock[0], queries[0].max_tokens
        speed = self.speeds[self.queries["drafter"]][self.queries["max_drafts"]]
        speed *= 1 + self.noise * self.coins.uniform(-1, 1)
        step = concurrency / speed
        arrivals = [(start, 0.0), *((start + step * n, float(n)) for n in range(1, tokens + 1))]
        self.clock[0] = arrivals[-1][0]
        return [Answer("x", (), tokens, "length", tuple(arrivals)) for _ in queries]

    def counts(self):
        return None

    def facts(self):
        return {"engine": self.spec, "model": "m"}

    def close(self):
        pass


def search(world, seconds=600.0, candidates=None):
    found = Search(
        world,
        Traffic([f"text {n}" for n in range(40)], 4, False),
        grid(list(SPEEDS)[1:]) if candidates is None else candidates,
        seconds,
        clock=lambda: world.clock[0],
    )
    list(found.run(lambda rung, candidate, spent: None))
    return found


def test_the_fastest_is_found_within_the_budget():
    world = World()
    found = search(world, seconds=900.0)
    assert found.ranking[0] == Candidate("model", 4)
    assert found.score(Candidate("model", 4)) == pytest.approx(1.8, rel=0.02)
    assert [len(rung) for rung in found.rungs] == [16, 8, 4, 2]
    assert 0.5 * 900 < world.clock[0] < 1.15 * 900
    # who stays is measured on more texts
    rounds = [len(found.rounds_of(rung)) for rung in range(4)]
    assert rounds == sorted(rounds)
    assert rounds[0] == 1 < rounds[3]


@pytest.mark.parametrize("seed", range(5))
def test_noise_costs_little(seed):
    world = World(noise=0.15)
    world.coins.seed(seed)
    chosen = advise(search(world)).chosen
    assert SPEEDS[chosen.drafter][chosen.max_drafts] >= 0.88 * 18


def test_twin_a_search_that_keeps_the_worse_half_is_seen(monkeypatch):
    score = Search.score
    monkeypatch.setattr(
        Search, "score", lambda self, *who, **more: 1 / max(1e-9, score(self, *who, **more))
    )
    found = search(World())
    assert SPEEDS[found.ranking[0].drafter][found.ranking[0].max_drafts] < 0.88 * 18


def test_plain_decoding_may_be_the_answer():
    slow = {**SPEEDS, **{name: dict.fromkeys((1, 2, 4, 8, 12), 9.0) for name in list(SPEEDS)[1:]}}
    advice = advise(search(World(slow)))
    assert advice.chosen == PLAIN
    assert advice.values == {"drafter": "none", "max_drafts": 0}
    assert "nothing was faster" in advice.reasons["drafter"]


class Counting(World):
    """Tells how many tokens a step gave, and answers some rounds with `short` tokens only."""

    per_step = 1.0
    short: dict[str, int] = {}  # noqa: RUF012 - by prompt

    def variant(self, options, salt=None):
        other = super().variant(options, salt)
        other.__class__, other.per_step, other.short = Counting, self.per_step, self.short
        other.total = Counts()
        return other

    def counts(self):
        return self.total + Counts()

    def ask(self, queries, concurrency=1, **more):
        most = max(self.short.get(query.prompt, query.max_tokens) for query in queries)
        if most == 0:
            now = self.clock[0] = self.clock[0] + 0.1
            return [Answer("", (), 0, "stop", ((now - 0.1, 0.0), (now, 0.0))) for _ in queries]
        found = super().ask([replace(w, max_tokens=most) for w in queries], concurrency, **more)
        emitted = sum(answer.count for answer in found)
        drafts = self.queries["max_drafts"] > 0
        self.total += Counts(
            emitted=emitted, request_steps=emitted / (self.per_step if drafts else 1.0)
        )
        return found


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_round_of_short_answers_does_not_decide(tokens):
    """A round with nothing to time said that every setting has plain's speed."""
    world = Counting()
    world.per_step, world.short = 4.0, {f"text {n}": tokens for n in (0, 1, 2, 3, 8, 9, 10, 11)}
    found = search(world, seconds=1500.0)
    assert any(trial.speed == 0 for trial in found.trials)
    chosen = advise(found).chosen
    assert chosen == Candidate("model", 4)
    assert found.score(chosen) == pytest.approx(1.8, rel=0.02)
    assert found.spread(chosen)[0] > 1


def test_nothing_but_short_answers(tmp_path, monkeypatch):
    world = Counting()
    world.short = dict.fromkeys(["a", "b"], 0)
    (tmp_path / "own.txt").write_text("a\nb\n")
    monkeypatch.setattr("outrider.clients.open_engine", lambda spec: world)
    options = ["--workload", str(tmp_path / "own.txt"), "--minutes", "0.1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["tune", "--engine", "http://world", *options])
    assert done.exit_code == 4, done.output
    assert "nothing to time" in done.stderr
    assert not (tmp_path / "profile.yaml").exists()


def test_rounds_weigh_by_their_tokens():
    found = search(World(), seconds=10.0)
    mine = Candidate("model", 4)
    found.trials = [
        Trial(who, 0, number, speed, 0.0, 0.0, 4, 4, tokens)
        for number, (speeds, tokens) in enumerate([((10.0, 20.0), 200.0), ((10.0, 5.0), 2.0)])
        for who, speed in zip((PLAIN, mine), speeds, strict=True)
    ]
    assert found.score(mine) == pytest.approx(20.2 / (10 + 0.4))


def test_a_win_that_the_tokens_a_step_do_not_explain_is_none():
    """1.8 times plain at 1.0 tokens a step: no equation gives that."""
    world = Counting()
    world.per_step = 1.0
    found = search(world)
    assert found.score(Candidate("model", 4)) > 1.5
    assert advise(found).chosen == PLAIN
    world = Counting()
    world.per_step = 1.4
    found = search(world)
    assert advise(found).chosen != PLAIN
    assert found.gain(advise(found).chosen) <= 1.4001
    assert "1.40 times plain" in advise(found).reasons["drafter"]


def test_a_win_within_the_noise_is_none():
    even = {name: dict.fromkeys((0, 1, 2, 4, 8, 12), 10.0) for name in SPEEDS}
    chosen = []
    for seed in range(8):
        world = World(even, noise=0.15)
        world.coins.seed(seed)
        found = search(world)
        assert found.noise > 0.03
        chosen.append(advise(found).chosen)
    assert chosen.count(PLAIN) >= 7


def test_no_more_drafts_than_the_server_allows(tmp_path, monkeypatch, capsys):
    """A profile with more would be refused by the server that it was measured on."""
    world = World({**SPEEDS, "model": {1: 12.0, 2: 12.0, 4: 14.0, 5: 18.0},
                   "suffix": {1: 10.0, 2: 10.0, 4: 10.0, 5: 10.0},
                   "adaptive": {1: 10.0, 2: 10.0, 4: 10.0, 5: 10.0}})  # fmt: skip
    monkeypatch.setattr(world, "facts", lambda: {"model": "m", "speculative_num_steps": 5})
    monkeypatch.setattr("outrider.clients.open_engine", lambda spec: world)
    command.run(wanted(tmp_path), True)
    found = json.loads(capsys.readouterr().out)
    assert found["profile"] == {"drafter": "model", "max_drafts": 5}
    assert {c.max_drafts for c in grid(["model"], 3)} == {2, 3}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--speculative-num-steps", "5"], None),
        (["--speculative-num-draft-tokens=6"], None),
        ([], 12),
    ],
)
def test_flags_decide_how_many_drafts_a_server_allows(tmp_path, monkeypatch, flags, said):
    from outrider.clients import process
    from outrider.tune import server

    seen = []

    class Process:
        pid, returncode = 1, 2

        def __init__(self, command, **more):
            seen.append(yaml.safe_load(Path(command[command.index("--profile") + 1]).read_text()))
            self.stdout = BytesIO(b"error: unrecognized arguments: --no-such-flag\n")

        def poll(self):
            return 2

    monkeypatch.setattr(process.subprocess, "Popen", Process)
    monkeypatch.setattr(process, "_stop", lambda process: None)
    context = server.serving(["--model-path", "m", *flags], 12, None, tmp_path / "log")
    with pytest.raises(UsageError, match="unrecognized arguments"), context:
        pass
    assert seen[0].get("max_drafts") == said


def test_what_adapts_is_chosen_among_equals():
    close = {**SPEEDS, "adaptive": {1: 10.0, 2: 13.0, 4: 17.0, 8: 17.8, 12: 17.0}}
    advice = advise(search(World(close)))
    assert advice.chosen == Candidate("adaptive", 8)
    assert "model, K = 4 is within 3%" in advice.reasons["drafter"]
    assert "K = 4 had 0.96" in advice.reasons["max_drafts"]


def test_a_short_budget_still_ends():
    world = World()
    found = search(world, seconds=10.0)
    assert found.trials
    assert min(t.asked for t in found.trials) == 4
    assert len(found.rungs) == 1
    assert world.clock[0] > FEWEST * 4 / 10 * 17 * 0.5
    assert found.tokens == FEWEST


def test_a_fast_machine_spends_its_time_on_more_prompts():
    fast = {name: {k: 100 * v for k, v in row.items()} for name, row in SPEEDS.items()}
    found = search(World(fast))
    assert found.tokens == MOST
    assert len(found.rounds_of(0)) > 1


def test_speeds_of_several_rounds_are_tokens_over_time():
    """A setting that is twice as fast on one text and half as fast on another loses time."""
    found = search(World(), seconds=10.0)
    mine = Candidate("model", 4)
    found.trials = [
        Trial(who, 0, number, speed, 0.0, 0.0, 4, 4, 50.0)
        for number, speeds in enumerate([(10.0, 20.0), (10.0, 5.0)])
        for who, speed in zip((PLAIN, mine), speeds, strict=True)
    ]
    assert found.score(mine) == pytest.approx(2 / (1 / 2 + 2))
    assert found.score(mine, rounds=[0]) == 2.0


def test_who_dropped_out_before_a_hard_rung_has_no_advantage():
    """Texts differ from rung to rung: only those who answered the same ones can be compared."""
    world = World()
    found = search(world)
    first, second = found.finalists
    dropped = next(c for c in found.rungs[0] if c not in found.rungs[1])
    easy = [replace(t, speed=90.0) if t.candidate == dropped else t for t in found.trials]
    found.trials = easy  # as if its only texts had been easy ones
    assert found.score(dropped) > found.score(first)
    assert advise(found).chosen == first
    assert found.score(second, first) < 1


def test_only_what_the_engine_has_is_tried():
    names, refused = available(World(has=("none", "suffix", "adaptive")))
    assert names == ["suffix", "adaptive"]
    assert refused == {"model": "no model"}


def test_a_profile_is_one_that_serves(tmp_path):
    from outrider.serving.profile import load_profile

    advice = advise(search(World()), 4, "4 bits: 1.80")
    file = tmp_path / "profile.yaml"
    file.write_text(advice.yaml(["made here"]))
    profile = load_profile(str(file))
    assert (profile.drafter, profile.max_drafts, profile.draft_bits) == ("model", 4, 4)
    text = file.read_text()
    assert all(f"\n{key}: " in text and advice.reasons[key][:20] in text for key in advice.values)


def wanted(tmp_path, **more):
    given = {"engine": "http://world", "flags": [], "workload": "mixed", "concurrency": 2}
    given |= {"minutes": 0.02, "chat": False, "out": tmp_path}  # of real time: the search's clock
    return command.Wanted(**{**given, **more})


def test_the_command_writes_profile_result_and_page(tmp_path, monkeypatch, capsys):
    world = World()
    monkeypatch.setattr("outrider.clients.open_engine", lambda spec: world)
    command.run(wanted(tmp_path), True)
    found = json.loads(capsys.readouterr().out)
    assert found["profile"] == {"drafter": "model", "max_drafts": 4}
    assert yaml.safe_load((tmp_path / "profile.yaml").read_text()) == found["profile"]
    assert "model, K = 4: 1.80 times plain" in (tmp_path / "tune.html").read_text()


def test_what_is_printed_into_a_file_is_the_profile(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("outrider.clients.open_engine", lambda spec: World())
    command.run(wanted(tmp_path), False)
    assert capsys.readouterr().out == (tmp_path / "profile.yaml").read_text()


def test_ctrl_c_leaves_the_best_so_far(tmp_path, monkeypatch, capsys):
    world = World()
    world.stop_at = 1000.0
    monkeypatch.setattr("outrider.clients.open_engine", lambda spec: world)
    with pytest.raises(SystemExit, match="130"):
        command.run(wanted(tmp_path, minutes=60.0), True)
    found = json.loads((tmp_path / "tune.json").read_text())
    assert found["interrupted"]
    assert found["trials"]
    assert "Interrupted" in (tmp_path / "tune.html").read_text()
    assert yaml.safe_load((tmp_path / "profile.yaml").read_text())["drafter"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name --engine"),
        (["--engine", "http://127.0.0.1:9"], "no server answers"),
        (["--engine", "http://h", "--workload", "sonnets"], "choose from"),
        (["--engine", "http://h", "--model-path", "m"], "either a running engine"),
        (["--engine", "transformers:nowhere"], "no model at"),
        (["--enigne", "transformers:nowhere"], "Did you mean --engine?"),
        (["--model-path", "m", "--workloads=code"], "Did you mean --workload?"),
        (["--speculative-num-steps", "5"], "add --model-path"),
    ],
)
def test_bad_input_says_what_to_do(tmp_path, arguments, said):
    done = CliRunner().invoke(app, ["tune", *arguments, "--out", str(tmp_path)])
    assert done.exit_code == (3 if said in ("no server answers", "no model at") else 2)
    assert said in " ".join(done.stderr.replace("│", "").split())


def test_in_this_process_on_a_real_pair(tmp_path, model_dir):
    target, draft = model_dir("tiny-target"), model_dir("tiny-draft")
    texts = tmp_path / "own.txt"
    texts.write_text("On a misty morning, an outrider rode out\nAt the bridge the toll-keeper\n")
    given = ["--engine", f"transformers:{target}#draft={draft}", "--workload", str(texts)]
    options = ["--concurrency", "1", "--minutes", "0.1", "--no-chat", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["tune", *given, *options, "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert {trial["candidate"]["drafter"] for trial in found["trials"]} >= {"model", "suffix"}
    assert all(trial["same"] == trial["asked"] for trial in found["trials"])


def test_the_measured_profile_is_near_the_best_of_the_grid():
    """What docs/tools/tune.md tells of a real server: benchmarks/tune_grid.py on unseen prompts."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    tuned = json.loads((results / "tune_sglang.json").read_text())
    measured = json.loads((results / "tune_grid.json").read_text())
    chosen = Candidate(tuned["profile"]["drafter"], tuned["profile"]["max_drafts"])
    assert tuned["minutes"] == 10
    assert measured["tune"] == tuned["provenance"]
    speeds = {cell["setting"]: cell["times_plain"] for cell in measured["grid"]}
    assert {str(c) for c in grid(["model", "suffix", "ngram", "adaptive"])} < set(speeds)
    assert speeds[str(chosen)] >= 0.95 * max(speeds.values())
