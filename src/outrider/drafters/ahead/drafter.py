"""Drafts from a draft server: a step takes what has grown so far, and waits for no pass.

The host tells the server what was emitted, and finds in the socket what was added to trees. If the
server dies, hangs or talks nonsense, there are no drafts until it is back: a connection is tried
again every second, and requests are introduced anew.
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
from outrider.drafters.ahead.growth import Grown
from outrider.drafters.ahead.messages import (
    MAX_TEXTS,
    VERSION,
    Closed,
    Connection,
    growth_of,
    opened,
)

logger = logging.getLogger(__name__)

RETRY = 1.0
"""Seconds between two attempts to connect."""

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

    socket: the server's
    wait: the longest that a step may wait for trees, in seconds. Within it, a step waits for the
        next tree if that promises more tokens than the time costs. With 0 it never waits.
    clock: returns seconds

    counts: requests of steps, by what was there before any wait: `hit`, drafts; `miss`, the text
        went another way; `end`, it came to the end of its tree; `none`, there was no tree for it
    found: the same of each request of the last proposal
    waited: seconds
    """

    name = "ahead"

    def __init__(
        self,
        socket: str | Path,
        wait: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not wait >= 0:
            raise ValueError(f"wait must be >= 0 seconds, not {wait!r}")
        self._path, self._wait, self._clock = str(socket), wait, clock
        self._connection: Connection | None = None
        self._tried = -RETRY
        self._open: set[int] = set()
        self._trees: dict[int, AheadTree] = {}
        self.counts: Counter[str] = Counter()
        self.found: dict[int, str] = {}
        self.waited = 0.0
        self._is_silent = False  # it was waited for in vain, and has said nothing since
        self._is_missed = False  # that it is not there has been said
        self._observed: float | None = None
        self._tokens_per_second = 0.0
        self._reply_seconds = 0.0
        self._guesses: dict[int, int] = {}  # the first draft of each request
        self._first = FIRST  # how often it is right

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
        for key in gone:
            self._trees.pop(key, None)
        if gone:
            self._send({"close": gone})

    def close(self) -> None:
        """Hang up."""
        self._drop("")

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
        return bool(select.select([self._connection], [], [], seconds)[0])

    # -- the connection

    def _introduce(self, requests: Sequence[Request]) -> None:
        some = requests[: MAX_TEXTS - len(self._open)]
        if some and self._connect():
            self._open.update(request.id for request in some)
            self._send({"open": [opened(request) for request in some]})

    def _connect(self) -> bool:
        if self._connection is not None:
            return True
        now = self._clock()
        if now - self._tried < RETRY:
            return False
        self._tried = now
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except OSError as error:
            sock.close()
            self._miss(str(error))
            return False
        self._connection, self._is_silent = Connection(sock), False
        self._send({"hello": VERSION})
        return self._connection is not None

    def _send(self, message: dict[str, object]) -> None:
        if self._connection is not None:
            try:
                self._connection.send(message)
            except Closed as error:
                self._drop(str(error))

    def _receive(self) -> None:
        """Take in what the server has said. Nonsense ends the connection."""
        if self._connection is None:
            return
        try:
            self._connection.flush()
            for message in self._connection.receive():
                self._is_silent = False
                for said in message.get("grown", ()):
                    self._add(growth_of(said))
                for key in message.get("unknown", ()):
                    self._open.discard(key)
                    self._trees.pop(key, None)
                if "refused" in message:
                    raise Closed(f"it refuses: {message['refused']!r:.200}")
                if message.get("hello", VERSION) != VERSION:
                    raise Closed(f"it speaks version {message['hello']!r:.20}, not {VERSION}")
                self._is_missed = self._is_missed and "hello" not in message
        except (Closed, DraftFault, TypeError) as error:
            self._drop(str(error))

    def _add(self, grown: Grown) -> None:
        """Add to a tree. What follows its first node is where a tree begins."""
        if grown.parent == 0 and grown.key in self._open:
            self._trees[grown.key] = AheadTree(grown.began)
        tree = self._trees.get(grown.key)
        if tree is not None and tree.began == grown.began:
            tree.add(grown.parent, grown.first, grown.tokens, grown.sure)

    def _drop(self, why: str) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            if why:
                self._miss(why)
        self._connection = None
        self._tried = self._clock()
        self._open.clear()
        self._trees.clear()

    def _miss(self, why: str) -> None:
        """Say once that there is no draft server: it is tried again every second."""
        if not self._is_missed:
            logger.warning("no drafts from %s, until a draft server is there: %s", self._path, why)
        self._is_missed = True
