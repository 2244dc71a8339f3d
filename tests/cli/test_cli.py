"""The command line, as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

import outrider

OUTRIDER = [sys.executable, "-m", "outrider"]


def run(*args, **more):
    return subprocess.run([*OUTRIDER, *args], capture_output=True, text=True, check=False, **more)


def test_help_is_quick_and_light():
    """Without torch, and not much slower than the libraries it shows itself with.

    Taking turns, the best of five: machines are busy.
    """
    bare, ours = [], []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import typer.rich_utils, rich.console"], check=True)
        between = time.perf_counter()
        found = run("--help")
        bare.append(between - started)
        ours.append(time.perf_counter() - between)
        assert found.returncode == 0
        assert "demo" in found.stdout
    assert min(ours) < 2.5 * min(bare)
    check = "import outrider.cli.main, sys; print('torch' in sys.modules)"
    command = [sys.executable, "-c", check]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_version():
    assert run("--version").stdout.strip() == f"outrider {outrider.__version__}"


@pytest.mark.parametrize("extra", [(), ("--temperature", "0.8", "--seed", "3")])
def test_demo_shows_drafts_and_equals_plain_decoding(extra):
    found = run("demo", "--max-tokens", "60", *extra)
    assert found.returncode == 0, found.stderr
    assert re.search(r"equal to plain decoding: (\d+) of \1 tokens", found.stdout)
    accepted, drafted = re.search(r"(\d+) of (\d+) drafts accepted", found.stdout).groups()
    assert 0 < int(accepted) < int(drafted)


def test_explain_with_a_wrong_path(tmp_path):
    found = run("explain", "a", "--target", "no/such/model", cwd=tmp_path)
    assert found.returncode == 3
    assert "no model at 'no/such/model'" in found.stderr
