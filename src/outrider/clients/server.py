"""Any server with OpenAI's API: SGLang, vLLM, llama.cpp and others, with or without Outrider."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from queue import Empty, SimpleQueue
from typing import Any

from pydantic import ValidationError

from outrider.clients.base import (
    Answer,
    Counts,
    Heard,
    OnRefused,
    Query,
    Refused,
    Token,
    outrider_body,
    said,
    shown_url,
)
from outrider.clients.counters import counts_of
from outrider.clients.http import Client, Exchange, Limits, NoAnswer, Response
from outrider.clients.replies import Completion, Count, Logprobs, ModelList, Name, Reply
from outrider.errors import Unsupported, reading
from outrider.redact import redact

__all__ = ["ServerEngine"]

PAGE = Limits(seconds=30.0)
"""What a page of facts may take."""

ANSWER = Limits(seconds=600.0)
"""What one answer may take, streamed or whole."""

REFUSALS = (400, 413, 422)
"""Status codes that concern one request, not the server."""

MOST_PIECES = 10**6
"""Pieces of a streamed answer."""


class _Facts(Reply):
    """What SGLang and vLLM say of themselves, as far as it is reported."""

    version: Name | None = None
    speculative_algorithm: Name | None = None
    speculative_num_steps: Count | None = None
    attention_backend: Name | None = None


class _Status(Refused):
    """An answer of another status than 200."""

    def __init__(self, response: Response) -> None:
        what = f"{response.source} answered {response.status}: {response.why}"
        super().__init__(what, fix="ask for what this server can do")
        self.status = response.status


class ServerEngine:
    """Asks a server over HTTP."""

    def __init__(self, spec: str, url: str, body: dict[str, Any]) -> None:
        self.spec = shown_url(spec)
        self._url = url.removesuffix("/v1")
        self.root = shown_url(self._url)
        self._body = dict(body)
        self._model = str(self._body.pop("model", ""))
        known = self._models()
        if self._model and self._model not in known:
            raise Unsupported(
                f"{self.root} does not serve {self._model!r}",
                fix=f"choose one of {', '.join(known)}",
            )
        self._model = self._model or known[0]

    def _models(self) -> list[str]:
        fix = "give the address of an OpenAI-compatible server"
        response = Client(self._url).ask("/v1/models", None, PAGE)
        if response.status != 200:
            raise Unsupported(
                f"what answers at {self.root} does not speak OpenAI's API "
                f"({response.status}: {response.why})",
                fix=fix,
            )
        found = [model.id for model in response.parsed(ModelList, fix).data]
        if not found:
            raise Unsupported(f"{self.root} serves no model", fix="wait until it has loaded one")
        return found

    def ask(
        self,
        queries: Sequence[Query],
        concurrency: int = 1,
        *,
        stream: bool = False,
        rate: float | None = None,
        heard: Heard | None = None,
        refused: OnRefused | None = None,
    ) -> list[Answer]:
        """Return the answers, in order."""
        client, answers = Client(self._url), dict[int, Answer]()
        jobs = [lambda query=query: self._one(client, query, stream) for query in queries]
        with ThreadPoolExecutor(max(1, concurrency)) as pool:
            try:
                for number, done in _finished(pool, jobs, _delays(len(jobs), rate)):
                    try:
                        answers[number] = done.result()
                    except _Status as error:
                        if refused is None or error.status not in REFUSALS:
                            raise
                        refused(number, error)
                        continue
                    if heard is not None:
                        heard(number, answers[number])
            except BaseException:  # the first that fails ends the others
                pool.shutdown(wait=False, cancel_futures=True)
                client.hang_up()
                raise
        return [answers[number] for number in sorted(answers)]

    def _one(self, client: Client, query: Query, stream: bool) -> Answer:
        path = "/v1/chat/completions" if query.chat else "/v1/completions"
        body = self._fields(query)
        if stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            body["stream"] = True
        with client.open(path, body, ANSWER) as exchange:
            if exchange.status != 200:
                raise _Status(Response(exchange.status, exchange.read(), self.root))
            with reading(f"an answer of {self.root}", fix="look into its log"):
                if stream:
                    return _streamed(self._pieces(exchange), exchange.sent)
                reply = Response(200, exchange.read(), f"{self.root}{path}").parsed(Completion)
                return _whole(reply, exchange.sent)

    def _pieces(self, exchange: Exchange) -> Iterator[tuple[float, Completion]]:
        """Yield the pieces of a streamed answer as they come in."""
        count = 0
        for line in iter(exchange.line, b""):
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not data:
                continue
            if data == b"[DONE]":
                return
            if (count := count + 1) > MOST_PIECES:
                raise NoAnswer(f"{self.root} does not end an answer", fix="look into its log")
            now = time.perf_counter()
            piece = Response(200, data, self.root).parsed(Completion)
            if piece.error is not None:
                why = Response(200, data, self.root).why
                raise Unsupported(f"{self.root} stopped answering ({why})", fix="look into its log")
            yield now, piece

    def _fields(self, query: Query) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": query.max_tokens,
            "temperature": query.temperature,
            "top_p": query.top_p,
        }
        if query.seed is not None:
            body["seed"] = query.seed
        if query.chat:
            body["messages"] = [{"role": "user", "content": query.prompt}]
            if query.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": query.logprobs}
        else:
            body["prompt"] = query.prompt
            if query.logprobs is not None:
                body["logprobs"] = query.logprobs
        more = {**self._body, **({"ignore_eos": True} if query.ignore_eos else {})}
        return {**body, **more}

    def variant(self, options: Mapping[str, Any], salt: str | None = None) -> ServerEngine:
        """Return the same server, asked with other options for Outrider."""
        other = copy(self)
        other.spec = f"{self.root}#{said(options)}"
        other._body = {**self._body, **outrider_body(options, salt)}
        return other

    def counts(self) -> Counts | None:
        """Return what Outrider's or vLLM's counters say, or None if there are none."""
        try:
            response = Client(self._url).ask("/metrics", None, PAGE)
        except NoAnswer:
            return None
        if response.status != 200:
            return None
        return counts_of(response.body.decode(errors="replace"), response.source)

    def facts(self) -> dict[str, Any]:
        """Return the model and what the server says about its version."""
        found: dict[str, Any] = {"engine": redact(self.spec), "model": self._model}
        client = Client(self._url)
        for path in ("/get_server_info", "/version"):
            with suppress(NoAnswer, ValidationError):
                response = client.ask(path, None, PAGE)
                if response.status == 200:
                    told = _Facts.model_validate_json(response.body)
                    return found | told.model_dump(exclude_none=True)
        return found

    def close(self) -> None:
        """Do nothing: each call has a connection of its own."""


def _delays(count: int, rate: float | None) -> list[float]:
    """Return when each query is sent: seconds after the first one."""
    coins, delays, at = random.Random(0), list[float](), 0.0
    for _ in range(count):
        delays.append(at)
        at += coins.expovariate(rate) if rate else 0.0
    return delays


def _finished(
    pool: ThreadPoolExecutor, jobs: Sequence[Callable[[], Answer]], delays: Sequence[float]
) -> Iterator[tuple[int, Future[Answer]]]:
    """Start each job at its time, and yield its number with what became of it as it ends."""
    begun, started, ended = time.perf_counter(), 0, 0
    done: SimpleQueue[tuple[int, Future[Answer]]] = SimpleQueue()

    def start(number: int) -> None:
        pool.submit(jobs[number]).add_done_callback(lambda future: done.put((number, future)))

    while ended < len(jobs):
        wait = None
        if started < len(jobs):
            wait = delays[started] - (time.perf_counter() - begun)
            if wait <= 0:
                start(started)
                started += 1
                continue
        with suppress(Empty):
            found = done.get(timeout=wait)
            ended += 1
            yield found


# -- reading replies


def _whole(reply: Completion, started: float) -> Answer:
    now = time.perf_counter()
    choice = reply.choices[0]
    tokens = _tokens(choice.logprobs)
    count = reply.usage.completion_tokens if reply.usage is not None else None
    count = len(tokens) if count is None else count
    arrivals = ((started, 0.0), (now, float(count)))
    return Answer(choice.said, tokens, count, choice.finish_reason, arrivals)


def _streamed(pieces: Iterator[tuple[float, Completion]], started: float) -> Answer:
    """Put an answer together from its pieces.

    Where a piece does not say how many tokens there are so far, its share of the text does.
    """
    parts: list[tuple[float, str, int | None]] = []
    reason, total, tokens, last = None, 0, list[Token](), started
    for now, piece in pieces:
        last = now
        so_far = piece.usage.completion_tokens if piece.usage is not None else None
        total = so_far or total
        for choice in piece.choices:
            reason = choice.finish_reason or reason
            tokens += _tokens(choice.logprobs)
            if choice.said or so_far:
                parts.append((now, choice.said, so_far))
    text = "".join(new for _, new, _ in parts)
    arrivals, length = [(started, 0.0)], 0
    for now, new, so_far in parts:
        length += len(new)
        share = total * length / len(text) if text else total
        arrivals.append((now, float(share if so_far is None else so_far)))
    if len(arrivals) == 1:
        arrivals.append((last, float(total)))
    return Answer(text, tuple(tokens), total, reason, tuple(arrivals))


def _tokens(logprobs: Logprobs | None) -> tuple[Token, ...]:
    """Return the tokens of OpenAI's two shapes of logprobs: of chat, and of completions."""
    if logprobs is None:
        return ()
    if logprobs.content is not None:
        return tuple(
            Token(
                one.token,
                one.logprob,
                tuple(
                    (t.token, t.logprob) for t in one.top_logprobs or () if t.logprob is not None
                ),
            )
            for one in logprobs.content
        )
    texts = logprobs.tokens or []
    values = logprobs.token_logprobs or [None] * len(texts)
    tops = logprobs.top_logprobs or [None] * len(texts)
    return tuple(
        Token(text, value, tuple(sorted(_known((top or {}).items()), key=lambda pair: -pair[1])))
        for text, value, top in zip(texts, values, tops, strict=True)
    )


def _known(pairs: Iterable[tuple[str, float | None]]) -> tuple[tuple[str, float], ...]:
    return tuple((text, value) for text, value in pairs if value is not None)
