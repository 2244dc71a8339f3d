"""The draft server and its drafter: same tokens whatever the server does, and no waiting for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import zip_longest

import pytest

import outrider
from outrider.core import KeyedCoins, Request, SamplingParams
from outrider.drafters import AheadDrafter
from outrider.drafters.ahead import DraftServer, messages
from outrider.drafters.ahead.connection import Closed, Connection
from outrider.drafters.ahead.messages import VERSION
from outrider.engines.transformers.runner import Runner
from outrider.errors import UsageError

PROMPTS = [[1, 40, 7, 22, 9], [1, 15, 33], [1, 60, 61, 62, 63, 64, 65]]
SAMPLING = [
    {"max_tokens": 48},
    {"max_tokens": 40, "temperature": 1.0, "seed": 5},
    {"max_tokens": 44, "temperature": 0.7, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.1},
]


@pytest.fixture(scope="module")
def target(load):
    return load("tiny-target")


@pytest.fixture(scope="module")
def expected(target):
    return outrider.generate(target, PROMPTS, sampling=SAMPLING, max_drafts=0).outputs


@pytest.fixture
def path(tmp_path):
    return tmp_path / "draft.sock"


@pytest.fixture
def server(load, path):
    """A draft server that takes a turn when it is told to."""
    server = DraftServer(Runner(load("tiny-draft")), KeyedCoins(), path, name="tiny")
    yield server
    server.close()


@pytest.fixture
def serving(server):
    """A draft server in a thread."""
    over = threading.Event()

    def serve():
        while not over.is_set():
            server.turn(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    yield server
    over.set()
    thread.join()


class Driven(AheadDrafter):
    """A drafter whose server takes six turns before each step: no thread, and no clock."""

    def __init__(self, server):
        super().__init__(server.path)
        self.server = server

    def propose(self, requests, budget):
        for _ in range(6):
            self.server.turn(0.0)
        return super().propose(requests, budget)


def generate(target, drafter, **more):
    return outrider.generate(target, PROMPTS, sampling=SAMPLING, drafter=drafter, **more)


def test_same_tokens_and_drafts_are_foreseen(target, expected, server):
    drafter = Driven(server)
    done = generate(target, drafter)
    assert done.outputs == expected
    assert drafter.counts["hit"] > 0, drafter.counts
    assert done.stats.accepted > 20


def test_same_tokens_at_any_pace(target, expected, serving, path):
    drafter = AheadDrafter(path, wait=0.5)
    assert generate(target, drafter).outputs == expected
    assert sum(drafter.counts.values()) > 0
    drafter.close()


def test_under_control(target, expected, serving, path):
    adaptive = outrider.adaptive(target, ahead=path)
    assert generate(target, adaptive).outputs == expected


def test_a_missing_server_is_said_once(target, path, caplog, monkeypatch):
    monkeypatch.setattr("outrider.drafters.ahead.drafter.RETRY", 0.0)
    generate(target, AheadDrafter(path))
    said = [record for record in caplog.records if str(path) in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]


def test_no_server_costs_nothing(target, expected, path):
    began = time.perf_counter()
    drafter = AheadDrafter(path, wait=10.0)
    done = generate(target, drafter)
    assert done.outputs == expected
    assert drafter.waited < 1.0
    assert set(drafter.counts) == {"none"}
    assert time.perf_counter() - began < 60


class Impostor(threading.Thread):
    """Listens like a draft server, and says what it likes."""

    def __init__(self, path, lines):
        super().__init__(daemon=True)
        self.lines, self.heard = lines, 0
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.start()

    def run(self):
        while True:
            peer, _ = self.listener.accept()
            self.heard += 1
            try:
                while peer.recv(65536):
                    for line in self.lines:
                        peer.sendall(line)
            except OSError:
                pass


GARBAGE = {
    "bytes": [b"\xff\xfe\x00 what\n"],
    "no message": [b"[1, 2]\n"],
    "deep": [b"[" * 100_000 + b"\n"],
    "another version": [b'{"hello": 99}\n'],
    "refuses": [b'{"refused": "go away"}\n'],
    "no node": [b'{"grown": [[0, 5, 7, 8, [1], [0.5]]]}\n'],
    "too few": [b'{"grown": [[0, 5, 0, 1, [1, 2], [0.5]]]}\n'],
    "not all": [b'{"grown": [[0, 5, 0]]}\n'],
    "no numbers": [b'{"grown": [["a", null, {}, 3, "x", 0]]}\n'],
    "grown of nothing": [b'{"grown": 7}\n'],
    "unknown of lists": [b'{"unknown": [[1]]}\n'],
    "sure of it": [b'{"grown": [[0, 5, 0, 1, [1], [1e999]]]}\n'],
}


@pytest.mark.parametrize("lines", GARBAGE.values(), ids=GARBAGE)
def test_garbage_costs_speed_only(target, expected, path, lines):
    Impostor(path, lines)
    drafter = AheadDrafter(path, wait=0.05)
    assert generate(target, drafter).outputs == expected
    assert drafter.counts["hit"] == 0


def test_drafts_beyond_the_vocabulary_are_counted(target, expected, path):
    length = len(PROMPTS[0])
    trees = [[0, length + n, 0, 1, [10**6], [1.0]] for n in range(48)]
    Impostor(path, [json.dumps({"grown": [tree]}).encode() + b"\n" for tree in trees])
    done = generate(target, AheadDrafter(path, wait=0.05))
    assert done.outputs == expected


def test_a_server_that_says_nothing_is_waited_for_once(target, expected, path):
    impostor = Impostor(path, [])
    drafter = AheadDrafter(path, wait=0.3)
    assert generate(target, drafter).outputs == expected
    assert impostor.heard == 1
    assert drafter.waited < 0.6, drafter.waited


def _talk(connection):
    for _ in range(200):
        connection.send({"commit": ["x" * 10_000]})


def test_who_does_not_read_is_left(monkeypatch):
    monkeypatch.setattr("outrider.drafters.ahead.connection.MAX_UNREAD", 1 << 20)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    connection = Connection(ours, 1 << 16, 1 << 16)
    with pytest.raises(Closed, match="does not read"):
        _talk(connection)
    theirs.close()
    with pytest.raises(Closed):
        connection.flush()
    connection.close()


HELLO = {"hello": VERSION}
NONSENSE = {
    "not JSON": b"nonsense\n",
    "no hello": {"open": [[0, [1], [], 0, {}, []]]},
    "open of nothing": HELLO | {"open": 5},
    "open without an id": HELLO | {"open": [[[], [1], [], 0, {}, []]]},
    "an unknown key": HELLO | {"grow": []},
    "nothing": {},
    "an id that is none": HELLO | {"commit": [[{}, 1, [1]]]},
    "another version": {"hello": 1},
    "close of nothing": HELLO | {"close": [{}]},
    "too many texts": HELLO | {"close": [*range(257)]},
    "a long greeting": b" " * 70_000,
    "a huge number": b'{"hello": 1' + b"0" * 5000 + b"}\n",
    "deep": b"[" * 60_000 + b"\n",
}


def line(message):
    return message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"


def cut_off(peer):
    """Read until the server hangs up. Return whether it does."""
    try:
        while peer.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_hosts_that_talk_nonsense_are_cut_off_alone(target, expected, server, path):
    for kind, said in NONSENSE.items():
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10)
            peer.connect(str(path))
            peer.sendall(line(said))
            for _ in range(3):
                server.turn(0.0)
            assert cut_off(peer), kind
    done = generate(target, Driven(server))
    assert done.outputs == expected
    assert done.stats.accepted > 20


def test_a_host_that_is_gone_before_it_is_welcomed(target, server, path):
    """It has opened a text, but cannot be told hello: nothing of it stays."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(str(path))
        peer.shutdown(socket.SHUT_RD)
        opened = {"open": [[4, [1, 2], [], 0, {}, []]]}
        peer.sendall(line(HELLO | opened) + line(opened))
        drafter = Driven(server)
        assert generate(target, drafter).stats.accepted > 20
        drafter.close()
        server.turn(0.0)
    assert server._growth.names == []


def test_a_commit_that_does_not_fit_asks_for_the_text_again(serving, path):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30)
        peer.connect(str(path))
        peer.sendall(line(HELLO | {"open": [[4, [1, 2], [], 0, {}, []]]}))
        peer.sendall(b'{"commit": [[4, 3, [5]]]}\n')
        heard = b""
        while b"unknown" not in heard:
            heard += peer.recv(4096)
    assert b'{"unknown":[4]}' in heard


def test_no_more_texts_are_opened_than_the_server_takes(target, expected, server, monkeypatch):
    opened = []

    def note(request):
        opened.append(request.id)
        return messages.opened(request)

    monkeypatch.setattr("outrider.drafters.ahead.drafter.MAX_TEXTS", 2)
    monkeypatch.setattr("outrider.drafters.ahead.server.MAX_TEXTS", 2)
    monkeypatch.setattr("outrider.drafters.ahead.drafter.opened", note)
    drafter = Driven(server)
    assert generate(target, drafter).outputs == expected
    assert drafter.counts["hit"] > 0 < drafter.counts["none"]
    assert len(opened) == len(set(opened)) >= 2, "each text is sent once"


def test_who_asks_for_no_drafts_reads_all_the_same(server):
    """A host may be told to go without drafts for long; trees must not pile up."""
    drafter, (request,) = Driven(server), [Request(7, (1, 2, 3), SamplingParams(), 0)]
    drafter.start([request])
    for _ in range(6):
        server.turn(0.0)
    assert not drafter._trees
    drafter.meanwhile()
    assert drafter._trees.keys() == {7}


def test_a_pass_that_fails_drops_texts_and_goes_on(target, expected, server, monkeypatch):
    growth, calls = server._growth, [0]
    grow = growth.grow

    def sometimes(owner=None):
        calls[0] += 1
        if calls[0] % 7 == 0 and growth.names:
            raise RuntimeError("no memory")
        return grow(owner)

    monkeypatch.setattr(growth, "grow", sometimes)
    done = generate(target, Driven(server))
    assert done.outputs == expected
    assert done.stats.accepted > 5
    assert calls[0] > 14


def test_two_hosts_at_once(target, expected, server):
    runs = [
        outrider.stream(target, PROMPTS, sampling=SAMPLING, drafter=Driven(server))
        for _ in range(2)
    ]
    for _ in zip_longest(*runs):  # a step of each in turn
        pass
    assert [run.result.outputs for run in runs] == [expected, expected]
    assert all(run.result.stats.accepted > 20 for run in runs)


def test_only_its_user_can_open_the_socket(server, path):
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="a draft server listens"):
        DraftServer(server._growth._model, KeyedCoins(), path)


def test_a_path_that_cannot_be_had(load, tmp_path):
    runner = Runner(load("tiny-draft"))
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "none" / "x.sock", tmp_path / ("x" * 200)):
        with pytest.raises(UsageError):
            DraftServer(runner, KeyedCoins(), path)


class Command:
    """`outrider draft-server` in a process of its own."""

    def __init__(self, model, path):
        command = [sys.executable, "-m", "outrider", "draft-server", str(model)]
        self.process = subprocess.Popen(
            [*command, "--socket", str(path), "--threads", "1"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert "draft server:" in self.process.stdout.readline()

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.process.wait(30)


def test_killed_stopped_and_restarted_while_a_text_is_written(
    target, expected, model_dir, path, monkeypatch
):
    monkeypatch.setattr("outrider.drafters.ahead.drafter.RETRY", 0.0)
    model = model_dir("tiny-draft")
    # on a clock that stands still, waiting costs nothing
    server, drafter = Command(model, path), AheadDrafter(path, wait=3.0, clock=lambda: 0.0)
    run = outrider.stream(target, PROMPTS, sampling=SAMPLING, drafter=drafter, max_drafts=2)
    accepted = []
    for n, _ in enumerate(run):
        if n in (4, 11, 20):
            accepted.append(run.result.stats.accepted)
        if n == 4:
            server.stop(signal.SIGKILL)
        if n == 7:
            server = Command(model, path)  # over the dead one's socket
        if n == 11:
            server.process.send_signal(signal.SIGSTOP)
        if n == 14:
            server.process.send_signal(signal.SIGCONT)
            while drafter._is_silent:
                drafter._receive()
    assert run.result.outputs == expected
    assert 0 < accepted[0] < accepted[1] < accepted[2], accepted
    done = generate(target, drafter)
    assert done.outputs == expected
    assert server.stop() == 0
    assert not path.exists()
