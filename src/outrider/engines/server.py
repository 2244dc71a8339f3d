"""Any server with OpenAI's API: SGLang, vLLM, llama.cpp and others, with or without Outrider."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

from outrider.engines.base import (
    Answer,
    Counts,
    Heard,
    OnRefused,
    Query,
    Refused,
    Token,
    authorization,
    outrider_body,
    said,
)
from outrider.errors import OTHER_FORM, Unsupported, reading
from outrider.redact import redact

__all__ = ["ServerEngine", "parse_metrics"]

TIMEOUT = 600.0
"""Seconds that one answer may take."""

REFUSALS = (400, 413, 422)
"""Status codes that concern one request, not the server."""

SGLANG_FACTS = ("version", "speculative_algorithm", "speculative_num_steps", "attention_backend")

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Metrics = list[tuple[str, dict[str, str], float]]


class ServerEngine:
    """Asks a server over HTTP, with OpenAI's own client."""

    def __init__(self, spec: str, url: str, body: dict[str, Any]) -> None:
        try:
            import openai
        except ImportError as error:
            raise Unsupported(
                f"asking a server without a client ({error})", fix="pip install 'outrider[tools]'"
            ) from error
        self._openai = openai
        self.spec = spec
        self.root = url.removesuffix("/v1")
        self._base = f"{self.root}/v1"
        self._body = dict(body)
        self._model = str(self._body.pop("model", ""))
        self._known = self._models()
        if self._model and self._model not in self._known:
            raise Unsupported(
                f"{self.root} does not serve {self._model!r}",
                fix=f"choose one of {', '.join(self._known)}",
            )
        self._model = self._model or self._known[0]

    def _models(self) -> list[str]:
        try:
            with self._client(self._openai.OpenAI) as client:
                found = [str(model.to_dict()["id"]) for model in client.models.list().data]
        except self._openai.APIConnectionError as error:
            raise Unsupported(
                f"no server answers at {self.root} ({error.__cause__ or error})",
                fix="start it, or mend the address",
            ) from error
        except (self._openai.AuthenticationError, self._openai.PermissionDeniedError) as error:
            raise Unsupported(f"{self.root} wants a key", fix="set OPENAI_API_KEY to it") from error
        except (self._openai.APIError, *OTHER_FORM) as error:
            raise Unsupported(
                f"what answers at {self.root} does not speak OpenAI's API ({error!s:.200})",
                fix="give the address of an OpenAI-compatible server",
            ) from error
        if not found:
            raise Unsupported(f"{self.root} serves no model", fix="wait until it has loaded one")
        return found

    def _client(self, kind: Callable[..., Any]) -> Any:
        # without retries: what fails shall be seen; the client insists on some key
        key = os.environ.get("OPENAI_API_KEY") or "none"
        return kind(base_url=self._base, api_key=key, max_retries=0, timeout=TIMEOUT)

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
        return asyncio.run(self._ask_all(queries, concurrency, stream, rate, heard, refused))

    async def _ask_all(
        self,
        queries: Sequence[Query],
        concurrency: int,
        stream: bool,
        rate: float | None,
        heard: Heard | None,
        refused: OnRefused | None,
    ) -> list[Answer]:
        free = asyncio.Semaphore(concurrency)
        coins = random.Random(0)

        async with self._client(self._openai.AsyncOpenAI) as client:

            async def one(number: int, query: Query, delay: float) -> Answer | None:
                await asyncio.sleep(delay)
                async with free:
                    try:
                        answer = await self._one(client, query, stream)
                    except self._openai.APIStatusError as error:
                        if refused is None or error.status_code not in REFUSALS:
                            raise
                        refused(number, self._refused(error))
                        return None
                if heard is not None:
                    heard(number, answer)
                return answer

            delays, at = list[float](), 0.0
            for _ in queries:
                delays.append(at)
                at += coins.expovariate(rate) if rate else 0.0
            jobs = [one(*job) for job in zip(range(len(queries)), queries, delays, strict=True)]
            try:
                return [answer for answer in await _gather(jobs) if answer is not None]
            except self._openai.APIStatusError as error:
                raise self._refused(error) from error
            except self._openai.APIError as error:
                raise Unsupported(
                    f"{self.root} stopped answering ({error.__cause__ or error})",
                    fix="look into its log",
                ) from error

    def _refused(self, error: Any) -> Refused:
        what = f"{self.root} answered {error.status_code}: {_said(error)}"
        return Refused(what, fix="ask for what this server can do")

    async def _one(self, client: Any, query: Query, stream: bool) -> Answer:
        create = client.chat.completions.create if query.chat else client.completions.create
        body = self._fields(query)
        started = time.perf_counter()
        with reading(f"an answer of {self.root}", fix="look into its log"):
            if not stream:
                done = (await create(**body)).to_dict()
                return _whole(done, started)
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            reply = await create(stream=True, **body)
            pieces = [(time.perf_counter(), piece.to_dict()) async for piece in reply]
            return _streamed(pieces, started)

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
        return {**body, "extra_body": more} if more else body

    def variant(self, options: Mapping[str, Any], salt: str | None = None) -> ServerEngine:
        """Return the same server, asked with other options for Outrider."""
        other = copy(self)
        other.spec = f"{self.root}#{said(options)}"
        other._body = {**self._body, **outrider_body(options, salt)}
        return other

    def counts(self) -> Counts | None:
        """Return what Outrider's or vLLM's counters say, or None if there are none."""
        try:
            text = self._get("/metrics")
        except (OSError, ValueError):
            return None
        metrics = parse_metrics(text)
        return _outrider_counts(metrics) or _vllm_counts(metrics)

    def facts(self) -> dict[str, Any]:
        """Return the model and what the server says about its version."""
        import json

        found: dict[str, Any] = {"engine": redact(self.spec), "model": self._model}
        for path, keys in (
            ("/get_server_info", SGLANG_FACTS),
            ("/version", ("version",)),
        ):
            with suppress(OSError, ValueError, TypeError):
                told = json.loads(self._get(path))
                found |= {key: told[key] for key in keys if told.get(key) is not None}
                break
        return found

    def _get(self, path: str) -> str:
        request = urllib.request.Request(self.root + path, headers=authorization())
        with urllib.request.urlopen(request, timeout=30) as reply:
            return str(reply.read().decode())

    def close(self) -> None:
        """Do nothing: each call has a connection of its own."""


async def _gather(jobs: Iterable[Coroutine[Any, Any, Answer | None]]) -> list[Answer | None]:
    """Run all; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _said(error: Any) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("message") or error.message)[:300]


# -- reading replies


def _whole(reply: dict[str, Any], started: float) -> Answer:
    now = time.perf_counter()
    choice = reply["choices"][0]
    text = choice["message"].get("content") if "message" in choice else choice.get("text")
    tokens = _tokens(choice.get("logprobs"))
    count = (reply.get("usage") or {}).get("completion_tokens", len(tokens))
    arrivals = ((started, 0.0), (now, float(count)))
    return Answer(str(text or ""), tokens, int(count), choice.get("finish_reason"), arrivals)


def _streamed(pieces: Sequence[tuple[float, dict[str, Any]]], started: float) -> Answer:
    """Put an answer together from its pieces.

    Where a piece does not say how many tokens there are so far, its share of the text does.
    """
    parts: list[tuple[float, str, int | None]] = []
    reason, total, tokens = None, 0, list[Token]()
    for now, piece in pieces:
        usage = piece.get("usage") or {}
        so_far = usage.get("completion_tokens")
        total = so_far or total
        for choice in piece.get("choices") or ():
            new = choice.get("text")
            if new is None:
                new = (choice.get("delta") or {}).get("content")
            reason = choice.get("finish_reason") or reason
            tokens += _tokens(choice.get("logprobs"))
            if new or so_far:
                parts.append((now, new or "", so_far))
    text = "".join(new for _, new, _ in parts)
    arrivals, length = [(started, 0.0)], 0
    for now, new, so_far in parts:
        length += len(new)
        share = total * length / len(text) if text else total
        arrivals.append((now, float(share if so_far is None else so_far)))
    if len(arrivals) == 1:
        arrivals.append((pieces[-1][0] if pieces else started, float(total)))
    return Answer(text, tuple(tokens), total, reason, tuple(arrivals))


def _tokens(logprobs: dict[str, Any] | None) -> tuple[Token, ...]:
    """Return the tokens of OpenAI's two shapes of logprobs: of chat, and of completions."""
    if not logprobs:
        return ()
    if logprobs.get("content") is not None:
        return tuple(
            Token(
                one["token"],
                one["logprob"],
                tuple((top["token"], top["logprob"]) for top in one.get("top_logprobs") or ()),
            )
            for one in logprobs["content"]
        )
    texts = logprobs.get("tokens") or ()
    values = logprobs.get("token_logprobs") or [None] * len(texts)
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return tuple(
        Token(text, value, tuple(sorted((top or {}).items(), key=lambda pair: -pair[1])))
        for text, value, top in zip(texts, values, tops, strict=True)
    )


# -- reading counters


def parse_metrics(text: str) -> Metrics:
    """Return the samples of a Prometheus page: name, labels, value."""
    found = []
    for line in text.splitlines():
        if match := _LINE.match(line):
            name, labels, value = match.groups()
            found.append((name, dict(_LABEL.findall(labels or "")), float(value)))
    return found


class _Reader:
    """Sums samples by name, and by a label."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.names = {name for name, _, _ in metrics}

    def total(self, name: str) -> float:
        return sum(value for found, _, value in self.metrics if found == name)

    def by(self, name: str, label: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for found, labels, value in self.metrics:
            if found == name and label in labels:
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums


def _outrider_counts(metrics: Metrics) -> Counts | None:
    read = _Reader(metrics)
    if "outrider:verify_steps_total" not in read.names:
        return None
    counts = Counts(
        steps=read.total("outrider:verify_steps_total"),
        rows=read.total("outrider:verify_rows_total"),
        emitted=read.total("outrider:emitted_tokens_total"),
        drafted=read.total("outrider:draft_tokens_total"),
        accepted=read.total("outrider:accepted_draft_tokens_total"),
    )
    # rows are last tokens and drafts: one last token for each request in a step
    counts.request_steps = counts.rows - counts.drafted
    for position, value in read.by("outrider:accepted_at_total", "position").items():
        counts.accepted_at[int(position)] = int(value)
    for position, value in read.by("outrider:proposed_at_total", "position").items():
        counts.proposed_at[int(position)] = int(value)
    counts.by_drafter.update(_whole_numbers(read.by("outrider:draft_tokens_total", "drafter")))
    counts.fallbacks.update(_whole_numbers(read.by("outrider:fallbacks_total", "reason")))
    seconds: Any = counts.seconds  # a Counter of floats
    seconds.update(read.by("outrider:step_seconds_total", "part"))
    return counts


def _whole_numbers(values: dict[str, float]) -> dict[str, int]:
    return {key: int(value) for key, value in values.items()}


def _vllm_counts(metrics: Metrics) -> Counts | None:
    """Return what vLLM says about its own speculation. Its steps are those with drafts."""
    read = _Reader(metrics)
    if "vllm:spec_decode_num_drafts_total" not in read.names:
        return None
    drafts = read.total("vllm:spec_decode_num_drafts_total")
    counts = Counts(
        request_steps=drafts,
        drafted=read.total("vllm:spec_decode_num_draft_tokens_total"),
        accepted=read.total("vllm:spec_decode_num_accepted_tokens_total"),
    )
    counts.emitted = counts.accepted + drafts
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    for position, value in read.by(name, "position").items():
        counts.accepted_at[int(position) + 1] = int(value)
    return counts
