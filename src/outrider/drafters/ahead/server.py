"""The draft server: one process, one draft model, the texts of all hosts that are connected.

It does two things in turn: take in what hosts say, and make one pass (`growth`). What a pass adds
to trees is sent at once, so that a host always has all there is, and never waits for more.

A text that cannot be drafted for is left out. A host that says what cannot be understood, does not
read, or has many such texts is cut off. The other texts and hosts do not notice. How many hosts,
texts, tokens and bytes there may be is bounded, and only processes of this user and root are heard.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.core import Coins
from outrider.drafters.ahead.access import check_user, listen
from outrider.drafters.ahead.connection import (
    MAX_MESSAGE,
    MAX_REPLY,
    Closed,
    Connection,
    Gone,
    TooLong,
)
from outrider.drafters.ahead.growth import BranchingModel, Growth
from outrider.drafters.ahead.messages import (
    FROM_HOST,
    MAX_TEXTS,
    VERSION,
    BadText,
    batches,
    check_message,
    commit_of,
    id_of,
    ids_of,
    request_of,
    said_growth,
)

logger = logging.getLogger(__name__)

MAX_PEERS = 32
"""Hosts that are connected at once."""

HELLO_SECONDS = 5.0
"""A connection that did not say hello within this time is closed."""

PAUSE_SECONDS = 1.0
"""Without file descriptors for more hosts, none is welcomed for this time."""

MAX_TOKENS, MAX_ALL_TOKENS = 2**22, 2**23
"""Tokens of all texts of one host, and of all hosts: about 40 bytes each, beside the cache."""

MAX_FAULTS = 16
"""Texts of one host that may fail in the draft model before it is cut off."""

AT_ONCE = 2**18
"""Bytes of a host that are read before others have their turn."""


@dataclass(eq=False)
class Peer:
    """A host that is connected.

    number: sets its texts apart from those of other hosts
    since: when it came, in seconds
    is_known: whether it said hello
    texts: how many tokens each has
    tokens: of all its texts
    faults: how many of its texts failed in the draft model
    has_bad_text: whether one was left out, which is said once
    """

    number: int
    connection: Connection
    since: float
    is_known: bool = False
    texts: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    faults: int = 0
    has_bad_text: bool = False


class DraftServer:
    """Serves draft trees on a Unix socket.

    model: reads the texts
    coins: of the targets
    path: of the socket, which only this user may open; None is `access.default_path`
    name: of the model, for hosts to show
    clock: returns seconds
    options: of `Growth`
    """

    def __init__(
        self,
        model: BranchingModel[Any],
        coins: Coins,
        path: str | Path | None = None,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        self._growth: Growth[tuple[int, int], Any] = Growth(model, coins, **options)
        self._vocab_size, self._max_length = model.vocab_size, model.max_length
        self._name, self._clock = name[:200], clock
        self._listener, self.path = listen(None if path is None else Path(path))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._peers: dict[int, Peer] = {}
        self._number = self._tokens = 0
        self._paused: float | None = None  # when no more hosts could be welcomed
        self._said: set[str] = set()

    def close(self) -> None:
        """Hang up on everyone and remove the socket."""
        for peer in list(self._peers.values()):
            self._cut_off(peer)
        self._selector.close()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def serve(self) -> None:
        """Serve until interrupted, in a process of its own.

        Trees have no cycles once they are dropped. A garbage collector that looks at all of their
        nodes now and then takes as long as the rest of a pass's host work.
        """
        gc.freeze()
        gc.set_threshold(50_000)
        while True:
            self.turn()

    def turn(self, timeout: float | None = None) -> bool:
        """Take in what was said, and make one pass. Return whether there was anything to read.

        timeout: seconds to wait if there is nothing to do; None waits for as long as it takes
        """
        grown = self._grow()
        behind = [peer for peer in self._peers.values() if peer.connection.has_line]
        if self._paused is not None or not all(peer.is_known for peer in self._peers.values()):
            timeout = min(1.0, 1.0 if timeout is None else timeout)
        ready = self._selector.select(0 if grown or behind else timeout)
        heard = {key.data: None for key, _ in ready if key.data is not None}
        for peer in dict.fromkeys([*behind, *heard]):
            self._hear(peer)
        self._hang_up_on_silent()
        if len(heard) < len(ready):
            self._welcome()
        return grown

    # -- texts

    def _grow(self) -> bool:
        growth, before = self._growth, self._growth.passes
        try:
            grown = growth.grow(owner=_peer_of)
        except Exception as error:
            logger.warning("a pass failed, and all texts are dropped: %s", error)
            self._forget(growth.names)
            return True
        added: dict[int, list[Any]] = {}
        for one in grown:
            number, key = one.key
            added.setdefault(number, []).append(said_growth(key, one))
        for number, mine in added.items():
            for batch in batches(mine):
                self._say(self._peers.get(number), {"grown": batch})
        for (number, key), why in growth.faulty.items():
            if (peer := self._peers.get(number)) is not None:
                self._leave_out(peer, key, why)
                peer.faults += 1
                if peer.faults > MAX_FAULTS:
                    self._cut_off(peer, f"{peer.faults} of its texts failed in the draft model")
        return growth.passes > before

    def _forget(self, keys: Sequence[tuple[int, int]]) -> None:
        """Drop texts, and tell their hosts, who may open them again."""
        gone: dict[int, list[int]] = {}
        for number, key in keys:
            gone.setdefault(number, []).append(key)
            self._close(self._peers[number], key)
        for number, mine in gone.items():
            self._say(self._peers.get(number), {"unknown": mine})

    def _leave_out(self, peer: Peer, key: int, why: str) -> None:
        """Drop a text, and tell its host not to open it again."""
        if not peer.has_bad_text:
            logger.warning("a text of host %d is left out: %s", peer.number, why)
        peer.has_bad_text = True
        self._close(peer, key)
        self._say(peer, {"left_out": [key]})

    def _close(self, peer: Peer, key: int) -> None:
        self._growth.close((peer.number, key))
        self._count(peer, key, -peer.texts.get(key, 0))
        peer.texts.pop(key, None)

    def _count(self, peer: Peer, key: int, more: int) -> None:
        """Take note of more tokens of a text. Raises BadText if there is no room for them."""
        peer_tokens, all_tokens = peer.tokens + more, self._tokens + more
        if more > 0 and (peer_tokens > MAX_TOKENS or all_tokens > MAX_ALL_TOKENS):
            raise BadText("all texts together have too many tokens")
        peer.tokens, self._tokens = peer_tokens, all_tokens
        peer.texts[key] = peer.texts.get(key, 0) + more

    def _open(self, peer: Peer, said: Any) -> None:
        key = id_of(said)
        self._close(peer, key)
        try:
            request = request_of(said, self._vocab_size)
            if request.length > self._max_length:
                raise BadText(f"the draft model reads no more than {self._max_length} tokens")
            if len(peer.texts) >= MAX_TEXTS:
                raise BadText(f"it has more than {MAX_TEXTS} texts")
            self._count(peer, key, request.length)
        except BadText as error:
            self._leave_out(peer, key, str(error))
        else:
            self._growth.open((peer.number, key), request)

    def _commit(self, peer: Peer, said: Any) -> bool:
        """Take in what was emitted. Return whether the text is lost: its host may open it again."""
        key = id_of(said)
        try:
            length, tokens = commit_of(said)
            if not tokens or peer.texts.get(key) != length:
                return True
            self._count(peer, key, len(tokens))
        except BadText as error:
            self._leave_out(peer, key, str(error))
        else:
            self._growth.commit((peer.number, key), tokens)
        return False

    # -- hosts

    def _welcome(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._say_once(f"no more hosts for now: {error.strerror}")
                self._selector.unregister(self._listener)
                self._paused = self._clock()
            return  # else it has gone already
        try:
            check_user(sock)
            if len(self._peers) >= MAX_PEERS:
                raise Closed(f"{MAX_PEERS} hosts are connected")
        except Closed as error:
            self._say_once(f"a host is not heard: {error}")
            sock.close()
            return
        self._number += 1
        connection = Connection(sock, MAX_REPLY, AT_ONCE)
        peer = self._peers[self._number] = Peer(self._number, connection, self._clock())
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _hang_up_on_silent(self) -> None:
        """Close connections that never said hello; welcome hosts again after a pause."""
        now = self._clock()
        for peer in list(self._peers.values()):
            if not peer.is_known and now - peer.since > HELLO_SECONDS:
                self._cut_off(peer)
        if self._paused is not None and now - self._paused > PAUSE_SECONDS:
            self._paused = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            logger.warning("%s", what)
        self._said.add(what)

    def _cut_off(self, peer: Peer, why: str = "") -> None:
        if self._peers.pop(peer.number, None) is None:
            return
        if why:
            logger.warning("host %d is cut off: %s", peer.number, why)
        self._selector.unregister(peer.connection)
        for key in list(peer.texts):
            self._close(peer, key)
        peer.connection.close()

    def _say(self, peer: Peer | None, message: dict[str, Any]) -> None:
        """Tell a host something, if it is still there."""
        if peer is not None and peer.number in self._peers:
            try:
                peer.connection.send(message, MAX_REPLY)
            except Gone:
                self._cut_off(peer)
            except (Closed, TooLong) as error:
                self._cut_off(peer, str(error))

    def _hear(self, peer: Peer) -> None:
        """Take in what a host says: what goes wrong ends its connection, and nothing else."""
        try:
            peer.connection.flush()
            for message in peer.connection.receive():
                self._take_in(peer, message)
                if peer.number not in self._peers:  # it was cut off for not reading
                    return
        except Gone:
            self._cut_off(peer)
        except Closed as error:
            self._cut_off(peer, str(error))
        except Exception as error:
            self._cut_off(peer, f"what it said failed here: {error!r:.200}")

    def _take_in(self, peer: Peer, message: dict[str, Any]) -> None:
        check_message(message, FROM_HOST)
        if "hello" in message:
            if message["hello"] != VERSION:
                why = f"protocol {message['hello']!r:.20}, here it is {VERSION}"
                with contextlib.suppress(Closed):
                    peer.connection.send({"refused": why})
                raise Closed(why)
            peer.is_known, peer.connection.longest = True, MAX_MESSAGE
            peer.connection.send({"hello": VERSION, "model": self._name})
        elif not peer.is_known:
            raise Closed("it did not say hello")
        for said in self._each(peer, message.get("open", ())):
            self._open(peer, said)
        commits = self._each(peer, message.get("commit", ()))
        lost = [said[0] for said in commits if self._commit(peer, said)]
        self._forget([(peer.number, key) for key in lost])
        for key in ids_of(message.get("close", ())):
            self._close(peer, key)

    def _each(self, peer: Peer, parts: Sequence[Any]) -> Iterator[Any]:
        """Yield the parts of a message, as long as the host is there to be answered."""
        for part in parts:
            yield part
            if peer.number not in self._peers:
                raise Gone("it does not read")


def _peer_of(key: tuple[int, int]) -> int:
    return key[0]
