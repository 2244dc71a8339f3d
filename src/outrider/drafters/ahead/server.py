"""The draft server: one process, one draft model, the texts of all hosts that are connected.

It does two things in turn: take in what hosts say, and make one pass (`growth`). What a pass adds
to trees is sent at once, so that a host always has all there is, and never waits for more.

A host that says what cannot be understood, or does not read, is cut off; the others do not notice.
A pass that fails drops all texts: their hosts open them again.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import selectors
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core import Coins
from outrider.drafters.ahead.growth import BranchingModel, Growth
from outrider.drafters.ahead.messages import (
    MAX_TEXTS,
    VERSION,
    Closed,
    Connection,
    check_ids,
    request_of,
    said_growth,
)
from outrider.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Peer:
    """A host that is connected.

    number: sets its texts apart from those of other hosts
    """

    number: int
    connection: Connection
    is_known: bool = False


class DraftServer:
    """Serves draft trees on a Unix socket.

    model: reads the texts
    coins: of the targets
    path: of the socket, which only this user may open
    name: of the model, for hosts to show
    options: of `Growth`
    """

    def __init__(
        self,
        model: BranchingModel[Any],
        coins: Coins,
        path: str | Path,
        name: str = "",
        **options: Any,
    ) -> None:
        self._growth: Growth[tuple[int, int], Any] = Growth(model, coins, **options)
        self._vocab_size, self._name = model.vocab_size, name
        self.path = Path(path)
        self._listener = _listen(self.path)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._peers: dict[int, Peer] = {}
        self._number = 0

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
        for key, _ in self._selector.select(0 if grown else timeout):
            if key.data is None:
                self._welcome()
            else:
                self._hear(key.data)
        return grown

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
            self._say(self._peers[number], {"grown": mine})
        return growth.passes > before

    def _forget(self, keys: Sequence[tuple[int, int]]) -> None:
        """Drop texts, and tell their hosts, who may open them again."""
        gone: dict[int, list[int]] = {}
        for number, key in keys:
            gone.setdefault(number, []).append(key)
            self._growth.close((number, key))
        for number, mine in gone.items():
            self._say(self._peers[number], {"unknown": mine})

    def _welcome(self) -> None:
        self._number += 1
        connection = Connection(self._listener.accept()[0])
        peer = self._peers[self._number] = Peer(self._number, connection)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _cut_off(self, peer: Peer, why: str = "") -> None:
        if self._peers.pop(peer.number, None) is None:
            return
        if why:
            logger.warning("host %d is cut off: %s", peer.number, why)
        self._selector.unregister(peer.connection)
        for key in self._growth.names:
            if key[0] == peer.number:
                self._growth.close(key)
        peer.connection.close()

    def _say(self, peer: Peer, message: dict[str, Any]) -> None:
        try:
            peer.connection.send(message)
        except Closed as error:
            self._cut_off(peer, str(error))

    def _hear(self, peer: Peer) -> None:
        try:
            peer.connection.flush()
            for message in peer.connection.receive():
                if peer.number not in self._peers:  # it was cut off for not reading
                    return
                self._take_in(peer, message)
        except Closed as error:
            self._cut_off(peer, "" if str(error) == "it hung up" else str(error))
        except (TypeError, ValueError, KeyError) as error:
            self._cut_off(peer, f"a message that cannot be understood: {error!r:.200}")

    def _take_in(self, peer: Peer, message: dict[str, Any]) -> None:
        growth, number = self._growth, peer.number
        if "hello" in message:
            if message["hello"] != VERSION:
                why = f"protocol {message['hello']!r:.20}, here it is {VERSION}"
                peer.connection.send({"refused": why})
                raise Closed(why)
            peer.is_known = True
            peer.connection.send({"hello": VERSION, "model": self._name})
        elif not peer.is_known:
            raise Closed("it did not say hello")
        for said in message.get("open", ()):
            request = request_of(said, self._vocab_size)
            if sum(key[0] == number for key in growth.names) < MAX_TEXTS:
                growth.open((number, request.id), request)
        lost = []
        for key, length, tokens in message.get("commit", ()):
            check_ids([key, length, *tokens])
            if tokens and growth.length((number, key)) == length:
                growth.commit((number, key), tokens)
            else:
                lost.append((number, key))
        self._forget(lost)
        check_ids(message.get("close", ()))
        for key in message.get("close", ()):
            growth.close((number, key))


def _peer_of(key: tuple[int, int]) -> int:
    return key[0]


def _listen(path: Path) -> socket.socket:
    """Return a socket at this path that only this user can open."""
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UsageError(f"{path} is there and no socket", fix="choose another path")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise UsageError(
                    f"a draft server listens at {path}", fix="stop it, or choose another path"
                )
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        why = error.strerror if error.errno != errno.ENAMETOOLONG else "its name is too long"
        raise UsageError(f"no socket at {path} ({why})", fix="choose another path") from error
    finally:
        os.umask(before)
    listener.listen()
    listener.setblocking(False)
    return listener
