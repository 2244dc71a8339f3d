"""Never slower: the simulated server keeps its speed, on every text and at every batch size."""

from __future__ import annotations

import json

import pytest
import table

BEFORE = json.loads(table.FILE.read_text())


FIXED = ("suffix 4", "device 4")
"""Drafters that may be slower than plain decoding: what they show is how the engine works."""


def chosen(batch, is_slow):
    """Return the cells at a batch size, those left to `.ci/run long` or the others."""
    cells = [(cell, cell.split("/")) for cell in table.cells((batch,))]
    return [
        cell for cell, (way, _, _, who) in cells if (way == "closed" and who in FIXED) == is_slow
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
    """Lookups cost little where they do not pay, whoever wrote the table."""
    own = {cell: speed for cell, speed in BEFORE.items() if cell.endswith("/adaptive")}
    assert {cell: speed for cell, speed in own.items() if speed < table.ADAPTIVE_LEAST} == {}
    assert {c: s for c, s in BEFORE.items() if c.endswith("/none") and s < table.NONE_LEAST} == {}


def test_two_runs_are_alike():
    for cell in ("closed/mixed/4/adaptive", "closed/json/4/adaptive+model"):
        assert table.speed(cell) == table.speed(cell)


def test_twin_a_control_that_always_drafts_is_noticed():
    """Drafting without a gain costs a wait in every step."""
    cell = "closed/prose/64/adaptive"
    eager = {cell: table.speed(cell, {"margin": -0.9})}
    assert table.slower(eager, BEFORE) != []
