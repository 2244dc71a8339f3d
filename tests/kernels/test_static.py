"""Gates on the machine code of every shipped kernel, for GPUs that nobody here has.

Compiled in processes of their own: this one runs kernels in the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILED = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
TARGETS = ["gfx942", "gfx950", "sm_80", "sm_90"]


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    out = tmp_path_factory.mktemp("static") / "figures.json"
    script = ROOT / "benchmarks" / "kernels_static.py"
    subprocess.run([sys.executable, script, "--out", out], env=COMPILED, check=True)
    return json.loads(out.read_text())["figures"]


def attention(figures, target):
    found = [f for f in figures if f["target"] == target and f["variant"].startswith("p")]
    assert len(found) >= 20
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills(figures, target):
    found = [f for f in figures if f["target"] == target]
    assert len(found) >= 29
    assert not [f for f in found if f["scratch"]]


def test_local_memory_of_an_mi300x_is_enough(figures):
    assert not [f for f in figures if f["target"] == "gfx942" and f["local"] > 65_536]
    assert not [f for f in figures if not f["waves"]]


@pytest.mark.parametrize("target", TARGETS)
def test_attention_uses_matrix_cores(figures, target):
    assert not [f for f in attention(figures, target) if not f["matrix"]]


@pytest.mark.parametrize("target", TARGETS)
def test_keys_and_values_are_loaded_128_bits_at_a_time(figures, target):
    """The loop loads nothing else but slots, 32 bits each; 8-bit rows may come by 64 on NVIDIA."""
    for f in attention(figures, target):
        allowed = {"32", "128"} | ({"64"} if "fp8" in f["variant"] else set())
        assert {"128"} <= set(f["loads"]) <= allowed, f


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_one_layout_of_scores_in_every_tile_on_amd(figures, target):
    """Decode, verify and prefill reduce a row in the same order, whatever their tile."""
    layouts = {f["scores"] for f in attention(figures, target)}
    assert len(layouts) == 1
    assert "warpsPerCTA = [*, 1], instrShape = [16, 16, " in layouts.pop()


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_one_layout_of_scores_in_one_tile_on_nvidia(figures, target):
    """There a tile's size decides its instruction: a server that compares bits uses one tile."""
    layouts = {f["variant"]: f["scores"] for f in attention(figures, target)}
    for tile in ("D64 rows64", "D96 rows64", "D128 rows64", "D128 rows16", "D256 rows32"):
        assert layouts[f"paged {tile}"] == layouts[f"prefill {tile}"]
    assert layouts["paged D128 rows64"] != layouts["paged D128 rows16"]


@pytest.mark.parametrize("target", ["gfx942", "sm_90"])
def test_one_binary_serves_every_batch(target):
    """Triton's own launcher, with a stand-in for the driver: decode, verify, ragged, 1 to 128 rows.

    A twin that takes the number of rows as an ordinary argument needs several.
    """
    script = Path(__file__).parent / "launches.py"
    command = [sys.executable, "-W", "ignore", script, target]
    done = subprocess.run(command, env=COMPILED, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["launches"] > 60
    assert found["binaries"].pop("twin") > 1
    assert set(found["binaries"].values()) == {1}


def test_seeded_bugs_are_seen():
    """Waves that the registers do not allow spill; a larger instruction has another layout."""
    code = """
import json
from dataclasses import replace
from outrider.kernels.shipped import attention, paged
from outrider.kernels.static import figures
v = attention(paged._partial, "", rows=32)
bad = [{}, {"waves_per_eu": 8}, {"matrix_instr_nonkdim": 32}]
found = [figures(replace(v, options={"gfx942": v.options["gfx942"] | b}), "gfx942") for b in bad]
print(json.dumps([[f.scratch, f.scores] for f in found]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=COMPILED, check=True, capture_output=True, text=True
    )
    good, spilled, larger = json.loads(done.stdout)
    assert good[0] == 0 < spilled[0]
    assert good[1] != larger[1]
