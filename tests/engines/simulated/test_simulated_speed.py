"""Never slower: the simulated server keeps its speed, on every text and at every batch size."""

from __future__ import annotations

import json

import pytest
import table

BEFORE = json.loads(table.FILE.read_text())
LINE = "h100-8b-line"


def chosen(batch, is_slow):
    """Return the cells at a batch size, those left to `.ci/run long` or the others.

    Drafters with a fixed number of drafts show how the engine works, and change seldom. A draft
    model of closed clients is served with the other profile.
    """
    slow = {"suffix 4", *table.FIXED} - {"none"}
    return [
        cell
        for cell in table.cells((batch,))
        if (
            cell.split("/")[-1] in slow
            or (cell.startswith(f"{LINE}/closed") and cell.endswith("+model"))
        )
        == is_slow
    ]


@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", table.BATCHES)
def test_speeds_are_those_recorded(batch, is_slow):
    """What is never slower than it was, and what has changed: see `table.py --write`."""
    speeds = table.computed(chosen(batch, is_slow))
    assert table.slower(speeds, BEFORE) == []
    assert table.changed(speeds, BEFORE) == []


def test_every_cell_is_recorded():
    assert list(BEFORE) == table.cells()


def test_what_is_recorded_is_never_far_below_plain_decoding():
    """Drafts cost little where they do not pay, whoever wrote the table."""
    least = {
        "adaptive": table.ADAPTIVE_LEAST,
        "adaptive+model": table.MODEL_LEAST,
        "none": table.NONE_LEAST,
    }
    below = {c: s for c, s in BEFORE.items() if s < least.get(c.rsplit("/", 1)[1], 0.0)}
    assert below == {}


def test_what_is_recorded_is_near_the_best_fixed_number_of_drafts():
    shares = table.of_best_fixed(BEFORE)
    assert len(shares) == len(table.TEXTS) * len(table.BATCHES)
    assert {cell: s for cell, s in shares.items() if s < table.BEST_FIXED_LEAST} == {}


def test_two_runs_are_alike():
    for cell in ("closed/mixed/4/adaptive", "closed/json/4/adaptive+model"):
        assert table.speed(f"{LINE}/{cell}") == table.speed(f"{LINE}/{cell}")


def test_twin_a_control_that_always_drafts_is_noticed():
    """Drafting on the CPU without a gain costs a wait in every step."""
    cell = f"{LINE}/closed/prose/64/adaptive"
    eager = {cell: table.speed(cell, {"device": False, "margin": -0.9})}
    assert table.slower(eager, BEFORE) != []
