"""One end of a draft socket: lines of JSON, of bounded length, that are never waited for."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

MAX_MESSAGE = 8 * 2**20
"""Bytes of a message to a draft server."""

MAX_REPLY = 2**16
"""Bytes of a message from a draft server. All messages before `hello` are as short."""

MAX_UNREAD = 2 * MAX_MESSAGE
"""Bytes that wait for the other side to read what was sent before them."""

ENOUGH_UNREAD = 2**20
"""With as many bytes waiting, more texts are not sent yet."""

MAX_LINES = 256
"""Messages that are taken in at once. The others stay where they are until the next call."""


class Closed(Exception):
    """The other side has gone, or says what cannot be understood."""


class Gone(Closed):
    """The other side hung up: it may come back."""


class TooLong(Exception):
    """A message that the other side would not take."""


class Connection:
    """One end of a socket that never blocks.

    A side that does not read is taken for gone. One that says too much is read in part, and waits.

    longest: bytes of a message that is taken
    at_once: bytes that one call reads
    """

    def __init__(self, sock: socket.socket, longest: int, at_once: int) -> None:
        sock.setblocking(False)
        self.longest, self._at_once = longest, at_once
        self._socket = sock
        self._in, self._searched = bytearray(), 0
        self._out = bytearray()
        self._is_over = False

    def fileno(self) -> int:
        """Return the socket's number, for `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    @property
    def is_behind(self) -> bool:
        """Whether much of what was sent is not read yet."""
        return len(self._out) > ENOUGH_UNREAD

    @property
    def has_line(self) -> bool:
        """Whether there is a message that needs no reading from the socket."""
        return self._in.find(b"\n", self._searched) >= 0

    def send(self, message: Mapping[str, Any], longest: int = MAX_MESSAGE) -> None:
        """Send a line, as much of it as the socket takes now; the rest goes with `flush`.

        longest: raises TooLong if it has more bytes
        """
        line = json.dumps(message, separators=(",", ":")).encode()
        if len(line) > longest:
            raise TooLong(f"a message of {len(line)} bytes: no more than {longest} can be sent")
        self._out += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is left."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            if len(self._out) > MAX_UNREAD:
                raise Closed("it does not read what it is sent") from None
        except OSError as error:
            raise Gone(error.strerror or str(error)) from error

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield messages that have come: some of them, if there are many."""
        if not self.has_line:
            self._read()
        for _ in range(MAX_LINES):
            if (line := self._line()) is None:
                if self._is_over:
                    raise Gone("it hung up")
                return
            yield _message(line)

    def _read(self) -> None:
        room = self._at_once
        try:
            while room > 0:
                piece = self._socket.recv(min(room, 2**16))
                if not piece:
                    self._is_over = True
                    return
                self._in += piece
                room -= len(piece)
        except BlockingIOError:
            pass
        except ConnectionResetError as error:
            if self._is_over:
                raise Gone("it hung up") from error
            self._is_over = True
            self._read()  # the kernel says so once, and then gives what was said before
        except OSError as error:
            raise Gone(error.strerror or str(error)) from error

    def _line(self) -> bytes | None:
        """Take the next line off what was read; None if there is no whole one."""
        end = self._in.find(b"\n", self._searched)
        if max(end, len(self._in) if end < 0 else 0) > self.longest:
            raise Closed(f"a message of more than {self.longest} bytes")
        if end < 0:
            self._searched = len(self._in)
            return None
        line = bytes(self._in[:end])
        del self._in[: end + 1]
        self._searched = 0
        return line


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Closed(f"not JSON: {line[:40]!r}") from error
    if not isinstance(message, dict):
        raise Closed(f"not a message: {line[:40]!r}")
    return message
