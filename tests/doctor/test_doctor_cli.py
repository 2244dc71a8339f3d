"""`outrider doctor`, as a user calls it: exit codes, tables, the document."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from paper import TINY
from typer.testing import CliRunner

from outrider.cli.main import app

pytest.importorskip("torch")
PAIR = (str(TINY / "target"), str(TINY / "draft"))


def doctor(*args):
    found = CliRunner().invoke(app, ["doctor", *map(str, args)], env={"COLUMNS": "100"})
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def test_the_tiny_pair_is_good():
    found = doctor(*PAIR)
    assert found.exit_code == 0, found.output
    for area in ("models", "tokenizer", "context", "cost", "memory", "hosts"):
        assert f"\n{area}\n" in f"\n{found.stdout}"
    assert "\nNo problem found: " in found.stdout


def test_a_target_alone_needs_no_draft():
    found = doctor(PAIR[0])
    assert found.exit_code == 0
    assert "tokenizer\n" not in found.stdout


def test_a_problem_ends_with_1(tiny_copy):
    def swap(content):
        vocab = content["model"]["vocab"]
        vocab["ing"], vocab["rid"] = vocab["rid"], vocab["ing"]

    found = doctor(PAIR[0], tiny_copy("draft", "tokenizer.json", swap))
    assert found.exit_code == 1
    assert "It will not work as it is: 1 problem" in found.stdout


def test_the_document():
    found = doctor(*PAIR, "--json", "--requests", 3, "--context-length", 100, "--dtype", "float32")
    document = json.loads(found.stdout)
    assert document["good"]
    assert document["plan"]["requests"] == 3
    rows = {row["what"]: row["bytes"] for row in document["memory"]["rows"]}
    assert rows["KV cache, target"] == 2 * 4 * 2 * 32 * 4 * 300
    assert document["cost"]["ratio"] < 0.25
    for finding in document["findings"]:
        assert {"area", "level", "what", "why", "fix"} <= finding.keys()
    assert "versions" in document["provenance"]


def test_memory_that_does_not_suffice():
    found = doctor(*PAIR, "--memory-gib", "0.005")
    assert found.exit_code == 1
    assert "not one request of that length fits" in found.stdout


@pytest.mark.parametrize("option", ["--draft-bits=5", "--dtype=int3", "--requests=0"])
def test_options_that_do_not_exist(option):
    assert doctor(*PAIR, option).exit_code == 2


def test_bad_input_says_what_to_do(tmp_path, serve):
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    other = serve({"/model_info": {"model_path": "/models/other"}, "/server_info": {}})
    for args, said in (
        ((), "name a model"),
        (("no/such/directory/here",), "no directory"),
        ((tmp_path / "empty",), "no config.json"),
        ((PAIR[0], broken), "cannot be read"),
        (("--url", "http://127.0.0.1:1"), "no server answers"),
        ((PAIR[0], "--url", other), "serves /models/other"),
    ):
        found = doctor(*args)
        assert found.exit_code == (3 if args else 2), args
        assert found.stdout == ""
        assert said in " ".join(found.stderr.split()), args


def test_a_server_names_its_models(serve):
    arguments = {
        "version": "0.5.11",
        "speculative_algorithm": "OUTRIDER",
        "speculative_draft_model_path": PAIR[1],
        "device": "cpu",
    }
    url = serve({"/model_info": {"model_path": PAIR[0]}, "/server_info": arguments})
    found = doctor("--url", url, "--json")
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["draft"]["name"] == PAIR[1]
    assert document["memory"] is None  # it runs: it has its memory
    assert {finding["area"] for finding in document["findings"]} >= {"server", "tokenizer", "cost"}


def test_a_server_whose_files_are_elsewhere(serve):
    found = doctor("--url", serve({"/v1/models": {"data": [{"id": "some/model"}]}}))
    assert found.exit_code == 0
    assert "the files of some/model are not here" in found.stdout


def test_known_faults_of_a_server_are_told(serve):
    arguments = {
        "version": "0.5.11",
        "speculative_algorithm": "EAGLE",
        "attention_backend": "aiter",
    }
    url = serve(
        {"/model_info": {"model_path": "/m"}, "/server_info": arguments | {"device": "cuda"}}
    )
    found = doctor("--url", url)
    assert found.exit_code == 1
    assert "ignores temperature" in found.stdout


def test_what_may_be_is_folded_unless_asked_for(monkeypatch):
    from outrider.doctor import run

    monkeypatch.setattr(run, "check_machine", lambda machine: ())
    look = run.look
    monkeypatch.setattr(run, "look", lambda gib: replace(look(gib), versions={"sglang": "0.5.11"}))
    short, long = doctor(PAIR[0]).stdout, doctor(PAIR[0], "--verbose").stdout
    assert "sglang-spec-min-p-seed" in short
    assert "ignores min_p" not in short
    assert "ignores min_p" in long


def test_any_number_of_drafts_ends():
    found = doctor(*PAIR, "--max-drafts", "100000000")
    assert found.exit_code in (0, 1)
    assert "K = 100000000" in " ".join(found.stdout.split())


def test_interrupted(monkeypatch):
    from outrider.doctor import run

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "examine", interrupt)
    assert doctor(*PAIR).exit_code == 130
