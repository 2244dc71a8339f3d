"""Both ends of a draft socket for tests: a server with a small model, a host, and a liar."""

from __future__ import annotations

import json
import socket

import torch

from outrider.core import KeyedCoins
from outrider.drafters.ahead import DraftServer
from outrider.drafters.ahead.messages import VERSION

V = 50
HELLO = {"hello": VERSION}


class Read:
    """How far a sequence was read."""

    def __init__(self, length=0):
        self.length = length


class SmallModel:
    """It says that the next token is the number of tokens so far. BAD fails, DEAF is not a number.

    read: tokens, of all passes
    """

    vocab_size, max_length = V, 1 << 20
    BAD, DEAF = V - 1, V - 2

    def __init__(self):
        self.read, self.num_open = [], 0

    def open(self):
        self.num_open += 1
        return Read()

    def fork(self, sequence):
        self.num_open += 1
        return Read(sequence.length)

    def close(self, sequence):
        self.num_open -= 1

    def adopt(self, sequence, branch, others):
        sequence.length = branch.length

    def extend(self, segments):
        logits = torch.zeros(len(segments), V)
        for row, (sequence, tokens) in zip(logits, segments, strict=True):
            if self.BAD in tokens:
                raise MemoryError("no room for it")
            self.read += tokens
            sequence.length += len(tokens)
            row[sequence.length % (V - 2)] = torch.nan if self.DEAF in tokens else 9.0
        return logits


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def small_server(path, clock=None, **options):
    return DraftServer(SmallModel(), KeyedCoins(), path, clock=clock or Clock(), **options)


def open_text(key, prompt=(1, 2, 3), **sampling):
    """Return what `open` says of a text."""
    return {"open": [[key, list(prompt), [], 0, sampling, []]]}


def line(message):
    return message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"


class Host:
    """A host that says what it is told to, and keeps all that it is told.

    heard: messages
    is_over: whether the server hung up
    """

    def __init__(self, path, *said):
        self.heard, self._rest, self.is_over = [], b"", False
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._socket.setblocking(False)
        self.say(*said)

    def say(self, *messages):
        """Send these, as far as the socket takes them."""
        try:
            for message in messages:
                self._socket.sendall(line(message))
        except OSError:
            pass

    def hear(self):
        """Return all messages so far."""
        try:
            while piece := self._socket.recv(1 << 20):
                self._rest += piece
            self.is_over = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True
        *lines, self._rest = self._rest.split(b"\n")
        self.heard += map(json.loads, lines)
        return self.heard

    def told(self, kind):
        """Return all parts of messages of a kind."""
        return [part for message in self.hear() for part in message.get(kind, ())]

    def close(self):
        self._socket.close()


class Liar:
    """Listens where a draft server should, in this thread. heard: what its hosts said"""

    def __init__(self, path):
        self.heard, self.hosts = [], []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)

    def say(self, *messages):
        """Say these to every host that is there."""
        try:
            while True:
                host = self._listener.accept()[0]
                host.setblocking(False)
                self.hosts.append(host)
        except BlockingIOError:
            pass
        for host in self.hosts:
            try:
                while piece := host.recv(1 << 20):
                    self.heard.append(piece)
            except OSError:
                pass
            try:
                for message in messages:
                    host.sendall(line(message))
            except OSError:
                pass

    def close(self):
        for sock in (self._listener, *self.hosts):
            sock.close()
