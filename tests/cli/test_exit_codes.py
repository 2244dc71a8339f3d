"""Exit codes mean one thing each, and no traceback reaches a user who did not ask for it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.errors import Unsupported, UsageError
from outrider.report.console import Exit

TINY = "src/outrider/assets/tiny"
PAIR = f"transformers:{TINY}/target#draft={TINY}/draft"
COMMANDS = {
    "demo": ([], "outrider.cli.demo.run"),
    "explain": (["a"], "outrider.explain.run.run"),
    "serve": ([], "outrider.cli.serve.run"),
    "draft_server": (["m", "--socket", "s"], "outrider.cli.draft_server.run"),
    "selftest": ([], "outrider.selftest.run.run"),
    "doctor": ([TINY], "outrider.doctor.run.run"),
    "audit": ([PAIR], "outrider.audit.run.run"),
    "bench": ([PAIR], "outrider.bench.run.run"),
    "tune": (["--engine", PAIR], "outrider.tune.run.run"),
}


def outrider(*args, **more):
    found = CliRunner().invoke(app, [str(arg) for arg in args], **more)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def test_every_command_is_here():
    assert {command.callback.__name__ for command in app.registered_commands} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (None, Exit.GOOD, ""),
        (SystemExit(Exit.FINDING), Exit.FINDING, ""),
        (UsageError("a spec", fix="write another"), Exit.USAGE, "a spec; write another"),
        (Unsupported("a model", fix="load it"), Exit.COULD_NOT_RUN, "a model; load it"),
        (PermissionError(13, "Permission denied", "/x"), Exit.COULD_NOT_RUN, "Permission denied"),
        (ValueError("odd"), Exit.COULD_NOT_RUN, "unexpected ValueError: odd; `outrider --debug"),
        (
            ModuleNotFoundError("No torch", name="torch"),
            Exit.COULD_NOT_RUN,
            "outrider[transformers]",
        ),
        (SystemExit(Exit.UNDECIDED), Exit.UNDECIDED, ""),
        (KeyboardInterrupt(), Exit.INTERRUPTED, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_codes(monkeypatch, command, raised, code, said):
    def ends(*args, **more):
        if raised is not None:
            raise raised

    args, target = COMMANDS[command]
    monkeypatch.setattr(target, ends)
    found = outrider(command.replace("_", "-"), *args)
    assert found.exit_code == code
    assert said in " ".join(found.stderr.split())
    assert "Traceback" not in found.output


def test_debug_shows_the_traceback(monkeypatch):
    def ends(*args, **more):
        raise ValueError("odd")

    monkeypatch.setattr("outrider.doctor.run.run", ends)
    found = outrider("--debug", "doctor", TINY)
    assert found.exit_code == Exit.COULD_NOT_RUN
    assert "Traceback" in found.stderr
    assert "unexpected ValueError: odd" in found.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_does_not_exist(command):
    # SGLang's options are passed on: only what looks like ours is known to be wrong
    wrong = {"serve": "--proflie", "tune": "--enigne"}.get(command, "--no-such-option")
    found = outrider(command.replace("_", "-"), *COMMANDS[command][0], wrong)
    assert found.exit_code == Exit.USAGE


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["audit", f"{PAIR},max_drafts=-4"], "max_drafts=-4"),
        (["audit", f"{PAIR},max_drafts=abc"], "write a whole number, 0 or more"),
        (["audit", f"{PAIR},max_drafts=2.5"], "write a whole number, 0 or more"),
        (["audit", f"{PAIR},exactness=bitwize"], "choose one of lossless, bitwise"),
        (["audit", f"{PAIR},draft_bits=5"], "choose one of 4, 8"),
        (["audit", f"{PAIR},dtype=float99"], "choose one of auto, float32, bfloat16, float16"),
        (["audit", f"{PAIR},drafter=suffxi"], "'suffxi'; choose one of adaptive,"),
        (["audit", f"transformers:{TINY}/head#drafter=ngram"], "is a head (eagle3), not a model"),
        (["explain", "a", "--target", f"{TINY}/mtp"], "is a head (mtp), not a model"),
        (["doctor", f"{TINY}/head"], "is a head, not a model"),
        (["audit", "http://h#max_drafts=-4"], "max_drafts=-4"),
        (["audit", PAIR, "--temperature", "inf"], "not a finite number"),
        (["audit", PAIR, "--prompts", "{latin}"], "cannot be read"),
        (["audit", PAIR, "--sampling-prompts", "{latin}"], "cannot be read"),
        (["audit", PAIR, "--law-prompts", "{latin}"], "cannot be read"),  # the old name
        (["audit", PAIR, "--law-prompts", "a", "--sampling-prompts", "a"], "give one"),
        (["bench", PAIR, "--workload", "{latin}"], "cannot be read"),
        (["bench", PAIR, "--rate", "nan"], "above 0"),
        (["bench", "--compare", "{latin}", "{latin}"], "is no result"),
        (["bench", "--compare", "{short}", "{short}"], "is no result"),
        (["tune", "--engine", PAIR, "--workload", "{latin}"], "cannot be read"),
        (["tune", "--engine", PAIR, "--minutes", "inf"], "not a finite number"),
        (["explain", "a", "--temperature", "inf"], "not a finite number"),
        (["explain", "a", "--url", "http://[bad"], "is no address"),
        (["demo", "--temperature", "inf"], "not a finite number"),
        (["doctor", "--url", "http://[bad"], "is no address"),
        (["doctor", "--url", "http://h:99999999"], "is no address"),
        (["doctor", f"{TINY}/target", "--memory-gib", "inf"], "not a finite number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_usage(tmp_path, monkeypatch, args, said):
    places = {"latin": tmp_path / "latin.txt", "short": tmp_path / "short.json"}
    places["latin"].write_bytes(b"caf\xe9\n")
    places["short"].write_text('{"outrider_bench": 1}')
    given = [str(places.get(arg.strip("{}"), arg)) for arg in args]
    out = [] if args[0] in ("demo", "doctor") else ["--out", str(tmp_path / "out")]
    found = outrider(*given, *out)
    assert found.exit_code == Exit.USAGE, found.output
    assert said in " ".join(found.stderr.replace("│", "").split())
    assert not (tmp_path / "out" / "audit.json").exists()


def test_a_prompt_from_stdin_that_is_not_utf_8(tmp_path):
    found = outrider("explain", "-", "--out", tmp_path, input=b"caf\xe9")
    assert found.exit_code == Exit.USAGE
    assert "stdin is not UTF-8" in found.stderr


@pytest.mark.parametrize("command", ["audit", "explain"])
def test_a_model_without_a_tokenizer(tmp_path, command):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(TINY, "target", name), tmp_path)
    target = (
        [f"transformers:{tmp_path}#drafter=ngram"]
        if command == "audit"
        else ["a", "--target", tmp_path]
    )
    found = outrider(command.replace("_", "-"), *target, "--out", tmp_path / "out")
    assert found.exit_code == Exit.COULD_NOT_RUN
    assert "no tokenizer at" in found.stderr
    assert "unexpected" not in found.stderr


def test_a_prompt_beyond_the_context(tmp_path):
    found = outrider("explain", "word " * 2000, "--out", tmp_path)
    assert found.exit_code == Exit.COULD_NOT_RUN
    assert "6001 tokens and max_tokens=100, for a model of 512 positions" in found.stderr


def test_serve_without_sglang(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = outrider("serve", "--model-path", "m")
    assert found.exit_code == Exit.COULD_NOT_RUN
    assert "pip install sglang" in found.stderr


@pytest.mark.parametrize("content", [b"drafter: caf\xe9", b"drafters: [", b"no_such_key: 1", None])
def test_serve_with_a_profile_that_cannot_be_read(monkeypatch, tmp_path, content):
    """Before anything is started."""
    profile = tmp_path / "profile.yaml"
    if content is not None:
        profile.write_bytes(content)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("os.execve", lambda *args: pytest.fail("started"))
    found = outrider("serve", "--profile", profile, "--model-path", "m")
    assert found.exit_code == Exit.USAGE
    assert str(profile) in found.stderr


def test_ctrl_c_while_it_is_loaded(tmp_path):
    """Ctrl-C in the first second ends the process without a traceback, while modules are loaded."""
    # a module that is loaded first, and takes its time
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    found = subprocess.run(
        [sys.executable, "-m", "outrider", "--version"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path('src').resolve()}"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == -signal.SIGINT
    assert found.stderr == found.stdout == ""
