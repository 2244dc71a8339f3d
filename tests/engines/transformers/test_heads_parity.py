"""`benchmarks/heads_parity.py` compares what it says, and sees a difference if there is one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
heads_parity = pytest.importorskip("heads_parity")

CELLS = [
    ("mtp trained", "chain", "greedy"),
    ("mtp layers", "leaves", "T=0.7"),
    ("mtp trained", "tree", "T=0.7"),
]


def unmet(result):
    return [goal["goal"] for goal in heads_parity.goals(result) if not goal["met"]]


def test_the_same_tokens_are_the_same():
    result = heads_parity.compare(CELLS, requests=2, tokens=12)
    assert [cell["tokens_compared"] for cell in heads_parity.all_cells(result)] == [24] * 3
    assert (result["tokens_compared"], result["tokens_different"]) == (72, 0)
    assert unmet(result) == ["200,000 tokens or more are compared"]


@pytest.mark.parametrize(
    ("spoil", "different"),
    [(lambda ids: [*ids[:3], ids[3] + 1, *ids[4:]], 1), (lambda ids: ids[:-2], 2)],
    ids=["another token", "an end too soon"],
)
def test_a_difference_is_reported(spoil, different, tmp_path, monkeypatch):
    """What was drafted for the last request is spoiled, on its way to the comparison."""
    generate = heads_parity.outrider.generate

    def spoiled(*args, drafter, **more):
        done = generate(*args, drafter=drafter, **more)
        if drafter is None:
            return done
        *others, last = done.outputs
        return replace(done, outputs=[*others, spoil(last)])

    monkeypatch.setattr(heads_parity.outrider, "generate", spoiled)
    for name, value in {"CELLS": CELLS[:1], "REQUESTS": 2, "TOKENS": 12, "GOAL": 24}.items():
        monkeypatch.setattr(heads_parity, name, value)
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["heads_parity.py", "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        heads_parity.main()
    result = json.loads(out.read_text())
    assert end.value.code == 1
    assert result["tokens_different"] == different
    assert [g["goal"] for g in result["goals"] if not g["met"]] == [
        "no token differs from plain decoding"
    ]


def test_files_are_trained_on_or_held_out():
    """`benchmarks/heads_domain.py` tries a head on files that it was not trained on."""
    heads_domain = pytest.importorskip("heads_domain")
    trained, held_out = (set(heads_domain.texts(held_out=x)) for x in (False, True))
    assert not trained & held_out
    assert len(trained) > 3 * len(held_out) > 3 * heads_domain.PROMPTS


def test_what_was_compared_is_all_of_it():
    """The committed result has every head and sampling, and meets its goals."""
    result = json.loads(heads_parity.RESULT.read_text())
    cells = heads_parity.all_cells(result)
    assert {(c["head"], c["shape"], c["sampling"]) for c in cells} == set(heads_parity.CELLS)
    assert not unmet(result)
    for shape in result["shapes"].values():
        assert "dirty" not in shape["provenance"]["commit"]
