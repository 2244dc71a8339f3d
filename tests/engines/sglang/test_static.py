"""Our attention kernels beside SGLang's own, compiled the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / "benchmarks" / "results" / "kernels_static.json"
DIMS = (64, 96, 128, 256)
# ours beside theirs: one row, eight rows of a tree or chain, a prompt
PAIRS = [
    *((f"paged D{d} rows16", f"SGLang decode D{d}") for d in DIMS),
    *((f"paged D{d} rows64", f"SGLang verify D{d}") for d in DIMS),
    *((f"prefill D{d} rows{64 if d <= 128 else 32}", f"SGLang extend D{d}") for d in DIMS),
]
# Fewer waves than SGLang's: see docs/kernels.md for why
BEHIND = {
    ("gfx950", "paged D256 rows16"),
    ("sm_80", "paged D64 rows16"),
    ("sm_80", "paged D96 rows16"),
    ("sm_80", "paged D128 rows16"),
    ("sm_80", "paged D256 rows64"),
    ("sm_90", "paged D96 rows16"),
    ("sm_90", "paged D128 rows16"),
}


def by_name(path):
    return {(f["target"], f["variant"]): f for f in json.loads(path.read_text())["figures"]}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    out = tmp_path_factory.mktemp("static") / "figures.json"
    script = ROOT / "benchmarks" / "kernels_static.py"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", script, "--out", out, "--targets", "gfx942"]
    subprocess.run(command, env=env, check=True)
    return by_name(out)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_as_many_waves_fit_an_mi300x(compiled, ours, theirs):
    mine, host = compiled["gfx942", ours], compiled["gfx942", theirs]
    assert mine["waves"] >= host["waves"]
    assert mine["scratch"] <= host["scratch"]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_the_committed_table_says_where_we_are_behind(ours, theirs):
    figures = by_name(COMMITTED)
    behind = {
        (target, ours)
        for target in ("gfx942", "gfx950", "sm_80", "sm_90")
        if figures[target, ours]["waves"] < figures[target, theirs]["waves"]
    }
    assert behind == {pair for pair in BEHIND if pair[1] == ours}
