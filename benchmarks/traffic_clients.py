"""Clients of traffic.py: each sends a request, reads the stream to its end, and sends the next.

All clients share one thread, because a core is all that they and the server's HTTP have. Nothing is
parsed while requests run. A request needs two moments: when its first and its last tokens came.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "sglang"))
from paced.clock import now
from paced.texts import KINDS, VOCABULARY, Prompt, prompts

TOKENS = 32, 320
"""An answer's fewest and most."""

DATA, END = b"data: {", b"\r\n0\r\n\r\n"
PATIENCE = 120.0
"""Seconds without a byte from the server until the run is stopped."""


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are wanted."""

    prompt: Prompt
    tokens: int

    def body(self, stream_interval: int) -> dict[str, Any]:
        """Return what /generate gets."""
        params = {"temperature": 0, "max_new_tokens": self.tokens, "ignore_eos": True}
        params["stream_interval"] = stream_interval
        return {"input_ids": self.prompt.ids, "stream": True, "sampling_params": params}


@dataclass(frozen=True)
class Answer:
    """When an answer was asked for, began and ended, in seconds of one clock."""

    kind: str
    tokens: int
    sent: float
    first: float
    last: float


@dataclass(frozen=True)
class Traffic:
    """What clients saw.

    answers: whole ones, in the order in which they ended
    begun, ended: the window. All requests that were sent in it are among the answers.
    samples: what `sample` returned at both moments
    """

    answers: list[Answer]
    begun: float
    ended: float
    samples: tuple[Any, Any]


class WrongAnswer(Exception):
    """An answer that is not the recorded text."""


def sequence(seed: str, batch: int, kinds: Sequence[str] = KINDS) -> Callable[[int, int], Request]:
    """Return the request of a client by the client's number and the request's.

    Kind, length and text are the same for every server. Token ids are shifted: no two of 1,024
    requests have the same shift, so that no answer can be drafted from another one.
    """
    shifts = random.Random(seed).sample(range(VOCABULARY), VOCABULARY)

    def request(client: int, number: int) -> Request:
        rng = random.Random(f"{seed}, {client}, {number}")
        shift = shifts[(client + batch * number) % VOCABULARY]
        (prompt,) = prompts(rng.choice(kinds), 1, first=shift)
        return Request(prompt, min(rng.randint(*TOKENS), len(prompt.output)))

    return request


@dataclass
class _Client:
    """One connection, and the request that is under way on it."""

    number: int
    socket: socket.socket
    interval: int
    asked: int = 0
    request: Request | None = None
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    received: bytearray = field(default_factory=bytearray)

    def ask(self, request: Request) -> None:
        self.request, self.first, self.received = request, 0.0, bytearray()
        body = json.dumps(request.body(self.interval)).encode()
        head = "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        message = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self.asked += 1
        self.sent = now()
        self.socket.sendall(message)

    def listen(self) -> bool:
        """Take what has come. Return whether the answer has ended."""
        piece = self.socket.recv(1 << 18)
        moment = now()
        if not piece:
            raise ConnectionError(f"the server hung up after {bytes(self.received[-300:])!r}")
        self.received += piece
        if not self.first and DATA in self.received:
            self.first = self.last = moment
        if DATA in piece:
            self.last = moment
        return self.received.endswith(END)


def run_clients(
    port: int,
    batch: int,
    requests: Callable[[int, int], Request],
    ramp: float,
    seconds: float,
    sample: Callable[[], Any] = lambda: None,
    interval: int = 1,
) -> Traffic:
    """Let so many clients ask until each request that was sent in the window has its answer.

    All clients go on until then, so that the last answers of the window have company as all others
    do. What is under way at the end is given up.

    ramp: seconds before the window begins
    seconds: of the window
    sample: called when the window begins and when it ends
    interval: tokens in a chunk of a stream
    """
    finished: list[tuple[_Client, Answer, bytearray, Request]] = []
    clients = [
        _Client(number, socket.create_connection(("127.0.0.1", port)), interval)
        for number in range(batch)
    ]
    try:
        with selectors.DefaultSelector() as selector:
            start = now()
            for client in clients:
                client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(client.socket, selectors.EVENT_READ, client)
                client.ask(requests(client.number, 0))
            marks = [start + ramp, start + ramp + seconds]
            moments: list[float] = []
            samples: list[Any] = []
            while True:
                if len(moments) < 2 and now() >= marks[len(moments)]:
                    moments.append(now())
                    samples.append(sample())
                if len(moments) == 2 and all(client.sent >= moments[1] for client in clients):
                    break
                left = marks[len(moments)] - now() if len(moments) < 2 else PATIENCE
                ready = selector.select(max(0.0, min(left, PATIENCE)))
                if not ready and len(moments) == 2:
                    raise TimeoutError(f"nothing came from port {port} for {PATIENCE} s")
                for key, _ in ready:
                    client = key.data
                    if client.listen():
                        request = client.request
                        times = client.sent, client.first, client.last
                        answer = Answer(request.prompt.kind, request.tokens, *times)
                        finished.append((client, answer, client.received, request))
                        client.ask(requests(client.number, client.asked))
    finally:
        for client in clients:
            client.socket.close()
    for client, _, received, request in finished:
        check(bytes(received), request, is_whole=True, where=f"client {client.number}")
    for client in clients:
        where = f"client {client.number}"
        check(bytes(client.received), client.request, is_whole=False, where=where)
    answers = [answer for _, answer, *_ in finished]
    return Traffic(answers, *moments, (samples[0], samples[1]))


def check(received: bytes, request: Request, is_whole: bool, where: str) -> None:
    """Raise if what was received is not the recorded text, or no answer at all."""
    head, _, body = received.partition(b"\r\n\r\n")
    if head and not head.startswith(b"HTTP/1.1 200"):
        raise ConnectionError(f"{where}: {received[:500]!r}")
    ids = [token for event in events(body) for token in event["output_ids"]]
    wanted = request.prompt.output[: request.tokens]
    if ids != (wanted if is_whole else wanted[: len(ids)]):
        raise WrongAnswer(
            f"{where}: {request.prompt.kind}, {request.tokens} tokens, is not the recorded text. "
            "No speed is said."
        )


def events(body: bytes) -> Iterator[dict[str, Any]]:
    """Return what a stream said, of a body in HTTP's chunks that may have been cut off."""
    text = bytearray()
    while body:
        size, found, rest = body.partition(b"\r\n")
        if not found or len(rest) < int(size, 16) + 2:
            break
        text += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    for event in bytes(text).split(b"\n\n"):
        if event.startswith(DATA):
            said = json.loads(event[6:])
            if "error" in said or "output_ids" not in said:
                raise ConnectionError(f"the stream said {event[:500]!r}")
            yield said
