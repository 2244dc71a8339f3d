"""The attack of benchmarks/side_channel.py finds what is there, and nothing where nothing is."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from side_channel import accuracy, interval

PROMPTS, RUNS = 20, 6


def traces(tokens):
    """Return made-up traces. tokens: of a chunk, by prompt and a source of chance"""
    rng = random.Random(0)
    return [
        [
            {
                "tokens": [tokens(prompt, rng) for _ in range(12)],
                "bytes": [rng.randrange(300, 320) for _ in range(12)],
                "times": [rng.random() for _ in range(12)],
            }
            for _ in range(RUNS)
        ]
        for prompt in range(PROMPTS)
    ]


def test_acceptance_gives_the_prompt_away():
    made = traces(lambda prompt, rng: 1 + prompt % 5 + rng.randrange(2))
    found = accuracy(made, "tokens")
    assert found["interval"][0] > 2 / PROMPTS
    assert found["guesses"] == PROMPTS * RUNS


@pytest.mark.parametrize("feature", ["tokens", "bytes", "times"])
def test_what_says_nothing_gives_chance(feature):
    """Chunks of one size: equal distances must not favour anybody."""
    found = accuracy(traces(lambda prompt, rng: 8), feature)
    hits = round(found["accuracy"] * found["guesses"])
    low, high = interval(hits, found["guesses"], z=3.3)  # 99.9 %
    assert low < 1 / PROMPTS < high


def test_the_interval():
    low, high = interval(5, 100)
    assert low == pytest.approx(0.0215, abs=1e-3)
    assert high == pytest.approx(0.1118, abs=1e-3)
