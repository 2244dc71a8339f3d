"""What outlives an answer: prefix caches, sessions, a pool that is nearly full.

The servers run in the default mode, with the cache warm, and check each slot that they read
(`sanitize`): so a fault is found where it begins, not only where it changes an answer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import conversations
import pytest

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--speculative-algorithm", "OUTRIDER", "--speculative-num-steps", "6", "--enable-metrics"),
]
DRAFTERS = {
    "ngram": {"min_n": 1},
    "suffix": {"min_vote": 0.0},
    "model": {},
    "device": {},
    "adaptive": {},
}
SEEDS = range(5)


@pytest.fixture(scope="module")
def server(launch, profile):
    flags = [
        *("--max-total-tokens", "9000", "--max-running-requests", "32"),
        *("--speculative-draft-model-path", str(TINY / "draft"), "--enable-streaming-session"),
        *("--chunked-prefill-size", "64"),
    ]
    asked = profile(drafter="ngram", drafters=DRAFTERS, sanitize=True)
    return launch("caches", TINY / "target", *FLAGS, *flags, **asked).wait()


@pytest.fixture(scope="module")
def texts(server):
    shared = [conversations.SHARED + text for text in conversations.TEXTS[:2]]
    return [conversations.tokens_of(server, text, 120) for text in (*conversations.TEXTS, *shared)]


@pytest.mark.parametrize("drafter", [*DRAFTERS, "none"])
def test_follow_up_turns(drafter, server, texts, record_property):
    """A, A + answer + more, A again; five users at once, some of whom share a prefix."""
    before = server.metrics()
    turns = conversations.in_company(server, texts, SEEDS, {"drafter": drafter})
    assert conversations.wrong_turns(server, turns) == []
    after = server.metrics()
    name = "outrider:accepted_draft_tokens_total"
    accepted = after.get(name, 0) - before.get(name, 0)
    assert (accepted > 0) == (drafter != "none") or drafter == "adaptive"
    record_property("requests compared", len(turns))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("drafter", ["ngram", "device", "none"])
def test_sessions(drafter, streaming, server, texts, record_property):
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        options = {"drafter": drafter}
        found = pool.map(
            lambda seed: conversations.session(server, texts, seed, options, streaming), SEEDS
        )
        turns = [turn for turns in found for turn in turns]
    assert conversations.wrong_turns(server, turns) == []
    record_property("requests compared", len(turns))


POOL = 400


@pytest.fixture(scope="module")
def full(launch, profile):
    flags = ["--max-total-tokens", str(POOL), "--max-running-requests", "12"]
    asked = profile(drafter="ngram", drafters=DRAFTERS, sanitize=True)
    draft = ["--speculative-draft-model-path", str(TINY / "draft")]
    return launch("full", TINY / "target", *FLAGS, *flags, *draft, **asked).wait()


def answer(server, tokens, most, drafter):
    found = conversations.generate(server, tokens, most, {"drafter": drafter})
    assert len(found["output_ids"]) == most, found["meta_info"]["finish_reason"]
    return found["output_ids"]


SIZES = [(200, 160), (200, 180), (200, 198), (50, 348), (370, 28), (392, 6)]
"""Lengths of a prompt and of its answer: bare SGLang serves each in a pool of 400."""


@pytest.mark.parametrize("drafter", ["ngram", "device", "model", "none"])
def test_a_request_that_takes_the_whole_pool(drafter, full, server, texts):
    for prompt, most in SIZES:
        tokens = (texts[0] * 4)[:prompt]
        assert answer(full, tokens, most, drafter) == answer(server, tokens, most, "none")


@pytest.mark.parametrize("drafter", ["ngram", "device", "adaptive"])
def test_requests_that_do_not_fit_beside_each_other(drafter, full, server, texts):
    """Each of three wants more than half of the pool; twelve others come and go."""
    asked = [((text * 3)[:100], POOL - 110) for text in texts[:3]]
    asked += [((text * 3)[:30], 60) for text in texts * 2]
    expected = [answer(server, tokens, most, "none") for tokens, most in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: answer(full, *one, drafter), asked))
    assert found == expected
    full.settle_down()  # no slot is missing
