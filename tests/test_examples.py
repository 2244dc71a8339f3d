"""The programs in examples/ run in a checkout, as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_an_example_runs(program):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(program)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip()


def test_there_are_examples():
    assert PROGRAMS
