"""The HTTP client of every tool: whatever a server answers, a call ends in time and in memory.

It follows no redirect, uses no proxy from the environment and unpacks nothing, so the key and the
prompts go to the address that was given and nowhere else.
"""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ValidationError

from outrider.clients.base import base_url, shown_url
from outrider.errors import OTHER_FORM, Unsupported, UsageError

__all__ = ["Client", "Exchange", "Limits", "NoAnswer", "Response", "fault"]

CONNECT = 10.0
"""Seconds in which a server must accept a connection."""

HEADERS = 2**18
"""Bytes that status and headers may have."""

LONGEST = 300
"""Characters of a server's own words in a message."""


class NoAnswer(Unsupported):
    """No server answers, or its answer is cut off, too slow, too long, or not HTTP."""


@dataclass(frozen=True)
class Limits:
    """What one call may take.

    seconds: all of it, from connecting to the last byte
    silence: seconds between two pieces of it; None is no limit of its own
    size: bytes of a body, or of one line of a stream
    total: bytes of all lines of a stream
    """

    seconds: float = 20.0
    silence: float | None = None
    size: int = 8 * 2**20
    total: int = 64 * 2**20


Kind = TypeVar("Kind", bound=BaseModel)


@dataclass(frozen=True)
class Response:
    """A whole answer.

    source: where it comes from, for messages
    """

    status: int
    body: bytes
    source: str

    def parsed(self, kind: type[Kind], fix: str = "look into the server's log") -> Kind:
        """Return the JSON of the answer. Raises Unsupported if it does not fit the model."""
        try:
            return kind.model_validate_json(self.body)
        except ValidationError as error:
            said = f"what {self.source} answers cannot be read ({fault(error)})"
            raise Unsupported(said, fix=fix) from error

    @property
    def why(self) -> str:
        """What the server says is wrong, in one line."""
        try:
            found = json.loads(self.body[: 2**16])
            error = found.get("error", found) if isinstance(found, dict) else found
            text = error.get("message", error) if isinstance(error, dict) else error
        except (ValueError, RecursionError):
            text = self.body[: 4 * LONGEST].decode(errors="replace")
        return " ".join(str(text)[: 4 * LONGEST].split())[:LONGEST] or "it does not say why"


class Client:
    """Asks one server.

    shown: its address without user and password, for messages and reports
    start: what to do if no server answers
    """

    def __init__(self, url: str, start: str = "start it, or mend the address") -> None:
        parts = urlsplit(base_url(url))
        self.shown = shown_url(base_url(url))
        self._start = start
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = str(parts.hostname), parts.port or (443 if self._tls else 80)
        self._path = parts.path
        self._headers = {"Accept": "*/*", "Connection": "close"}
        if parts.username is not None or parts.password is not None:
            pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            encoded = base64.b64encode(pair.encode(errors="replace")).decode()
            self._headers["Authorization"] = f"Basic {encoded}"
        elif key := os.environ.get("OPENAI_API_KEY"):
            if not (key.isascii() and key.isprintable()):
                raise UsageError(
                    "OPENAI_API_KEY has characters that no header can carry", fix="mend the key"
                )
            self._headers["Authorization"] = f"Bearer {key}"
        self._open: set[Exchange] = set()
        self._lock = threading.Lock()

    def ask(self, path: str, body: Any = None, limits: Limits | None = None) -> Response:
        """Return the answer: of a GET, or of a POST if there is a body for it."""
        limits = limits or Limits()
        with self.open(path, body, limits) as exchange:
            return Response(exchange.status, exchange.read(), f"{self.shown}{path}")

    @contextmanager
    def open(self, path: str, body: Any, limits: Limits) -> Iterator[Exchange]:
        """Yield the answer, unread, of any status but those that concern the whole server.

        Raises NoAnswer if there is none, Unsupported for a redirect or a key that is missing.
        """
        exchange = Exchange(self.shown, limits)
        with self._lock:
            self._open.add(exchange)
        try:
            self._send(exchange, path, None if body is None else json.dumps(body).encode())
            yield exchange
        finally:
            with self._lock:
                self._open.discard(exchange)
            exchange.close()

    def hang_up(self) -> None:
        """End all calls that other threads wait for."""
        with self._lock:
            for exchange in self._open:
                exchange.hang_up()

    def _send(self, exchange: Exchange, path: str, body: bytes | None) -> None:
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        kind = HTTPSConnection if self._tls else HTTPConnection
        try:
            exchange.connect(self._host, self._port, self._tls)
            method = "GET" if body is None else "POST"
            exchange.send(kind(self._host, self._port), method, self._path + path, body, headers)
        except (OSError, HTTPException, *OTHER_FORM) as error:
            raise NoAnswer(
                f"no server answers at {self.shown} ({_reason(error)})", fix=self._start
            ) from error
        if exchange.status in (401, 403):
            raise Unsupported(f"{self.shown} wants a key", fix="set OPENAI_API_KEY to it")
        if 300 <= exchange.status < 400:
            raise Unsupported(
                f"{self.shown} redirects {path} to {exchange.location!r:.300}",
                fix="give the address of the server itself",
            )


class Exchange:
    """One request and what comes back for it.

    status: of HTTP
    sent: when the request was sent, on the clock of time.perf_counter
    location: where a redirect leads
    """

    def __init__(self, shown: str, limits: Limits) -> None:
        self.status, self.sent, self.location = 0, time.perf_counter(), ""
        self._shown, self._limits = shown, limits
        self._deadline = time.monotonic() + limits.seconds
        self._wire: _Wire | None = None
        self._reply: HTTPResponse | None = None
        self._read = 0
        self._over = False

    def connect(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Open the connection. Raises OSError if no address of the host accepts one."""
        until = min(self._deadline, time.monotonic() + CONNECT)
        last = OSError("it has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        ):
            plain = socket.socket(family, kind, protocol)
            try:
                plain.settimeout(_left(until))
                plain.connect(address)
                if tls is not None:
                    plain = tls.wrap_socket(plain, server_hostname=host)
            except OSError as error:
                plain.close()
                last = error
                continue
            self._wire = _Wire(plain, self._deadline, self._limits)
            if self._over:
                self.hang_up()
            return
        raise last

    def send(
        self,
        connection: HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> None:
        """Send a request, and read status and headers."""
        assert self._wire is not None
        # it takes what looks like a socket
        connection.sock = self._wire
        self.sent = time.perf_counter()
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        self._wire.room += 2 * max(self._limits.size, self._limits.total)
        self.status, self.location = reply.status, reply.getheader("Location") or ""
        self._reply = reply

    def read(self) -> bytes:
        """Return the whole body."""
        assert self._reply is not None
        with self._listening():
            body = self._reply.read(self._limits.size + 1)
            # read() of less says nothing if the server hung up early
            if len(body) <= self._limits.size and self._reply.length:
                raise OSError("cut off")
            return self._checked(body)

    def line(self) -> bytes:
        """Return the next line of a stream, b"" after the last one."""
        assert self._reply is not None
        with self._listening():
            line = self._reply.readline(self._limits.size + 1)
            self._read += len(line)
            if self._read > self._limits.total:
                raise OSError(f"more than {self._limits.total:,} bytes")
            return self._checked(line)

    def hang_up(self) -> None:
        """End the call from another thread, or before it is connected."""
        self._over = True
        if self._wire is not None:
            self._wire.hang_up()

    def close(self) -> None:
        """Close the connection."""
        if self._wire is not None:
            self._wire.end()

    def _checked(self, data: bytes) -> bytes:
        if len(data) > self._limits.size:
            raise OSError(f"more than {self._limits.size:,} bytes at once")
        return data

    @contextmanager
    def _listening(self) -> Iterator[None]:
        try:
            yield
        except (OSError, HTTPException, *OTHER_FORM) as error:
            raise NoAnswer(
                f"{self._shown} stopped answering ({_reason(error)})", fix="look into its log"
            ) from error


class _Wire:
    """A socket as http.client uses one, with a deadline and a limit for all that comes in.

    room: bytes that may still come
    """

    def __init__(self, plain: socket.socket, deadline: float, limits: Limits) -> None:
        self._plain, self._deadline, self._silence = plain, deadline, limits.silence
        self.room = HEADERS

    def sendall(self, data: Any) -> None:
        self._plain.settimeout(_left(self._deadline))
        self._plain.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Incoming(self))

    def receive(self, buffer: Any) -> int:
        left = _left(self._deadline)
        self._plain.settimeout(left if self._silence is None else min(left, self._silence))
        if self.room <= 0:
            raise OSError("too many bytes")
        count = self._plain.recv_into(memoryview(buffer)[: self.room])
        self.room -= count
        return count

    def close(self) -> None:
        """Leave it open: http.client closes it before the body is read."""

    def hang_up(self) -> None:
        with suppress(OSError):  # of TLS too: the thread that waits wakes up
            socket.socket.shutdown(self._plain, socket.SHUT_RDWR)

    def end(self) -> None:
        self._plain.close()


class _Incoming(io.RawIOBase):
    """The reading half of a wire."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._wire.receive(buffer)


def fault(error: ValidationError) -> str:
    """Return what is wrong with a document in a few words: there may be a million faults."""
    if (count := error.error_count()) > 100:
        return f"{count:,} faults"
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:LONGEST].removeprefix(": ")


def _left(deadline: float) -> float:
    """Return the seconds until a deadline. Raises TimeoutError after it."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left


def _reason(error: BaseException) -> str:
    return f"{error or type(error).__name__!s}"[:LONGEST]
