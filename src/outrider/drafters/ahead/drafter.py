"""Drafts from a draft server: a step takes what has grown so far, and waits for no pass.

The host tells the server what was emitted, and finds in the socket what was added to trees. If the
server dies or hangs, there are no drafts until it is back: a connection is tried again every
second, and requests are introduced anew. One that talks nonsense, refuses, or is another user's is
tried less and less often.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.core import (
    AheadTree,
    Budget,
    DraftFault,
    Outcome,
    Outcomes,
    Proposal,
    Request,
    chain,
)
from outrider.drafters.ahead.access import check_user, default_path
from outrider.drafters.ahead.connection import MAX_REPLY, Closed, Connection, Gone, TooLong
from outrider.drafters.ahead.growth import Grown
from outrider.drafters.ahead.messages import (
    FROM_SERVER,
    MAX_TEXTS,
    VERSION,
    check_message,
    growth_of,
    ids_of,
    opened,
)
from outrider.drafters.options import check_number

logger = logging.getLogger(__name__)

RETRY, LONGEST_RETRY = 1.0, 64.0
"""Seconds between two attempts to connect, and the most after faults: each doubles them."""

MAX_REOPENED = 8
"""How often a text is sent again that the server does not know."""

AT_ONCE = MAX_REPLY
"""Bytes that one look takes from the server: more must wait, so that steps do not."""

RATE = 0.1
"""Weight of a step in the moving averages of times."""

PATIENCE = 1.5
"""What a wait must promise, in tokens for those that its time costs. A draft that is not waited for
is not lost: it is made while the step runs."""

FIRST = 0.6
"""The chance that a first draft is right, before any was seen."""

NOTHING = chain(())


class AheadDrafter:
    """Takes drafts from a draft server on this machine: see `outrider draft-server`.

    socket: the server's; None is where it is by default, see `outrider draft-server`. A process of
        another user (but root) that listens there is told nothing.
    wait: the longest that a step may wait for trees, in seconds. Within it, a step waits for the
        next tree if that promises more tokens than the time costs. With 0 it never waits.
    clock: returns seconds

    counts: requests of steps, by what was there before any wait: `hit`, drafts; `miss`, the text
        went another way; `end`, it came to the end of its tree; `none`, there was no tree for it
    found: the same of each request of the last proposal
    left_out: texts that go without drafts: `too long` for a message, or `refused` by the server
    waited: seconds
    """

    name = "ahead"

    def __init__(
        self,
        socket: str | Path | None = None,
        wait: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._path = str(default_path() if socket is None else socket)
        self._wait, self._clock = check_number("wait", wait, 0), clock
        self._vocab_size = 1 << 63
        self._connection: Connection | None = None
        self._tried = -RETRY
        self._faults = 0  # connections in a row that came to nothing, or to nonsense
        self._is_useful = False  # the connection has brought drafts
        self._open: set[int] = set()
        self._shut: set[int] = set()  # texts that are left out
        self._lost: Counter[int] = Counter()  # how often the server did not know a text
        self._trees: dict[int, AheadTree] = {}
        self.counts: Counter[str] = Counter()
        self.found: dict[int, str] = {}
        self.left_out: Counter[str] = Counter()
        self.waited = 0.0
        self._is_silent = False  # it was waited for in vain, and has said nothing since
        self._is_missed = False  # that it is not there has been said
        self._observed: float | None = None
        self._tokens_per_second = 0.0
        self._reply_seconds = 0.0
        self._guesses: dict[int, int] = {}  # the first draft of each request
        self._first = FIRST  # how often it is right

    def limit_vocabulary(self, vocab_size: int) -> None:
        """Leave out drafts that the target does not know, instead of proposing them."""
        self._vocab_size = vocab_size

    # -- what a drafter does

    def start(self, requests: Sequence[Request]) -> None:
        """Introduce requests to the server."""
        if requests:
            self._observed = None  # their prompts were read
        self._introduce(requests)

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Return what the server has foreseen."""
        self._receive()
        self._introduce([r for r in requests if r.id not in self._open])
        found = self._look_up(requests)
        self.found = {r.id: kind for r, kind in zip(requests, found, strict=True)}
        self.counts.update(found)
        if self._wait:
            found = self._wait_for_more(requests, budget, found)
        drafts = [
            self._trees[request.id].best(most, budget.trees) if kind == "hit" else NOTHING
            for request, kind, most in zip(requests, found, budget.max_drafts.tolist(), strict=True)
        ]
        self._guesses = {
            r.id: draft.tokens[0] for r, draft in zip(requests, drafts, strict=True) if draft.tokens
        }
        return Proposal.of(drafts)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Tell the server what was emitted."""
        done, now = Outcomes.of(outcomes), self._clock()
        if self._observed is not None and now > self._observed:
            rate = len(done.tokens) / (now - self._observed)
            weight = RATE if self._tokens_per_second else 1.0
            self._tokens_per_second += weight * (rate - self._tokens_per_second)
        self._observed = now
        tokens, starts = done.tokens.tolist(), done.starts.tolist()
        for r, request in enumerate(done.requests):
            if (guess := self._guesses.get(request.id)) is not None:
                self._first += RATE * ((tokens[starts[r]] == guess) - self._first)
        commits = [
            [request.id, request.length, tokens[starts[r] : starts[r + 1]]]
            for r, request in enumerate(done.requests)
            if request.id in self._open
        ]
        if commits:
            self._send({"commit": commits})

    def meanwhile(self) -> None:
        """Read what the server has said: who does not read is taken for gone."""
        self._receive()

    def stop(self, requests: Sequence[Request]) -> None:
        """Let the server forget requests."""
        gone = [request.id for request in requests if request.id in self._open]
        self._open.difference_update(gone)
        for request in requests:
            self._shut.discard(request.id)
            self._lost.pop(request.id, None)
        for key in gone:
            self._trees.pop(key, None)
        if gone:
            self._send({"close": gone})

    def close(self) -> None:
        """Hang up."""
        self._drop()

    # -- trees

    def _look_up(self, requests: Sequence[Request]) -> list[str]:
        """Follow each request's text down its tree. Return what is there: see `counts`."""
        found: list[str] = []
        for request in requests:
            tree = self._trees.get(request.id)
            if tree is None or tree.length > request.length:
                found.append("none")
            elif not tree.follow(request.tokens_from(tree.length)):
                found.append("miss")
            else:
                found.append("end" if tree.is_leaf else "hit")
        return found

    def _wait_for_more(
        self, requests: Sequence[Request], budget: Budget, found: list[str]
    ) -> list[str]:
        """Wait for the next trees as long as these promise more tokens than the time costs."""
        began = self._clock()
        last, deadline = began, began + self._wait
        while self._connection is not None and not self._is_silent:
            gain = sum(
                self._frontier(request, kind, int(most))
                for request, kind, most in zip(requests, found, budget.max_drafts, strict=True)
                if request.id in self._open  # the server may drop a text while we wait
            )
            if gain <= PATIENCE * self._tokens_per_second * self._reply_seconds:
                break
            if not self._await(max(0.0, deadline - self._clock())):
                self._is_silent = True
                break
            now = self._clock()
            self._receive()
            weight = RATE if self._reply_seconds else 1.0
            self._reply_seconds += weight * (now - last - self._reply_seconds)
            last, found = now, self._look_up(requests)
            if now >= deadline:
                break
        self.waited += self._clock() - began
        return found

    def _frontier(self, request: Request, found: str, most: int) -> float:
        """Return the chance that one more draft, after the likeliest ones, would be accepted."""
        if most == 0:
            return 0.0
        if found != "hit":
            return self._first
        likely = self._trees[request.id].best(most, trees=False)
        return 0.0 if len(likely.tokens) >= most else math.prod(likely.sure)

    def _await(self, seconds: float) -> bool:
        """Wait until the server says something. Return whether it did within this time."""
        assert self._connection is not None
        if self._connection.has_line:
            return True
        poll = select.poll()  # `select` cannot take the numbers of a process with many files
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    # -- the connection

    def _introduce(self, requests: Sequence[Request]) -> None:
        """Send texts, as many as the server takes; the others may be sent with the next step."""
        if not requests or not self._connect():
            return
        for request in requests:
            connection = self._connection
            if connection is None or connection.is_behind or len(self._open) >= MAX_TEXTS:
                return
            if request.id in self._shut:
                continue
            self._open.add(request.id)
            if self._lost[request.id] > MAX_REOPENED:
                self._shut_out([request.id], "refused")
                continue
            try:
                self._send({"open": [opened(request)]})
            except TooLong:
                self._shut_out([request.id], "too long")

    def _shut_out(self, keys: Sequence[int], why: str) -> None:
        """Leave texts out as long as they run on this connection."""
        for key in self._open.intersection(keys):
            self.left_out[why] += 1
            self._open.discard(key)
            self._shut.add(key)
            self._trees.pop(key, None)

    def _connect(self) -> bool:
        if self._connection is not None:
            return True
        now = self._clock()
        if now - self._tried < min(RETRY * 2 ** min(max(0, self._faults - 1), 9), LONGEST_RETRY):
            return False
        self._tried = now
        try:
            self._connection = Connection(self._connected(), MAX_REPLY, AT_ONCE)
        except (OSError, ValueError, Closed) as error:
            self._faults += isinstance(error, Closed)
            self._miss(str(error))
            return False
        self._is_silent = self._is_useful = False
        self._send({"hello": VERSION})
        return self._connection is not None

    def _connected(self) -> socket.socket:
        """Return a socket at whose other end a process of our own user, or root's, is."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
            check_user(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def _send(self, message: dict[str, object]) -> None:
        if self._connection is not None:
            try:
                self._connection.send(message)
            except Closed as error:
                self._drop(error)

    def _receive(self) -> None:
        """Take in what the server has said. Nonsense ends the connection."""
        if self._connection is None:
            return
        try:
            self._connection.flush()
            for message in self._connection.receive():
                self._take_in(message)
        except (Closed, DraftFault) as error:
            self._drop(error)

    def _take_in(self, message: dict[str, Any]) -> None:
        check_message(message, FROM_SERVER)
        self._is_silent = False
        for said in message.get("grown", ()):
            self._add(growth_of(said))
        for key in ids_of(message.get("unknown", ())):
            if key in self._open:
                self._lost[key] += 1
                self._open.discard(key)
                self._trees.pop(key, None)
        self._shut_out(ids_of(message.get("left_out", ())), "refused")
        if "refused" in message:
            raise Closed(f"it refuses: {message['refused']!r:.200}")
        if message.get("hello", VERSION) != VERSION:
            raise Closed(f"it speaks version {message['hello']!r:.20}, not {VERSION}")

    def _add(self, grown: Grown) -> None:
        """Add to a tree. What follows its first node is where a tree begins."""
        if grown.parent == 0 and grown.key in self._open:
            self._trees[grown.key] = AheadTree(grown.began, self._vocab_size)
            self._is_useful = True
            self._is_missed = self._is_missed and self._faults > 0
        tree = self._trees.get(grown.key)
        if tree is not None and tree.began == grown.began:
            tree.add(grown.parent, grown.first, grown.tokens, grown.sure)

    def _drop(self, why: Exception | None = None) -> None:
        """Hang up. why: the server's fault, if there was one"""
        now = self._clock()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            if self._is_useful and (isinstance(why, Gone) or now - self._tried > LONGEST_RETRY):
                self._faults, self._is_missed = 0, False
            if why is not None:
                self._faults += not (self._is_useful and isinstance(why, Gone))
                self._miss(str(why))
        self._connection = None
        self._tried = now
        self._open.clear()
        self._shut.clear()
        self._lost.clear()
        self._trees.clear()

    def _miss(self, why: str) -> None:
        """Say once that there is no draft server."""
        if not self._is_missed:
            logger.warning("no drafts from %s, until a draft server is there: %s", self._path, why)
        self._is_missed = True
