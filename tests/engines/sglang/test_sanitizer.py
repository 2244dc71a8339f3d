"""The KV sanitizer finds faults that are planted in a real server."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import conversations
import pytest
import requests

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"
SPECULATION = ["--speculative-algorithm", "OUTRIDER", "--speculative-num-steps", "6"]
FLAGS = [
    *SPECULATION,
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-running-requests", "16", "--max-total-tokens", "4000", "--enable-streaming-session"),
]
DRAFTERS = {
    "ngram": {"min_n": 1},
    "suffix": {"min_vote": 0.0},
    "device": {},
    "eagle3": {"path": str(TINY / "head"), "depth": 3},
}
ASKED = ("ngram", "suffix", "eagle3", "device")
MAX_REQUESTS, MAX_AT_ONCE = 300, 8
"""Requests in which a fault must be found, and how many are asked at once."""

FAULTS = [
    *("claimed", "rejected", "session", "given back", "given twice", "shifted", "stale"),
    "miscounted",
]
"""Those of `outrider_planted`."""

ON_DEVICE = ("stale", "miscounted")
"""They need drafts of a head on the device: nobody else may draft in the batch."""

QUICK = ("claimed", "stale", "miscounted")
"""The others are planted before a release."""


class Counted:
    """A server, of which we count the requests that it has answered."""

    def __init__(self, server):
        self.post, self._ask = server.post, server.ask
        self._answered = itertools.count(1)
        self.answered = 0

    def ask(self, path, body):
        """Return the answer."""
        found = self._ask(path, body)
        if path == "/generate":
            self.answered = next(self._answered)
        return found


def ask(server, fault, count, at_once=MAX_AT_ONCE, is_bare=False):
    """Ask so many requests in conversations and sessions. Return how many were asked.

    Raises Crashed if the server does not answer one of them.
    """
    counted = Counted(server)

    def talk(seed):
        drafter = "eagle3" if fault in ON_DEVICE else ASKED[seed % len(ASKED)]
        options = None if is_bare else {"drafter": drafter}
        if seed % 3 < 2:
            conversations.converse(counted, texts, seed, options)
        else:
            conversations.session(counted, texts, seed, options, streaming=bool(seed % 2))

    try:
        texts = [
            conversations.tokens_of(counted, conversations.SHARED + text, 100)
            for text in conversations.TEXTS
        ]
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(talk, range(count // 4)))
    except (requests.RequestException, AssertionError) as error:
        raise Crashed(counted.answered) from error
    return counted.answered


class Crashed(Exception):
    """A server has stopped after so many answers."""


def requests_until_found(server, fault):
    """Return after how many requests the server has stopped; None if it has not."""
    try:
        ask(server, fault, MAX_REQUESTS)
    except Crashed as crash:
        return crash.args[0]
    return None


def said(server):
    """Return what the sanitizer has said of a violation."""
    lines = server.log.read_text(errors="replace").splitlines()
    return [line.partition("KV sanitizer: ")[2] for line in lines if "KV sanitizer: " in line]


@pytest.mark.parametrize(
    "fault", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAULTS]
)
def test_a_planted_fault_is_found(fault, launch, profile):
    asked = profile(drafter="ngram", drafters=DRAFTERS, sanitize=True)
    name = f"planted-{fault.replace(' ', '-')}"
    server = launch(name, TINY / "target", *FLAGS, **asked, OUTRIDER_TEST_PLANTED=fault).wait()
    assert requests_until_found(server, fault) is not None
    assert said(server), server.tail()


@pytest.mark.parametrize("page", [1, 16])
def test_nothing_is_found_where_nothing_is_planted(page, launch, profile):
    asked = profile(drafter="ngram", drafters=DRAFTERS, sanitize=True)
    flags = [*FLAGS, "--page-size", str(page)]
    asked["TRITON_INTERPRET"] = "1"  # for what 0.5.11 gives pages with
    server = launch(f"planted-nothing-{page}", TINY / "target", *flags, **asked).wait()
    assert requests_until_found(server, "") is None, said(server)
    assert said(server) == []
