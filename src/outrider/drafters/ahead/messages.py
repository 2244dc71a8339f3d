"""What a host and a draft server say to each other: lines of JSON over a Unix socket.

From the host, each with what it is about:

    {"hello": VERSION}                                 the first line
    {"open": [[id, prompt, output, seed, sampling, eos], ...]}
    {"commit": [[id, length, tokens], ...]}            length: before these tokens
    {"close": [id, ...]}

From the draft server:

    {"hello": VERSION, "model": NAME}
    {"grown": [[id, began, parent, first, tokens, sure], ...]}    see `Grown`
    {"unknown": [id, ...]}                             it has no such text: open it again
    {"refused": WHY}                                   the last line

Nothing but token ids and numbers crosses the boundary: no code, no logits. Ids are those of the
connection: two hosts may use the same.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.core import DraftFault, Request, SamplingParams
from outrider.drafters.ahead.growth import Grown

VERSION = 2
MAX_LINE = 16 * 2**20
"""A longer line is taken for garbage."""

MAX_TEXTS = 256
"""Texts of one host. It opens no more, and goes without drafts for others."""

SENT = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)
"""Sampling parameters that shape the distribution. A grammar is a function and stays at home."""

MAX_CHILDREN = 1024
"""Tokens that may follow a node."""

USUAL = asdict(SamplingParams())


class Closed(Exception):
    """The other side has gone, or says what cannot be understood."""


class Connection:
    """One end of a socket that never blocks.

    A side that does not read is taken for gone: what it has not read is bounded by the socket's
    buffer and MAX_LINE.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._in = bytearray()
        self._out = bytearray()

    def fileno(self) -> int:
        """Return the socket's number, for `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a line, as much of it as the socket takes now; the rest goes with `flush`."""
        self._out += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is left."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            if len(self._out) > MAX_LINE:
                raise Closed("it does not read what it is sent") from None
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that have come."""
        try:
            while True:
                piece = self._socket.recv(65536)
                if not piece:
                    raise Closed("it hung up")
                self._in += piece
                if len(self._in) > MAX_LINE:
                    raise Closed("a line without an end")
        except BlockingIOError:
            pass
        except OSError as error:
            raise Closed(str(error)) from error
        *lines, rest = self._in.split(b"\n")
        self._in = bytearray(rest)
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise Closed(f"not JSON: {bytes(line[:40])!r}") from error
            if not isinstance(message, dict):
                raise Closed(f"not a message: {bytes(line[:40])!r}")
            yield message


def opened(request: Request) -> list[Any]:
    """Return what `open` says of a request."""
    sampling = request.sampling
    said = {name: getattr(sampling, name) for name in SENT}
    said["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    changed = {name: value for name, value in said.items() if value != USUAL[name]}
    ends = [] if sampling.ignore_eos else sorted(request.eos_token_ids)
    prompt, output = list(request.prompt), list(request.output)
    return [request.id, prompt, output, request.seed, changed, ends]


def request_of(said: Any, vocab_size: int) -> Request:
    """Return the request that `open` tells of. Raises Closed if it is none.

    vocab_size: of the draft model
    """
    try:
        key, prompt, output, seed, sampling, ends = said
        if set(sampling) - set(SENT):
            raise ValueError("a sampling parameter that is not known")
        bias = {int(token): value for token, value in sampling.get("logit_bias", {}).items()}
        # -inf comes as a number of JSON's, and a token beyond the vocabulary has no logit
        bias = {token: value for token, value in bias.items() if token < vocab_size}
        params = SamplingParams(**{**sampling, "logit_bias": bias})
        check_ids([key, seed])
        check_ids([*prompt, *output, *ends])
        return Request(key, tuple(prompt), params, seed, frozenset(ends), output=list(output))
    except (TypeError, ValueError, AttributeError) as error:
        raise Closed(f"an open that is none: {error}") from error


def check_ids(ids: Sequence[Any]) -> None:
    """Raise ValueError unless these are whole numbers in [0, 2**63)."""
    if not all(type(token) is int and 0 <= token < 2**63 for token in ids):
        raise ValueError("ids that are none")


def said_growth(key: int, grown: Grown) -> list[Any]:
    """Return what `grown` says of an addition to a text's tree."""
    return [key, *grown[1:5], [round(chance, 4) for chance in grown.sure]]


def growth_of(said: Any) -> Grown:
    """Return the addition that `grown` tells of. Raises DraftFault if it is none."""
    try:
        grown = Grown(*said)
        check_ids([*grown[:4], *grown.tokens])
        fits = len(grown.tokens) == len(grown.sure) <= MAX_CHILDREN
        if not fits or not all(0 <= float(chance) <= 1 for chance in grown.sure):
            raise ValueError("tokens and how sure they are")
    except (TypeError, ValueError) as error:
        raise DraftFault(f"an addition to a tree that is none: {error}") from error
    return grown
