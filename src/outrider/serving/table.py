"""The table of requests that are being decoded: one state for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any, NamedTuple

from outrider.serving.pool import Pool
from outrider.serving.values import Columns, Describe, Launched, PrefillLaunch, ServedRequest


class FirstToken(NamedTuple):
    """The token that follows a prompt, which the engine may not have appended yet.

    length: of the request before the token
    """

    req: Any
    length: int
    token: int


class RequestTable:
    """The requests that are being decoded. New ones are started in the pool, ended ones stopped.

    describe: makes the state of an engine's request
    columns: of the requests of the last batch
    """

    def __init__(self, describe: Describe, pool: Pool) -> None:
        self._describe, self._pool = describe, pool
        self._live: dict[str, ServedRequest] = {}
        self._started: set[str] = set()  # those that the drafters know
        self._first: dict[str, FirstToken] = {}
        self._ids = count()
        self._reqs: list[Any] = []  # the engine's requests of the last batch
        self._requests: list[ServedRequest] = []
        self.columns = Columns.of(())

    def __len__(self) -> int:
        return len(self._live)

    def note_first_tokens(self, launch: PrefillLaunch, tokens: Sequence[int]) -> None:
        """Note the tokens that a prefill has emitted."""
        self._first = {rid: f for rid, f in self._first.items() if not f.req.finished()}
        for req, length, token in zip(launch.reqs, launch.lengths, tokens, strict=True):
            self._first[req.rid] = FirstToken(req, length, token)

    def sync(
        self, reqs: Sequence[Any], in_flight: Collection[Launched | PrefillLaunch] = ()
    ) -> list[ServedRequest]:
        """Return the state of these requests. Add new ones and drop those that have left the batch.

        The list is the same one as long as the requests are.

        in_flight: steps that were launched: requests in them are not dropped yet. New requests
            whose first token is not known are started by `complete`
        """
        if reqs == self._reqs:  # as nearly always
            return self._requests
        prefills = [step for step in in_flight if isinstance(step, PrefillLaunch)]
        decodes = [step for step in in_flight if isinstance(step, Launched)]
        reading = {req.rid for step in prefills for req in step.reqs}
        decoding = {request.req.rid for step in decodes for request in step.requests}
        present = {req.rid for req in reqs}
        self.drop([rid for rid in self._live if rid not in present and rid not in decoding])
        new = [self._add(req) for req in reqs if req.rid not in self._live]
        self._start([live for live in new if live.req.rid not in reading])
        self._reqs, self._requests = list(reqs), [self._live[req.rid] for req in reqs]
        self.columns = Columns.of(self._requests)
        return self._requests

    def complete(self, requests: Sequence[ServedRequest]) -> None:
        """Give new ones of these requests their first token, and introduce them to the drafters."""
        if len(self._started) < len(self._live):
            new = [live for live in requests if live.req.rid not in self._started]
            for live in new:
                first = self._first.get(live.req.rid)
                if first is not None and live.length == first.length:
                    live.output.append(first.token)
                elif len(live.output) < len(live.req.output_ids):
                    live.output[:] = live.req.output_ids
            self._start(new)
        for request in requests if self._first else ():
            self._first.pop(request.req.rid, None)

    def drop(self, rids: Sequence[str]) -> None:
        """Drop those of these requests that are in the table, from the drafters too."""
        gone = [self._live.pop(rid) for rid in rids if rid in self._live]
        if gone:
            self._reqs = []
            started = [live for live in gone if live.req.rid in self._started]
            self._started.difference_update(live.req.rid for live in started)
            self._pool.stop(started)

    def drop_ended(self) -> None:
        """Drop the requests that have ended."""
        self.drop([rid for rid, live in self._live.items() if live.finish_reason is not None])

    def max_length(self, req: Any) -> int:
        """Return how many tokens a request has after the last step that was settled, at most.

        The first token of a request that the drafters do not know counts, whether known or not.
        """
        live = self._live.get(req.rid)
        if live is not None and req.rid in self._started:
            return live.length
        known = len(req.origin_input_ids) + len(req.output_ids)
        return 1 + (known if live is None else max(known, live.length))

    def _add(self, req: Any) -> ServedRequest:
        live = self._live[req.rid] = self._describe(req, next(self._ids))
        first = self._first.get(req.rid)
        if first is not None and first.length == live.length:
            live.output.append(first.token)
        return live

    def _start(self, requests: Sequence[ServedRequest]) -> None:
        # beside a grammar a request may have ended before it is first seen here
        if new := [live for live in requests if live.finish_reason is None]:
            self._pool.start(new)
            self._started.update(live.req.rid for live in new)
