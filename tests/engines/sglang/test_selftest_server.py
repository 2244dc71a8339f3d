"""`outrider selftest --server` with real servers on CPU: the same answers, and parts are kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server import ENVIRONMENT

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"
FLAGS = ["--mem-fraction-static", "0.1", "--max-total-tokens", "4096", "--skip-server-warmup"]


def selftest(out):
    command = [sys.executable, "-m", "outrider", "selftest", "--server"]
    command += [str(TINY / "target"), str(TINY / "draft"), "--quick", "--requests", "24"]
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(
        [*command, "--device", "cpu", "--json", "--out", str(out), "--", *FLAGS],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("selftest")


@pytest.fixture(scope="module")
def first(out):
    return selftest(out)


def test_the_whole_command(first, out):
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-3000:]
    found = json.loads(first.stdout)
    assert found == json.loads((out / "server.json").read_text())
    assert found["kernels"]["passed"]
    answers = found["answers"]["deterministic"]
    assert answers["requests"] >= 10  # those with long prompts are refused by both
    assert answers["identical"] == answers["requests"]
    assert answers["audit"]["greedy"]["drift"]["max"] == 0
    assert answers["audit"]["counts"]["greedy"]["drafted"] > 100
    assert answers["audit"]["engines"]["speculative"]["speculative_algorithm"] == "OUTRIDER"
    assert "speculative_algorithm" not in answers["audit"]["engines"]["plain"]
    assert {one["concurrency"] for one in found["speed"]} == {1, 4}
    assert all(one["times_bare"] and one["device_ms_per_step"] for one in found["speed"])
    assert found["skipped"].keys() == {"default", "no CUDA graphs", "no overlap"}
    assert found["doctor"]["machine"]["device"] == "cpu"
    assert found["provenance"]["versions"]["sglang"]
    assert found["verdict"] in (out / "server.html").read_text()


def test_a_rerun_uses_the_parts(first, out):
    again = selftest(out)
    assert again.returncode == 0, again.stderr[-3000:]
    before, after = json.loads(first.stdout), json.loads(again.stdout)
    for key in ("kernels", "answers", "servers", "speed"):
        assert after[key] == before[key]
    assert "0 servers to start" in again.stderr
