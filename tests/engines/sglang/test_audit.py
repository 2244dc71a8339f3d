"""`outrider audit` on a real server: the true rule passes, planted faults are told apart."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from outrider.audit.result import CHANGED, SAME, TIES, Settings
from outrider.audit.run import audit
from outrider.cli.main import app

MODEL = "stories260k"
FLAGS = [
    *("--dtype", "bfloat16", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "2048", "--max-running-requests", "8", "--enable-metrics"),
    *("--speculative-algorithm", "OUTRIDER", "--speculative-num-steps", "4"),
    "--enable-deterministic-inference",
]
PROMPTS = [
    "Once upon a time",
    "One day, a little girl named Lily",
    "Tim had a red ball. He liked to",
    "The dog was very",
    "It was a sunny day and the",
    "Mom said,",
    "In the garden there was a big",
    "A small bird sat on",
    "The boy wanted to",
    "They went to the park and saw",
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The file that says which rule verifies."""
    path = tmp_path_factory.mktemp("rule") / "rule"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def server(launch, model_dir, noisy, planted, profile):
    model = model_dir(MODEL)
    draft = ["--speculative-draft-model-path", str(noisy(model, 0.2))]
    environment = {"OUTRIDER_TEST_RULE": str(planted), **profile(drafter="model")}
    return launch("audit", model, *FLAGS, *draft, **environment).wait()


def found(server):
    names = f"{server.url}#max_drafts=0", server.url
    settings = Settings(chat=False, max_tokens=48, samples=0)
    return audit(names, PROMPTS, PROMPTS[:2], settings)


def test_the_true_rule(server, planted, tmp_path):
    """One server alone is compared with itself: deterministic, so not even a tie."""
    planted.write_text("")
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    done = CliRunner().invoke(
        app,
        ["audit", server.url, "--prompts", str(file), "--no-chat", "--max-tokens", "48",
         "--samples", "30", "--out", str(tmp_path), "--json"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["verdict"] == SAME
    assert result["greedy"]["identical"] == len(PROMPTS)
    assert result["greedy"]["drift"]["max"] == 0
    assert result["counts"]["greedy"]["accepted"] > 50
    assert result["counts"]["law"]["drafted"] > 50
    assert result["counts"]["plain"]["drafted"] == 0
    assert result["law"]["tests"]
    assert result["engines"]["speculative"]["speculative_algorithm"] == "OUTRIDER"


def test_a_lenient_rule_is_wrong(server, planted):
    planted.write_text("lenient")
    result = found(server)
    assert result.verdict == CHANGED
    assert result.count("wrong") >= 3
    assert max(one.margin for one in result.greedy.divergences.values()) > 1


def test_rounding_is_a_tie(server, planted):
    planted.write_text("rounding")
    result = found(server)
    assert result.verdict == TIES
    assert result.count("numerical tie") >= 1
    assert max(result.greedy.noise) > 0.05
