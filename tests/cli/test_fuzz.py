"""A short run of benchmarks/fuzz.py: hostile input at every door, from a fixed seed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from outrider.errors import Unsupported

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuzz
from fuzz_doors import DOORS, Broken, look_at, refusal, terminal
from hostile import TEXTS, Hostile, Tags, dumps

INPUTS = {"custom_params": 1000, "prompts": 200, "trial_parts": 100, "reports": 3, "drafts": 5}


@pytest.mark.parametrize("name", DOORS)
def test_a_door(name):
    if name in ("heads", "drafts"):
        pytest.importorskip("transformers")
    found = fuzz.fuzz(name, DOORS[name], seed=18, inputs=INPUTS.get(name, 15))
    assert not found["broken_by"]


# -- the fuzzer finds what it looks for


def refuse_badly(rng, folder):
    with refusal(Unsupported):
        raise ValueError("not the declared error")


def say_much(rng, folder):
    with refusal(ValueError):
        raise ValueError("several\nlines")


def steer(rng, folder):
    with terminal():
        sys.stdout.write(TEXTS[10])


def inject(rng, folder):
    look_at(f"<p>{TEXTS[2]}</p>")


@pytest.mark.parametrize("door", [refuse_badly, say_much, steer, inject])
def test_a_bad_door(door):
    assert fuzz.fuzz("bad", door, 0, 1)["crashes"] == 1


def test_a_door_that_hangs(monkeypatch):
    monkeypatch.setattr(fuzz, "LIMIT", 0.05)
    assert fuzz.attempt(lambda rng, folder: time.sleep(5), Hostile(0), Path()) == "hang"


def test_what_a_page_would_run():
    for text in TEXTS[1:4]:
        assert Tags(text).found
    assert not Tags("<p>&lt;script&gt;</p>").found
    with pytest.raises(Broken):
        look_at("<script>1</script>", scripts=0)


def test_the_same_seed_gives_the_same_input():
    def made(number):
        rng = fuzz.source(0, "door", number)
        return rng.written(rng.mutated({"a": [1, {"b": "c"}]}))

    assert [made(n) for n in range(50)] == [made(n) for n in range(50)]
    assert len({made(n) for n in range(50)}) > 40


def test_documents_are_json():
    document = {"a": [1, 2.5, None, True, "\u2028"], "b": {}, "c": []}
    assert json.loads(dumps(document)) == document
