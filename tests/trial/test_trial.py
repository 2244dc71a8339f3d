"""One command for the first run on a GPU: parts are kept, stale ones refused, findings named."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.audit.result import CHANGED, OPEN, SAME, THIN
from outrider.cli.main import app
from outrider.clients import Answer, Counts, Refused, Token
from outrider.clients.process import child, serving
from outrider.errors import Unsupported, UsageError
from outrider.report.console import Exit
from outrider.trial import run as command
from outrider.trial.ask import LOADS, ask, examine, loads, phases, queries, read_answers
from outrider.trial.page import page
from outrider.trial.parts import KERNELS, Parts
from outrider.trial.plan import DETERMINISTIC, Pair, Wanted, check_flags, pairs
from outrider.trial.result import Trial, judge

PAIR = Pair("deterministic", (DETERMINISTIC,))
WANTED = Wanted("target", "draft", requests=24, quick=True, device="cpu")
DOCTOR = {
    "machine": {"device": "cpu", "gpu": None},
    "findings": [
        {"level": "problem", "area": "memory", "what": "too <large>", "why": "w", "fix": "less"}
    ],
}
CHECK = {"name": "kernel: <one>", "passed": True, "promised": True, "detail": "off by 1"}
KERNEL = {
    "passed": True,
    "verdict": "Passed: all 1 checks",
    "environment": {"device": "GPU"},
    "checks": [CHECK],
    "measurements": [],
}
BROKEN = {**KERNEL, "passed": False, "verdict": "Failed: 1 of 1 checks"} | {
    "checks": [{**CHECK, "passed": False}]
}


class Fake:
    """A server: answers in words that depend on the request, and faults if it is told to."""

    spec = "http://fake"

    def __init__(self, changes=lambda n, text: text, template=True, refuses=(), drafted=None):
        self.changes, self.template, self.refuses = changes, template, refuses
        self.drafted, self.seen, self.batches = drafted, 0, []
        self.queries, self.variants = [], []

    def ask(self, asked, concurrency=1, *, stream=False, rate=None, heard=None, refused=None):
        self.batches.append((concurrency, [query.temperature > 0 for query in asked]))
        self.queries += asked
        answers = []
        for place, query in enumerate(asked):
            if (query.chat and not self.template) or any(w in query.prompt for w in self.refuses):
                error = Refused("too long", fix="shorten it")
                if refused is None:
                    raise error
                refused(place, error)
                continue
            self.seen += 1
            text = self.changes(self.seen, f"{query.prompt[:20]} {query.seed} and so on")
            tokens = tuple(Token(w, -0.1, ((w, -0.1), ("?", -9.0))) for w in text.split())
            told = tokens if query.logprobs else ()
            times = ((0.0, 0.0), (1.0, 1.0), (2.0, float(len(tokens))))
            answers.append(Answer(text, told, len(tokens), "stop", times))
            if heard is not None:
                heard(place, answers[-1])
        return answers

    def counts(self):
        if self.drafted is None:
            return None
        seconds = {"forward": 0.3 * self.seen, "host": 0.1 * self.seen}
        counts = Counts(self.seen, self.seen, 0, 2 * self.seen, self.drafted * self.seen)
        counts.seconds.update(seconds)
        return counts

    def variant(self, options, salt=None):
        self.variants.append(options)
        return self

    def facts(self):
        return {"engine": self.spec, "model": "m"}

    def close(self):
        pass


def silent(stage, total):
    return lambda: None


def said(server, again, wanted=WANTED, deterministic=True, count=None):
    count = wanted.requests if count is None else count
    found = examine(server, wanted, count, deterministic, chat=None, again=again, ticker=silent)
    return json.loads(json.dumps({**found, "seconds": 1.0}))


def made_up(ours=None, bare=None, kernels=KERNEL, **more) -> Trial:
    bare, ours = bare or Fake(), ours or Fake(drafted=20)
    servers = {
        ("deterministic", "bare"): said(bare, True),
        ("deterministic", "ours"): said(ours, False),
    }
    provenance = {"date": "today", "argv": ["outrider"], "commit": None, "versions": {}}
    known = pairs("cpu", "0.5.23", ())
    return Trial(WANTED, provenance, DOCTOR, known, kernels, servers, **more)


# -- what is asked


def test_every_load_has_its_share():
    assert list(loads(0)) == []
    for count in (1, 5, 24, 200, 1000):
        found = list(loads(count))
        assert [n for _, places in found for n in places] == list(range(count))
        assert {load for load, _ in found} <= set(LOADS)
    assert [load for load, _ in loads(200)] == list(LOADS)


def test_requests_of_different_kinds_never_share_a_batch():
    """Bare SGLang's coins depend on whether a neighbour has top-k or top-p."""
    asked = queries(200, True, 8, True)
    kinds = [{(asked[n].temperature > 0, asked[n].top_p < 1) for n in p} for p in phases(asked)]
    assert kinds == [{(False, False)}, {(True, False)}, {(True, True)}]
    assert sorted(n for phase in phases(asked) for n in phase) == list(range(200))
    seeds = [query.seed for query in asked if query.temperature > 0]
    assert len(set(seeds)) == len(seeds) == 100
    assert sum(query.logprobs is not None for query in asked) == 50
    server = Fake()
    ask([server], asked, lambda: None)
    assert all(len(set(batch)) == 1 for _, batch in server.batches)


def test_engines_share_the_requests_of_each_kind():
    asked, engines = queries(200, True, 8, True), [Fake(), Fake()]
    answers, _ = ask(engines, asked, lambda: None)
    assert sorted(answers) == list(range(200))
    assert all(answers[n].text.startswith(asked[n].prompt[:20]) for n in answers)
    for engine in engines:
        kinds = {(q.logprobs, q.temperature, q.top_p) for q in engine.queries}
        assert kinds == {(q.logprobs, q.temperature, q.top_p) for q in asked}
        assert len(engine.queries) == 100


def test_without_determinism_every_request_tells_its_logprobs():
    asked = queries(400, False, 8, False)
    assert all(query.logprobs and query.temperature == 0 for query in asked)


def test_answers_survive_their_file():
    asked = queries(24, True, 8, True)
    answers, _ = ask([Fake()], asked, lambda: None)
    found = read_answers(said(Fake(), False)["answers"])
    assert {n: replace(one, arrivals=()) for n, one in answers.items()} == found


def test_a_model_without_a_chat_template_is_asked_without():
    found = said(Fake(template=False), True)
    assert found["chat"] is False
    assert found["refused"] == {}
    with pytest.raises(Unsupported, match="every request is refused"):
        said(Fake(refuses=("",)), True)


# -- which servers


def test_pairs_on_a_device():
    def skipped(*given):
        return {pair.name for pair in pairs(*given) if pair.skip}

    assert skipped("cpu", "0.5.23", ()) == {"default", "no CUDA graphs", "no overlap"}
    assert skipped("rocm", "0.5.23", ()) == set()
    assert skipped("cuda", "0.5.11", ()) == {"no overlap"}
    assert skipped("cuda", "0.5.23", ("--disable-cuda-graph",)) == {"no CUDA graphs"}


def test_commands(monkeypatch):
    monkeypatch.setattr("outrider.trial.plan.sglang_command", lambda: ["sglang"])
    wanted = replace(WANTED, flags=("--device=cpu", "--tp-size", "2"))
    bare, ours = (PAIR.command(side, wanted, "cpu") for side in ("bare", "ours"))
    tail = ["--model-path", "target", DETERMINISTIC, "--device=cpu", "--tp-size", "2"]
    assert bare == ["sglang", "--attention-backend", "outrider", *tail]
    assert ours[1:6] == ["-m", "outrider", "serve", "--speculative-draft-model-path", "draft"]
    assert ours[6:] == bare[1:]
    assert PAIR.command("bare", replace(WANTED, draft=None), "cuda")[1:] == tail[:3]


@pytest.mark.parametrize("flags", [("--port", "1"), ("--model-path=m",), (DETERMINISTIC,), ("m",)])
def test_options_that_this_command_gives_itself(flags):
    with pytest.raises(UsageError, match="after --"):
        check_flags(flags)


# -- the verdict


def test_a_good_result():
    trial = made_up()
    assert trial.exit_code == Exit.GOOD
    assert trial.judged["deterministic"].verdict.startswith(SAME)
    assert "24 answers" in trial.headline
    one = next(trial.speeds())
    assert one["times_bare"] == 1
    assert one["host_ms_per_step"] == pytest.approx(100)
    assert one["device_ms_per_step"] == pytest.approx(300)
    html = page(trial)
    assert "<large>" not in html
    assert "too &lt;large&gt;" in html
    assert "a CPU has no CUDA graphs" in html
    document = json.loads(json.dumps(trial.as_json()))
    assert document["skipped"].keys() == {"default", "no CUDA graphs", "no overlap"}
    assert document["doctor"] == DOCTOR


def worse(n, text):
    """One word of one answer is another."""
    return text.replace("so", "no") if n == 9 else text


def test_one_different_answer_is_a_finding():
    trial = made_up(Fake(worse, drafted=20))
    assert trial.exit_code == Exit.FINDING
    judged = trial.judged["deterministic"]
    assert judged.verdict == f"{CHANGED} (1 of 24 differ, and bare SGLang agrees with itself)"
    assert judged.as_json()["different"] == judged.different
    assert "Differences, deterministic" in page(trial)


def test_bare_sglang_that_differs_from_itself_decides_nothing():
    counted = iter(range(1000))
    restless = Fake(lambda n, text: f"{text} {next(counted)}" if n % 5 == 0 else text)
    judged = made_up(bare=restless).judged["deterministic"]
    assert judged.exit_code == Exit.UNDECIDED or judged.greedy.exit_code == Exit.FINDING
    rare = Fake(lambda n, text: text + " more" if n == 16 else text)  # sampled, the first time
    trial = made_up(bare=rare)
    assert trial.exit_code == Exit.UNDECIDED
    assert trial.headline.startswith(OPEN)


def test_a_refusal_of_one_server_is_a_finding():
    trial = made_up(Fake(refuses=("JSON",), drafted=20))
    assert trial.exit_code == Exit.FINDING
    assert "refuses request" in trial.headline


def test_little_evidence():
    trial = made_up(Fake(drafted=1))
    assert trial.exit_code == Exit.UNDECIDED
    assert trial.headline.startswith(THIN)
    assert "--requests" in trial.headline


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ({"kernels": BROKEN}, Exit.FINDING, "Kernels: Failed: 1 of 1 checks"),
        ({"failures": {"default, bare": "out of <memory>"}}, Exit.COULD_NOT_RUN, "default, bare"),
        ({"interrupted": True}, Exit.INTERRUPTED, "Interrupted"),
        ({"kernels": BROKEN, "failures": {"a": "b"}}, Exit.FINDING, "Kernels"),
    ],
)
def test_exit_codes(more, code, said):
    trial = made_up(**more)
    assert trial.exit_code == code
    assert said in trial.headline
    html = page(trial)
    assert "<memory>" not in html
    assert ("off by 1" in html) == (trial.kernels is BROKEN)


def test_nothing_was_compared():
    trial = Trial(WANTED, {"date": ""}, DOCTOR, [PAIR])
    assert trial.exit_code == Exit.UNDECIDED
    assert "Not checked" in page(trial)


def test_ties_are_judged_by_the_audit_without_determinism():
    pair = Pair("default")
    bare, ours = (
        said(Fake(change, drafted=drafted), again, deterministic=False)
        for change, drafted, again in ((lambda n, t: t, None, True), (worse, 20, False))
    )
    judged = judge(pair, WANTED, bare, ours)
    assert judged.exit_code == Exit.FINDING  # -9 against -0.1 is no tie
    assert judged.greedy.count("wrong") == 1


# -- parts


def test_parts_are_used_again_if_nothing_changed(tmp_path):
    here, given = {"versions": {"sglang": "1"}}, {"target": "m", "flags": ("a",)}
    parts = Parts(tmp_path, here, given)
    for name in (KERNELS, "default, bare"):
        parts.put(name, {"a": 1})
    assert Parts(tmp_path, here, given).get("default, bare") == {"a": 1}
    for other in (
        Parts(tmp_path, here, {**given, "target": "n"}),
        Parts(tmp_path, here, {**given, "flags": ("b",)}),
        Parts(tmp_path, {"versions": {"sglang": "2"}}, given),
    ):
        assert other.get("default, bare") is None
        assert other.is_stale("default, bare")
    # no model has a share in the kernels' checks
    assert Parts(tmp_path, here, {"target": "n"}).get(KERNELS) == {"a": 1}
    assert Parts(tmp_path, {}, given).get(KERNELS) is None
    assert not parts.is_stale("no overlap, bare")
    assert Parts(tmp_path, here, given, fresh=True).get(KERNELS) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"made_with": {}}', "null"])
def test_a_part_that_cannot_be_read_is_done_again(tmp_path, text):
    parts = Parts(tmp_path, {}, {})
    parts.path("a").write_text(text)
    assert parts.get("a") is None


# -- the command, with made-up servers


@pytest.fixture
def world(monkeypatch, tmp_path):
    """The command without processes: which servers start, and what they answer."""
    started, fakes = [], {"bare": Fake(), "ours": Fake(drafted=20)}

    class Started:
        def __init__(self, command, log, environment, limit):
            self.side = "ours" if "serve" in command else "bare"
            started.append((self.side, DETERMINISTIC in command))
            log.write_text("loading\nthe last line\n")
            if (error := fakes.get("error")) and (self.side, DETERMINISTIC in command) in error:
                log.write_text(error[self.side, DETERMINISTIC in command])
                raise fakes.get("kind", Unsupported)("the server did not start", fix="look")

        def __enter__(self):
            return self.side

        def __exit__(self, *error):
            pass

    monkeypatch.setattr("outrider.trial.plan.sglang_command", lambda: ["sglang"])
    monkeypatch.setattr(command, "sglang_command", lambda: ["sglang"])
    monkeypatch.setattr(command, "version", lambda name: "0.5.23")
    monkeypatch.setattr(command, "serving", Started)
    monkeypatch.setattr(command, "open_engine", fakes.get)
    monkeypatch.setattr(command, "_doctor", lambda wanted: DOCTOR)
    monkeypatch.setattr(command, "_kernels", lambda wanted: fakes.get("kernels", KERNEL))

    def run(*args):
        started.clear()
        found = CliRunner().invoke(
            app,
            ["selftest", "--server", "m", "--out", str(tmp_path / "out"), "--quick",
             "--requests", "24", *args],
        )  # fmt: skip
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        assert "Traceback" not in found.output
        return found

    run.started, run.fakes, run.out = started, fakes, tmp_path / "out"
    return run


def test_a_rerun_uses_finished_parts(world):
    assert world().exit_code == Exit.GOOD
    assert world.started == [("bare", True), ("ours", True)]
    # control may find that no drafts pay: some of the compared answers have a fixed drafter
    assert world.fakes["bare"].variants == []
    assert world.fakes["ours"].variants == [{"drafter": "ngram", "max_drafts": 4}]
    first = json.loads((world.out / "server.json").read_text())
    again = world("--json")
    assert (again.exit_code, world.started) == (Exit.GOOD, [])
    second = json.loads(again.stdout)
    assert second["answers"] == first["answers"]
    assert "done" in again.stderr
    world("--", "--tp-size", "2")
    assert len(world.started) == 2
    world("--fresh", "--", "--tp-size", "2")
    assert len(world.started) == 2


def test_an_interruption_keeps_what_is_done(world):
    def interrupt(n, text):
        raise KeyboardInterrupt

    world.fakes["ours"] = Fake(interrupt)
    assert world().exit_code == Exit.INTERRUPTED
    assert "Interrupted" in (world.out / "server.html").read_text()
    world.fakes["ours"] = Fake(drafted=20)
    assert world().exit_code == Exit.GOOD
    assert world.started == [("ours", True)]


def test_a_server_that_does_not_start(world):
    world.fakes["error"] = {("ours", True): "loading\nout of memory\n"}
    found = world()
    assert found.exit_code == Exit.COULD_NOT_RUN
    assert "out of memory" in found.stderr
    assert "out of memory" in (world.out / "server.html").read_text()
    assert len(world.started) == 2


def test_an_option_that_sglang_does_not_have(world):
    """No second server is tried."""
    world.fakes |= {"error": {("bare", True): "unrecognized arguments"}, "kind": UsageError}
    assert world("--", "--no-such-option").exit_code == Exit.USAGE
    assert len(world.started) == 1


def test_a_host_without_deterministic_mode(world):
    """The next pair takes the place of the first, also on a CPU, and a rerun remembers it."""
    world.fakes["error"] = {("bare", True): "ValueError: not supported for deterministic inference"}
    found = world()
    assert world.started == [("bare", True), ("bare", False), ("ours", False)]
    assert found.exit_code == Exit.GOOD, found.output
    document = json.loads((world.out / "server.json").read_text())
    assert "did not start" in document["skipped"]["deterministic"]
    assert document["answers"]["default"]["requests"] == 24
    assert (world().exit_code, world.started) == (Exit.GOOD, [])


def test_a_gpu_that_is_not_there(world):
    found = world("--device", "cuda")
    assert found.exit_code == Exit.COULD_NOT_RUN
    assert "--device cpu" in found.stderr
    assert not world.out.exists()


def test_a_failed_kernel_check(world):
    world.fakes["kernels"] = BROKEN
    assert world().exit_code == Exit.FINDING
    assert len(world.started) == 2


@pytest.mark.parametrize(
    "args",
    [
        ["selftest", "--server"],
        ["selftest", "model"],
        ["selftest", "--requests", "3"],
        ["selftest", "--", "--tp-size", "2"],
        ["selftest", "--server", "m", "--requests", "0"],
        ["selftest", "--server", "m", "d", "x"],
        ["selftest", "--server", "m", "--tp-size", "2"],
        ["selftest", "--server", "m", "--", "--port", "3"],
    ],
    ids=" ".join,
)
def test_usage(args, tmp_path):
    found = CliRunner().invoke(app, [*args[:1], "--out", str(tmp_path / "out"), *args[1:]])
    assert found.exit_code == Exit.USAGE, found.output
    assert "Traceback" not in found.output
    assert not (tmp_path / "out").exists()


def test_without_sglang(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = CliRunner().invoke(app, ["selftest", "--server", "m", "--out", str(tmp_path / "out")])
    assert found.exit_code == Exit.COULD_NOT_RUN
    assert "pip install sglang" in found.stderr


def test_a_model_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "sglang_command", lambda: ["sglang"])
    missing = str(tmp_path / "no model")
    found = CliRunner().invoke(app, ["selftest", "--server", missing, "--out", str(tmp_path)])
    assert found.exit_code == Exit.COULD_NOT_RUN
    assert "there is no directory" in " ".join(found.stderr.split())


# -- child processes


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_child_is_ended_with_its_own_children(tmp_path):
    file = tmp_path / "pid"
    code = f"sleep 100 & echo $! > {file}; wait"
    with pytest.raises(KeyboardInterrupt), child(["bash", "-c", code]) as process:  # noqa: PT012
        while not (file.exists() and file.read_text().strip()):
            time.sleep(0.02)
        inner = int(file.read_text())
        assert alive(inner)
        raise KeyboardInterrupt
    assert process.returncode is not None
    assert not alive(inner)


def test_the_last_lines_of_a_log_are_told(tmp_path):
    code = [sys.executable, "-c", "print('no such model'); raise SystemExit(1)"]
    with pytest.raises(Unsupported, match="no such model"), serving(code, tmp_path / "log"):
        pass


def test_sigterm_ends_as_an_interruption(tmp_path):
    """In a process of its own: it asks for the signal."""
    code = """
        import os, signal, sys
        from outrider.trial import run as command
        command.sglang_command = lambda: []
        command._doctor = lambda wanted: os.kill(os.getpid(), signal.SIGTERM)
        from outrider.cli.main import app
        app(["selftest", "--server", "m", "--out", sys.argv[1]])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == Exit.INTERRUPTED, done.stderr
    assert "interrupted" in done.stderr


def test_drafts_are_asked_for_by_what_drafts(model_dir):
    """Every second pair of answers has drafts, whether they pay or not."""
    tiny = model_dir("tiny-target").parent
    drafts = {None: "ngram", str(tiny / "draft"): "model", str(tiny / "head"): "eagle3"}
    for draft, drafter in drafts.items():
        assert Wanted("target", draft).drafting["drafter"] == drafter
