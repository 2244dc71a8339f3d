"""A short soak from a fixed seed; `benchmarks/soak_sglang.py` runs it for 100,000 requests."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import soak_sglang
import soak_traffic
import soak_troubles
from soak_sglang import Soak, State

DISTINCT, PIECE = 80, State(seed=0).piece


@pytest.fixture(scope="module")
def soak(launch, tmp_path_factory):
    """Return a function that asks one round of requests, with troubles close together."""
    folder = tmp_path_factory.mktemp("soak")
    (folder / "rule").write_text("")

    def start(model, *flags, **environment):
        rule = str(folder / "rule")
        return launch("soak", model, *flags, **environment, OUTRIDER_TEST_RULE=rule)

    patched = pytest.MonkeyPatch.context()
    with soak_sglang.started(folder, PIECE, start) as (server, drafts), patched as m:
        m.setattr(soak_sglang, "TROUBLE_EVERY", 12)
        m.setattr(soak_troubles, "SECONDS", 0.3)
        m.setattr(soak_traffic, "MAX_TOKENS", 16)

        def run(state, rule, *levels):
            (folder / "rule").write_text(rule)
            rounds = iter([False, True])
            running = Soak(server, drafts, folder, state, DISTINCT)
            asyncio.run(running.run(levels, lambda: next(rounds), lambda: None))
            running.count()
            return state

        yield run


@pytest.fixture(scope="module")
def found(soak):
    return soak(State(seed=0), "", 2, 8, 32)


def test_no_answer_is_wrong_or_lost(found):
    assert found.broken == []
    assert found.counts["compared"] > 120
    assert found.counts["turns"] > 40
    assert not any(sample["used_slots"] for sample in found.samples)
    assert set(found.troubles) == set(soak_troubles.TROUBLES)
    assert min(found.counts[name] for name in ("hung up", "timed out", "refused")) > 0
    assert {name for name, count in found.fallbacks.items() if count} > {"error", "garbage"}


def test_twin_a_lenient_rule_is_found(soak, found):
    """Drafts are kept if they are among the target's two best."""
    lenient = soak(State(seed=0, plain=found.plain), "lenient", 48)
    assert 10 < lenient.counts["wrong"] < lenient.counts["compared"]


def test_memory_slope():
    """A leak of 2 MB in 1,000 requests is seen in two processes; what they begin with is not."""

    def sample(piece, n):
        return {"piece": piece, "requests": 500 * n, "rss_mb": 100.0 * piece + max(n, 6)}

    samples = [sample(piece, n) for piece in (1, 2) for n in range(13)]
    short = [sample(3, 10 * n) for n in range(5)]
    assert soak_sglang.memory_slope(samples + short) == 2.0
    assert soak_sglang.memory_slope(short) is None


def test_seeds_together():
    """What two soaks found is added up; their servers stay apart."""

    def state(seed, wrong):
        found = State(seed, plain=[{}], number=7, pieces=2, tokens=30)
        found.counts.update(asked=7, wrong=wrong)
        found.samples = [
            {"piece": p, "requests": 7, "rss_mb": 1.0, "used_slots": 0} for p in (1, 2)
        ]
        return found

    found = soak_sglang.summary([state(0, 0), state(1, 2)])
    assert found["seeds"] == [0, 1]
    assert [found[key] for key in ("requests", "wrong", "tokens", "pieces")] == [14, 2, 60, 4]
    assert [sample["piece"] for sample in found["samples"]] == [1, 2, 3, 4]
