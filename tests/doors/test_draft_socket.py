"""The draft socket, both ways: hostile hosts, and hostile draft servers.

Whatever a host says, the draft server goes on, and the texts of an honest host are drafted for.
Whatever a draft server says, no step of its host fails, and the other drafters go on.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "drafters" / "ahead"))
from talk import HELLO, Clock, Host, Liar, V, line, open_text, small_server

from outrider.control import AdaptiveDrafter, Control, adaptive_control
from outrider.core import Budget, KeyedCoins, Outcome, Request, SamplingParams
from outrider.drafters import AheadDrafter, GuardedDrafter
from outrider.drafters.ahead.messages import FROM_HOST, FROM_SERVER, SENT

NUMBERS = st.one_of(
    st.integers(-2, 60),
    st.sampled_from([2**31, 2**62, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400)]),
    st.sampled_from([0.0, -0.0, 1e-320, 1e308, 0.5, 1.0, 1.5, math.nan, math.inf, -math.inf]),
)
ONE = NUMBERS | st.sampled_from([None, True, False, "", "7", "x\ud800"])
ODD = ONE | st.lists(ONE, max_size=3) | st.dictionaries(st.sampled_from("a7"), ONE, max_size=2)
BYTES = st.one_of(
    st.binary(max_size=80),
    st.binary(max_size=80).map(lambda said: said + b"\n"),
    st.sampled_from([b"[" * 70_000, b" " * 70_000 + b"\n", b"1" * 5000 + b"\n", b'{"a":1e999}\n']),
)


@st.composite
def rarely(draw, odd, usual):
    """Draw what is usual, one time in eight something else."""
    return draw(odd if draw(st.integers(0, 7)) == 7 else usual)


@st.composite
def parts(draw, *usual):
    """Draw a list whose parts are usual, or not, or not all there."""
    whole = [draw(rarely(ODD, one)) for one in usual]
    return draw(rarely(st.sampled_from([whole[:-1], [*whole, 0], [], 7, None]), st.just(whole)))


def messages(known, usual):
    """Draw lines: messages of these kinds, other ones, and bytes."""
    said = st.sampled_from(sorted(known)).flatmap(
        lambda name: st.fixed_dictionaries({name: rarely(ODD, usual[name])})
    )
    return st.lists(rarely(BYTES | st.dictionaries(st.just("grow"), ODD), said), max_size=8)


KEYS, TOKENS = st.integers(1, 4), st.lists(rarely(NUMBERS, st.integers(0, V)), max_size=6)
OPTIONS = st.dictionaries(
    st.sampled_from([*SENT, "grammar"]),
    rarely(ODD, NUMBERS | st.dictionaries(NUMBERS.map(repr), NUMBERS, max_size=3)),
    max_size=3,
)
FROM_HOSTS = messages(
    FROM_HOST,
    {
        "hello": st.just(HELLO["hello"]),
        "open": st.lists(parts(KEYS, TOKENS, TOKENS, st.integers(0), OPTIONS, TOKENS), max_size=4),
        "commit": st.lists(parts(KEYS, st.integers(0, 9), TOKENS), max_size=4),
        "close": st.lists(rarely(ODD, KEYS), max_size=3),
    },
)


@settings(deadline=None)
@given(FROM_HOSTS)
def test_whatever_a_host_says_the_others_are_drafted_for(said):
    with tempfile.TemporaryDirectory() as folder:
        server = small_server(Path(folder) / "draft.sock")
        honest, hostile = Host(server.path, HELLO, open_text(1)), Host(server.path)
        try:
            for n, message in enumerate([HELLO, *said]):
                hostile.say(line(message) if isinstance(message, dict) else message)
                honest.say({"commit": [[1, 3 + n, [40]]]})
                for _ in range(2):
                    server.turn(0.0)
            for _ in range(12):
                server.turn(0.0)
            before = len(honest.told("grown"))
            honest.say({"commit": [[1, 4 + len(said), [40]]]})
            for _ in range(3):
                server.turn(0.0)
            assert len(honest.told("grown")) > before
            assert not honest.is_over
            assert not honest.told("unknown") + honest.told("left_out")
            _check_books(server)
            hostile.close(), honest.close()
            for _ in range(2):
                server.turn(0.0)
            assert server._tokens == server._growth._model.num_open == 0
            assert not server._growth.names
        finally:
            hostile.close(), honest.close(), server.close()


def _check_books(server):
    """What is counted of texts is what there is."""
    growth, peers = server._growth, server._peers
    counted = {(n, key): size for n, peer in peers.items() for key, size in peer.texts.items()}
    assert counted == {name: growth.length(name) for name in growth.names}
    assert server._tokens == sum(counted.values())


@st.composite
def additions(draw):
    """Draw what may be added to a tree."""
    count, key = draw(st.integers(1, 3)), draw(rarely(ODD, st.integers(1, 2)))
    numbers = [draw(rarely(ODD, one)) for one in (st.just(9), st.integers(0, 3), st.integers(0, 8))]
    tokens = [draw(rarely(ODD, st.integers(0, V + 3))) for _ in range(count)]
    return [key, *numbers, tokens, [draw(rarely(ODD, st.floats(0, 1))) for _ in range(count)]]


FROM_SERVERS = messages(
    FROM_SERVER,
    {
        "hello": st.just(HELLO["hello"]),
        "model": st.just("m"),
        "grown": st.lists(rarely(parts(KEYS, KEYS, KEYS, KEYS, TOKENS, TOKENS), additions())),
        "unknown": st.lists(rarely(ODD, KEYS), max_size=3),
        "left_out": st.lists(rarely(ODD, KEYS), max_size=1),
        "refused": st.just("full"),
    },
)


@pytest.fixture(scope="module")
def compiled():
    """Lookups are compiled when they are first used."""
    _converse([], trees=True, control=True)


@pytest.mark.usefixtures("compiled")
@settings(deadline=None)
@given(FROM_SERVERS, st.booleans(), st.booleans())
def test_whatever_a_draft_server_says_steps_and_other_drafters_go_on(said, trees, control):
    _converse(said, trees, control)


def _converse(said, trees, control):
    """Let a draft server say these, one in each step."""
    with tempfile.TemporaryDirectory() as folder:
        liar, clock = Liar(Path(folder) / "draft.sock"), Clock()
        ahead = AheadDrafter(Path(folder) / "draft.sock", wait=1e-9, clock=clock)
        drafter = ahead
        if control:
            free = adaptive_control().free | {"ahead": ahead}
            drafter = AdaptiveDrafter(Control(free))
        guard = GuardedDrafter(drafter, V)
        asked = [Request(n, (1, 2, 3) * 3, SamplingParams(), 0) for n in (1, 2)]
        budget = Budget(np.array([4, 4]), "match", KeyedCoins(), trees=trees)
        try:
            guard.start(asked)
            for message in [HELLO, *said]:
                liar.say(message)
                proposal = guard.propose(asked, budget)
                if control:  # what it does not verify is asked of it all the same
                    GuardedDrafter(ahead, V).propose(asked, budget)
                outcomes = [
                    Outcome(one, draft.tokens[:1] or (5,), (0,), 0, 0, None)
                    for one, draft in zip(asked, proposal.drafts(), strict=True)
                ]
                guard.observe(outcomes)
                for outcome in outcomes:
                    outcome.request.extend(outcome.tokens, None)
                guard.meanwhile()
                clock.now += 1.0
            assert not guard.fallbacks, guard.fallbacks
            assert len(ahead._trees) <= 2
        finally:
            ahead.close(), liar.close()
