"""The command: what it prints, writes, and ends with."""

from __future__ import annotations

import json

import pytest
from recordings import PROMPT
from typer.testing import CliRunner

import outrider
from outrider.cli.main import app
from outrider.explain.walk import Walk

runner = CliRunner()


def explain(*args):
    return runner.invoke(app, ["explain", *args], env={"COLUMNS": "100"})


def test_files_and_terminal(tmp_path):
    found = explain(PROMPT, "--max-tokens", "30", "--out", str(tmp_path / "new"))
    assert found.exit_code == 0, found.output
    walk = Walk.model_validate_json((tmp_path / "new" / "explain.json").read_text())
    assert len(walk.output_ids) == 30
    assert walk.verdict in found.stdout
    assert walk.verdict in (tmp_path / "new" / "explain.html").read_text()
    assert walk.provenance["versions"]["outrider"] == outrider.__version__


def test_json(tmp_path):
    found = explain(PROMPT, "--max-tokens", "9", "--json", "--out", str(tmp_path))
    assert found.exit_code == 0
    told = json.loads(found.stdout)
    assert told == json.loads((tmp_path / "explain.json").read_text())
    assert told["totals"]["tokens"] == 9


def test_prompt_from_stdin(tmp_path):
    args = ["explain", "-", "--max-tokens", "2", "--json", "--out", str(tmp_path)]
    found = runner.invoke(app, args, input="An outrider\nrode")
    assert json.loads(found.stdout)["prompt"] == "An outrider\nrode"


@pytest.mark.parametrize(
    ("args", "says", "code"),
    [
        (["--target", "no/such/model"], "no model at 'no/such/model' (no such directory)", 3),
        (["--drafter", "nonsense"], "'nonsense'; choose one of adaptive,", 2),
        (["--chat"], "leave out --chat", 2),
        (["--url", "http://127.0.0.1:9"], "outrider serve", 3),
        (["--url", "http://127.0.0.1:9", "--draft", "x"], "has its draft model already", 2),
        (["--url", "http://127.0.0.1:9", "--compare"], "outrider audit", 2),
        (["--max-tokens", "5000"], "lower max_tokens", 3),
    ],
)
def test_errors_say_what_to_do(tmp_path, args, says, code):
    found = explain(PROMPT, "--out", str(tmp_path), *args)
    assert found.exit_code == code, found.output
    assert says in " ".join(found.stderr.split())
    assert "Traceback" not in found.output
    assert not list(tmp_path.iterdir())


def test_empty_prompt(tmp_path):
    found = explain("", "--out", str(tmp_path))
    assert found.exit_code == 2
    assert "an empty prompt" in found.stderr


def test_drafter_model_needs_a_draft(tmp_path, model_dir):
    target = str(model_dir("tiny-target"))
    found = explain(PROMPT, "--target", target, "--drafter", "model", "--out", str(tmp_path))
    assert found.exit_code == 2
    assert "add --draft" in found.stderr


def interrupted_after(steps, monkeypatch):
    real = outrider.stream

    def stream(*args, **options):
        made = real(*args, **options)
        events = made._events

        def some():
            for _ in range(steps):
                yield next(events)
            raise KeyboardInterrupt

        made._events = some()
        return made

    monkeypatch.setattr(outrider, "stream", stream, raising=False)


def test_interrupted_runs_leave_what_there_was(tmp_path, monkeypatch):
    interrupted_after(4, monkeypatch)
    found = explain(PROMPT, "--out", str(tmp_path), "--compare")
    assert found.exit_code == 130
    walk = Walk.model_validate_json((tmp_path / "explain.json").read_text())
    assert len(walk.steps) == 4
    assert walk.finish_reason == "interrupted"
    assert walk.plain is None
    assert "passes of the target, interrupted" in found.stdout
    assert (tmp_path / "explain.html").exists()


def test_interrupted_before_the_first_step(tmp_path, monkeypatch):
    interrupted_after(0, monkeypatch)
    found = explain(PROMPT, "--out", str(tmp_path))
    assert found.exit_code == 130
    assert "interrupted" in found.stderr
    assert not list(tmp_path.iterdir())


def test_twin_a_difference_from_plain_decoding_ends_with_1(tmp_path, monkeypatch):
    real = outrider.generate

    def wrong(*args, **options):
        done = real(*args, **options)
        done.outputs[0][-1] ^= 1
        return done

    monkeypatch.setattr(outrider, "generate", wrong, raising=False)
    found = explain(PROMPT, "--max-tokens", "12", "--compare", "--out", str(tmp_path))
    assert found.exit_code == 1
    assert "equal to plain decoding: 11 of 12" in found.stdout


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    found = explain(PROMPT, "--out", str(tmp_path / "file"))
    assert found.exit_code == 3
