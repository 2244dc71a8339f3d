"""What a host may do to a draft server: a bad text costs itself, a bad host costs itself."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time

import pytest
from talk import HELLO, Clock, Host, SmallModel, V, line, open_text, small_server

from outrider.drafters.ahead.server import HELLO_SECONDS, MAX_FAULTS, MAX_PEERS, PAUSE_SECONDS

BIG = 10**400
BAD_OPTIONS = {
    "a 400-digit temperature": {"temperature": BIG},
    "a 400-digit top_p": {"top_p": BIG},
    "a 400-digit bias": {"logit_bias": {"3": BIG}},
    "a 400-digit frequency": {"frequency_penalty": -BIG},
    "a 400-digit repetition": {"repetition_penalty": BIG},
    "a huge bias": {"logit_bias": {"5": 1e308}},
    "a tiny temperature": {"temperature": 1e-320},
    "a tiny repetition": {"temperature": 1.0, "repetition_penalty": 1e-320},
    "NaN": {"temperature": float("nan")},
    "infinity": {"presence_penalty": float("inf")},
    "a bias of infinity": {"logit_bias": {"5": float("inf")}},
    "a string": {"temperature": "1"},
    "true": {"top_k": True},
    "a huge top_k": {"top_k": 2**70},
    "half a token": {"top_k": 1.5},
    "a list of biases": {"logit_bias": [1]},
    "a bias of token -5": {"logit_bias": {"-5": 1.0}},
    "a bias of token 1_0": {"logit_bias": {"1_0": 1.0}},
    "a bias of many tokens": {"logit_bias": {str(n): 1.0 for n in range(301)}},
    "an unknown option": {"stop": "x"},
}
BAD_TEXTS = {
    "no prompt": [8, [], [], 0, {}, []],
    "too few parts": [8, [1]],
    "a seed of 2**63": [8, [1], [], 2**63, {}, []],
    "a negative token": [8, [-1], [], 0, {}, []],
    "a token of 2**64": [8, [2**64], [], 0, {}, []],
    "a string for a prompt": [8, "abc", [], 0, {}, []],
    "null for a prompt": [8, None, [], 0, {}, []],
    "true for a token": [8, [True], [], 0, {}, []],
    "many ends": [8, [1, 2], [], 0, {}, [*range(1025)]],
    "a list of options": [8, [1], [], 0, [], []],
    "the model has no room": [8, [1, SmallModel.BAD], [], 0, {}, []],
    "the model says NaN": [8, [1, SmallModel.DEAF], [], 0, {}, []],
    **{what: [8, [1, 2], [], 0, options, []] for what, options in BAD_OPTIONS.items()},
}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def server(tmp_path, clock):
    server = small_server(tmp_path / "draft.sock", clock)
    yield server
    server.close()


@pytest.fixture
def connect(server):
    hosts = []

    def connect(*said):
        hosts.append(Host(server.path, *said))
        return hosts[-1]

    yield connect
    for host in hosts:
        host.close()


def turns(server, count=6):
    for _ in range(count):
        server.turn(0.0)


@pytest.mark.parametrize("text", BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_a_bad_text_is_left_out_alone(server, connect, text):
    honest = connect(HELLO, open_text(1))
    mixed = connect(HELLO, open_text(2), {"open": [text]}, open_text(3))
    turns(server, 9)
    assert mixed.told("left_out") == [8]
    assert {part[0] for part in mixed.told("grown")} == {2, 3}
    assert not mixed.told("unknown")
    assert not honest.told("unknown") + honest.told("left_out")
    before = len(honest.told("grown"))
    honest.say({"commit": [[1, 3, [40]]]})
    mixed.say({"commit": [[2, 3, [40]], [8, 2, [40]], [3, 3, [40]]]})
    turns(server)
    assert len(honest.told("grown")) > before
    assert mixed.told("unknown") == [8]  # it was told already, and speaks of it all the same
    assert not honest.is_over
    assert not mixed.is_over


@pytest.mark.parametrize(
    "commit", [[5, 3], [5, -3, [4]], [5, 3, [2**70]], [5, 3, 4], [5, 3, ["4"]], [5, {}, []]]
)
def test_a_bad_commit_costs_its_text(server, connect, commit):
    host = connect(HELLO, open_text(4), open_text(5), {"commit": [commit]})
    turns(server)
    assert host.told("left_out") == [5]
    assert {part[0] for part in host.told("grown")} == {4}
    assert not host.is_over


def test_a_host_whose_texts_fail_in_the_model_again_and_again_is_cut_off(server, connect):
    honest, bad = connect(HELLO, open_text(1)), connect(HELLO)
    for n in range(MAX_FAULTS + 1):
        bad.hear()
        assert not bad.is_over, n
        bad.say(open_text(n, [SmallModel.BAD]))
        turns(server, 4)
    bad.hear()
    assert bad.is_over
    assert not honest.told("unknown")
    assert server._growth.names == [(1, 1)]


def test_a_text_that_a_pass_failed_with_costs_others_one_more_prefill(server, connect):
    honest = connect(HELLO, open_text(1, [1, 2, 3, 40]))
    turns(server, 3)
    bad = connect(HELLO, open_text(2, [SmallModel.BAD]))
    turns(server, 8)
    assert bad.told("left_out") == [2]
    assert server._growth._model.read.count(40) == 2
    assert not honest.told("unknown")


def test_texts_and_tokens_are_bounded(server, connect, monkeypatch):
    monkeypatch.setattr("outrider.drafters.ahead.server.MAX_TEXTS", 3)
    monkeypatch.setattr("outrider.drafters.ahead.server.MAX_TOKENS", 100)
    monkeypatch.setattr("outrider.drafters.ahead.server.MAX_ALL_TOKENS", 130)
    one, other = connect(HELLO), connect(HELLO)
    one.say(*[open_text(n) for n in range(5)])
    turns(server)
    assert one.told("left_out") == [3, 4]
    one.say({"close": [0, 1]}, open_text(5, [1] * 97), open_text(6, [1] * 98))
    turns(server)
    assert one.told("left_out") == [3, 4, 6]
    one.say({"commit": [[2, 3, [7]]]})  # 101 tokens
    turns(server)
    other.say(open_text(1, [1] * 33), open_text(2, [1]))
    turns(server)
    assert one.told("left_out") == [3, 4, 6, 2]
    assert other.told("left_out") == [2]
    assert server._tokens == 97 + 33
    one.close()
    turns(server)
    other.say(open_text(2, [1] * 67))
    turns(server)
    assert other.told("left_out") == [2]
    assert server._tokens == 33 + 67


def test_a_text_that_the_model_cannot_read_whole_is_left_out(server, connect, monkeypatch):
    monkeypatch.setattr(server, "_max_length", 10)
    host = connect(HELLO, open_text(1, [1] * 10), open_text(2, [1] * 11))
    turns(server)
    assert host.told("left_out") == [2]


def test_connections_that_say_nothing_are_closed_and_others_stay(server, connect, clock):
    honest, idle = connect(HELLO, open_text(1)), [connect() for _ in range(5)]
    idle.append(connect(b'{"hel'))
    turns(server, 9)
    clock.now += HELLO_SECONDS - 0.1
    turns(server)
    assert not any(host.hear() or host.is_over for host in idle)
    clock.now += 0.2
    turns(server)
    assert not any(host.hear() for host in idle)
    assert all(host.is_over for host in idle)
    clock.now += 1e6
    turns(server)
    assert honest.told("grown")
    assert not honest.is_over


def test_the_server_wakes_up_to_close_them(server, connect, clock, monkeypatch):
    """With nothing else to do it would sleep for ever."""
    idle, waits = connect(), []
    server.turn(0.0)
    select = server._selector.select
    monkeypatch.setattr(
        server._selector, "select", lambda timeout: (waits.append(timeout), select(0))[1]
    )
    server.turn()
    clock.now += HELLO_SECONDS + 1
    server.turn(), server.turn()
    assert waits == [1.0, 1.0, None]
    idle.hear()
    assert idle.is_over


def test_no_more_hosts_than_a_limit(server, connect, clock, caplog):
    hosts = [connect(HELLO) for _ in range(MAX_PEERS)]
    turns(server, MAX_PEERS + 2)
    more = [connect(HELLO) for _ in range(3)]
    turns(server)
    assert all(host.hear() == [] and host.is_over for host in more)
    assert caplog.text.count(f"{MAX_PEERS} hosts are connected") == 1
    hosts[0].close()
    turns(server)
    another = connect(HELLO, open_text(1))
    turns(server)
    assert another.told("grown")


def test_no_file_descriptor_for_another_host(server, connect, clock, caplog):
    """The server goes on, does not spin, and welcomes hosts when there are descriptors again."""
    honest = connect(HELLO, open_text(1))
    turns(server)
    waiting = [connect(HELLO, open_text(2)) for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        assert len(taken) < 512
        turns(server)
        honest.say({"commit": [[1, 3, [40]]]})
        before = len(honest.told("grown"))
        turns(server)
        assert len(honest.told("grown")) > before
        while server.turn(0.0):
            pass
        began = time.perf_counter()
        server.turn(0.2)
        assert time.perf_counter() - began > 0.15, "it asks for the same host again and again"
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caplog.text.count("no more hosts for now") == 1
    assert not any(host.hear() for host in waiting)
    clock.now += PAUSE_SECONDS + 0.1
    turns(server, 20)
    assert all(host.told("grown") for host in waiting)


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO])
def test_a_host_that_is_gone_before_it_is_accepted(server, connect, monkeypatch, number):
    class Broken:
        def accept(self):
            raise OSError(number, os.strerror(number))

    connect()
    listener, server._listener = server._listener, Broken()
    turns(server, 2)
    server._listener = listener
    honest = connect(HELLO, open_text(1))
    turns(server)
    assert honest.told("grown")


def test_a_host_that_floods_has_its_turn_and_no_more(server, connect):
    """Each turn of the server takes a bounded part of what it says: an honest host is heard."""
    flood, honest = connect(HELLO), connect(HELLO)
    turns(server)
    flood.say(line({"close": [7]}) * 10_000)
    honest.say(open_text(1))
    began = server._growth.passes
    turns(server, 4)
    assert server._growth.passes > began
    assert honest.told("grown")
    turns(server, 60)
    flood.say(open_text(2))
    turns(server, 60)
    assert flood.told("grown")
    assert not flood.is_over


def test_a_host_that_does_not_read_is_cut_off(server, connect, monkeypatch):
    monkeypatch.setattr("outrider.drafters.ahead.connection.MAX_UNREAD", 4096)
    honest, deaf = connect(HELLO, open_text(1)), connect(HELLO)
    for n in range(60_000):
        if n > 9 and 2 not in server._peers:
            break
        deaf.say({"commit": [[key, 9, [1]] for key in range(256)]})
        server.turn(0.0)
    assert list(server._peers) == [1]
    assert not honest.told("unknown")


def test_tokens_beyond_the_vocabulary_are_no_fault(server, connect):
    """Targets may have more tokens than their draft models."""
    host = connect(HELLO, open_text(1, [1, V, 2**40]), open_text(2, logit_bias={str(V): 1.0}))
    turns(server)
    assert not host.told("left_out")
    assert {part[0] for part in host.told("grown")} == {2}


def test_a_ban_is_a_bias(server, connect):
    host = connect(HELLO, open_text(2, logit_bias={"4": float("-inf")}))
    turns(server)
    assert not host.told("left_out")
    assert all(4 not in part[4] for part in host.told("grown"))
