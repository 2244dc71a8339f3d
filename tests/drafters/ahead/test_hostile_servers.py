"""What a draft server may do to a host: speed only, and of its own drafter only."""

from __future__ import annotations

import fcntl
import socket

import numpy as np
import pytest
from talk import HELLO, Clock, Liar, small_server

from outrider.control import adaptive_drafter
from outrider.core import Budget, KeyedCoins, Outcome, Request, SamplingParams
from outrider.drafters import AheadDrafter, GuardedDrafter
from outrider.drafters.ahead.connection import MAX_LINES
from outrider.drafters.ahead.drafter import LONGEST_RETRY, MAX_REOPENED

V, MOST = 64, 4
BIG = int("9" * 400)


def request(key=1, length=6):
    return Request(key, tuple(1 + n % 3 for n in range(length)), SamplingParams(), 0)


def emitted(one, *tokens):
    """Return the outcome of a step without drafts."""
    return Outcome(one, tokens, (0,) * len(tokens), 0, 0, None)


def budget(count=1, trees=True):
    return Budget(np.full(count, MOST), rule="match", coins=KeyedCoins(), trees=trees)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def liar(tmp_path):
    liar = Liar(tmp_path / "draft.sock")
    yield liar
    liar.close()


@pytest.fixture
def drafter(tmp_path, clock):
    drafter = AheadDrafter(tmp_path / "draft.sock", clock=clock)
    yield drafter
    drafter.close()


def grown(*said):
    return {"grown": [list(one) for one in said]}


GOOD = grown([1, 6, 0, 1, [7, 8], [0.5, 0.25]])
LIES = {
    "true": grown([1, 6, 0, 1, [7], [True]]),
    "a string": grown([1, 6, 0, 1, [7], ["0.5"]]),
    "a string among others": grown([1, 6, 0, 1, [7, 8], [0.5, "0.5"]]),
    "a huge number": grown([1, 6, 0, 1, [7], [BIG]]),
    "a whole number": grown([1, 6, 0, 1, [7], [1]]),
    "more than sure": grown([1, 6, 0, 1, [7], [1.5]]),
    "less than nothing": grown([1, 6, 0, 1, [7], [-0.5]]),
    "NaN": grown([1, 6, 0, 1, [7], [float("nan")]]),
    "infinity": grown([1, 6, 0, 1, [7], [float("inf")]]),
    "null": grown([1, 6, 0, 1, [7], [None]]),
    "a huge token": grown([1, 6, 0, 1, [BIG], [0.5]]),
    "a negative token": grown([1, 6, 0, 1, [-7], [0.5]]),
    "true for a token": grown([1, 6, 0, 1, [True], [0.5]]),
    "a string for tokens": grown([1, 6, 0, 1, "7", [0.5]]),
    "a number twice": grown([1, 6, 0, 1, [7, 8], [0.5, 0.5]], [1, 6, 1, 2, [7, 8], [0.5, 0.5]]),
    "its own child": grown([1, 6, 0, 0, [7], [0.5]]),
    "its parent's parent": grown([1, 6, 0, 1, [7], [0.5]], [1, 6, 1, 0, [7], [0.5]]),
    "many children": grown([1, 6, 0, 1, [7] * 1025, [0.5] * 1025]),
    "an unknown key": {"grow": []},
    "nothing": {},
    "unknown of lists": {"unknown": [[1]]},
    "left out of null": {"left_out": None},
    "many unknown": {"unknown": [1] * 257},
    "a number as a name": HELLO | {"model": 7},
    "a long line": b" " * 70_000,
    "no line": b"[" * 1000 + b"\n",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_closes_the_connection_and_drafts_go_on_from_elsewhere(
    tmp_path, liar, lie, clock, caplog
):
    drafter = adaptive_drafter(ahead=tmp_path / "draft.sock")
    ahead = drafter.control.free["ahead"]
    ahead._clock = clock
    guard, asked = GuardedDrafter(drafter, V), request()
    guard.start([asked])
    liar.say(HELLO | {"model": "m"}, GOOD)
    guard.meanwhile()
    assert ahead._trees.keys() == {1}
    liar.say(lie)
    guard.meanwhile(), guard.meanwhile()  # a look takes a part of a long line
    assert ahead._connection is None
    for _ in range(6):
        clock.now += 0.01
        guard.propose([asked], budget())
        guard.meanwhile()
    assert not guard.fallbacks, guard.fallbacks
    assert drafter.control.free["suffix"].propose([asked], budget()).num_drafts.sum() > 0
    assert len(caplog.messages) == 1


def test_without_control_it_is_no_fault_of_the_drafter(liar, drafter):
    guard, asked = GuardedDrafter(drafter, V), request()
    guard.start([asked])
    liar.say(GOOD, LIES["a number twice"])
    for _ in range(4):
        assert guard.propose([asked], budget()).num_drafts.sum() == 0
    assert not guard.fallbacks
    assert drafter._connection is None


def test_tokens_that_the_target_does_not_have_are_not_proposed(tmp_path, liar):
    """They are no lie: a draft model may have more tokens. Control goes on with the others."""
    drafter = adaptive_drafter(ahead=tmp_path / "draft.sock")
    guard, asked = GuardedDrafter(drafter, V), request()
    guard.start([asked])
    liar.say(
        HELLO,
        grown([1, 6, 0, 1, [V, 7, 2**62], [0.9, 0.5, 0.4]], [1, 6, 1, 4, [9], [1.0]]),
        grown([1, 6, 2, 5, [V + 1], [0.9]]),
    )
    guard.meanwhile()
    proposal = drafter.control.free["ahead"].propose([asked], budget())
    assert proposal.tokens.tolist() == [7]
    for _ in range(5):
        guard.propose([asked], budget())
    assert not guard.fallbacks


@pytest.mark.parametrize("refusal", [{"refused": "go away \x1b]0;x\x07"}, GOOD | {"model": 3}])
def test_a_server_that_refuses_is_asked_less_and_less_often(liar, drafter, clock, caplog, refusal):
    connects, asked = [], request()
    for _ in range(2000):
        before = drafter._connection
        drafter.propose([asked], budget())
        if drafter._connection is not before and drafter._connection is not None:
            connects.append(clock.now)
        liar.say(HELLO, refusal)
        clock.now += 0.3
    waits = np.diff(connects)
    assert len(connects) <= 16, connects
    assert waits.max() == pytest.approx(LONGEST_RETRY, abs=1)
    assert (np.diff(waits[:6]) > 0.5).all()
    (said,) = caplog.messages
    assert "\x1b" not in said
    assert "\x07" not in said


def test_a_server_that_is_gone_is_looked_for_every_second(tmp_path, drafter, clock, monkeypatch):
    tries = []
    monkeypatch.setattr(drafter, "_miss", lambda why: tries.append(clock.now))
    for _ in range(300):
        drafter.start([request()])
        clock.now += 0.1
    assert len(tries) >= 29
    server = small_server(tmp_path / "draft.sock")
    for restarts in range(1, 6):  # of a server that has been of use
        clock.now += 1.1
        drafter.start([request()])
        for _ in range(3):
            server.turn(0.0)
        drafter.meanwhile()
        assert drafter._trees, restarts
        server.close()
        drafter.meanwhile()
        server = small_server(tmp_path / "draft.sock")
    server.close()


def test_a_flood_costs_a_step_little(liar, drafter):
    """What is taken in at each look is bounded; the rest has to wait."""
    asked, taken = request(), []
    drafter.start([asked])
    take_in = drafter._take_in
    drafter._take_in = lambda message: (taken.append(1), take_in(message))
    for kind in ({"unknown": []}, grown(*[[1, 6, 0, 1, [7], [0.5]]] * 500), HELLO):
        for _ in range(10):
            liar.say(*[kind] * 40)
            taken.clear()
            drafter.meanwhile()
            assert len(taken) <= MAX_LINES
            assert len(drafter._connection._in) <= 2 << 16
    assert drafter._connection is not None


def test_a_text_that_the_server_never_knows_is_not_sent_for_ever(liar, drafter):
    asked = request()
    for _ in range(50):
        drafter.propose([asked], budget())
        liar.say({"unknown": [1]})
    sent = b"".join(liar.heard).count(b'"open"')
    assert sent == MAX_REOPENED + 1
    assert drafter.left_out == {"refused": 1}
    assert drafter._connection is not None


def test_a_text_that_is_refused_is_not_sent_again(liar, drafter):
    some = [request(1), request(2)]
    drafter.start(some)
    liar.say(HELLO, {"left_out": [1, 1, 9]}, grown([2, 6, 0, 1, [7], [0.5]]))
    for _ in range(5):
        proposal = drafter.propose(some, budget(2))
        outcomes = [emitted(one, 40) for one in some]
        drafter.observe(outcomes)
        liar.say()
    assert proposal.num_drafts.tolist() == [0, 1]
    heard = b"".join(liar.heard)
    assert heard.count(b'"open":[[1,') == 1
    assert b"[1,6,[40]]" not in heard
    assert b"[2,6,[40]]" in heard
    assert drafter.left_out == {"refused": 1}
    drafter.stop(some)
    drafter.start(some)  # others may be called so later
    liar.say()
    assert b"".join(liar.heard).count(b'"open":[[1,') == 2


def test_many_long_texts_are_introduced_one_by_one(tmp_path, clock):
    """Together they are longer than any message may be, and than a socket takes."""
    server, drafter = small_server(tmp_path / "draft.sock"), AheadDrafter(tmp_path / "draft.sock")
    drafter._clock = clock
    prompt = tuple(100_000 + n % 50_000 for n in range(1 << 15))
    some = [Request(n, prompt, SamplingParams(), 0) for n in range(84)]
    some.append(Request(84, prompt * 40, SamplingParams(), 0))  # too long for a message
    some.append(Request(85, (1, 2, 3), SamplingParams(), 0))
    longest = 0
    for _ in range(400):
        drafter.propose(some, budget(len(some)))
        longest = max(longest, len(drafter._connection._out))
        server.turn(0.0)
        if len(server._growth.names) == 85 and drafter._trees:
            break
    assert server._number == 1, "it connected once"
    assert {key for _, key in server._growth.names} == {*range(84), 85}
    assert drafter.left_out == {"too long": 1}
    assert drafter._trees.keys() == {85}  # the model does not have the tokens of the others
    assert longest < 3 << 20
    drafter.close(), server.close()


def test_a_server_that_reads_nothing_is_left(tmp_path, liar, drafter, clock, monkeypatch):
    monkeypatch.setattr("outrider.drafters.ahead.connection.MAX_UNREAD", 3 << 20)
    prompt = tuple(100_000 + n for n in range(1 << 15))
    some = [Request(n, prompt, SamplingParams(), 0) for n in range(40)]
    drafter.start(some)
    assert 0 < len(drafter._open) < 20
    assert len(drafter._connection._out) < 2 << 20
    for _ in range(3):
        drafter.propose(some, budget(40))
        assert len(drafter._connection._out) < 2 << 20
    outcomes = [emitted(one, *range(9000)) for one in some[: len(drafter._open)]]
    for _ in range(200):
        drafter.observe(outcomes)
    assert drafter._connection is None


def test_additions_come_in_messages_that_a_host_takes(tmp_path):
    """However wide a pass is, and however many tokens may follow a node."""
    server = small_server(tmp_path / "draft.sock", width=512, fan_out=40)
    drafter = AheadDrafter(tmp_path / "draft.sock")
    some = [Request(10**17 + n, (1, 2, 3), SamplingParams(), 0) for n in range(200)]
    for _ in range(12):
        drafter.propose(some, budget(200))
        server.turn(0.0)
    assert drafter._connection is not None
    assert len(drafter._trees) == 200
    drafter.close(), server.close()


def test_unknown_texts_that_nobody_sent_leave_no_trace(liar, drafter):
    drafter.start([request()])
    for n in range(40):
        liar.say({"unknown": [*range(2 + 100 * n, 102 + 100 * n)]}, {"left_out": [n + 10_000]})
        drafter.meanwhile()
    assert not drafter._lost
    assert not drafter._shut
    assert drafter._open == {1}


def test_no_file_descriptor_for_a_socket_costs_drafts_only(tmp_path, liar, drafter, monkeypatch):
    def none_left(*args):
        raise OSError(24, "Too many open files")

    guard, asked = GuardedDrafter(drafter, V), request()
    monkeypatch.setattr("outrider.drafters.ahead.drafter.socket.socket", none_left)
    guard.start([asked])
    assert guard.propose([asked], budget()).num_drafts.sum() == 0
    assert not guard.fallbacks


def test_a_process_with_many_files_can_wait(liar, drafter):
    """`select` takes no number above 1023."""
    asked = request()
    drafter.start([asked])
    try:
        number = fcntl.fcntl(drafter._connection.fileno(), fcntl.F_DUPFD, 1500)
    except OSError:
        pytest.skip("no process may have so many files here")
    drafter._connection._socket.close()
    drafter._connection._socket = socket.socket(fileno=number)
    assert not drafter._await(0.0)
    liar.say(GOOD)
    assert drafter._await(5.0)
