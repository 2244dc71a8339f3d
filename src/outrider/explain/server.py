"""Record a generation of a running SGLang server with Outrider."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar
from uuid import uuid4

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from outrider.clients import load_tokenizer
from outrider.clients.http import Client, Exchange, Limits, Response, fault
from outrider.clients.replies import Id, Logprob, Name, Reply
from outrider.errors import Unsupported, UsageError
from outrider.explain.recording import (
    TOP,
    Decode,
    ExplainOptions,
    Logprobs,
    OnTokens,
    Recording,
    StepRecord,
)

__all__ = ["Server", "record"]

PAGE = Limits(seconds=60.0)
"""What all but the generation may take."""

GENERATION = Limits(seconds=3600.0, silence=300.0, total=2**33)
"""What the generation may take: the server may have others to serve first, and each piece of the
stream has all tokens so far."""

MOST_DRAFTS = 100_000
"""Drafts of all steps together that are shown."""

MOST_OF_STEP = 1024
"""Drafts of a step, and tokens that it emits."""

LONGEST_TOKEN = 1000
"""Characters that a token may have."""

FIX = "give the URL of an SGLang server with Outrider"

_COUNT = re.compile(rb'"completion_tokens":\s{0,9}(\d{1,9})')

Page = TypeVar("Page", bound=Reply)
Opinion = Annotated[tuple[Logprob, Id, Any], "as SGLang tells it: a logprob, its token, its text"]


class _About(Reply):
    """SGLang's /server_info."""

    model_path: Name
    version: Name = ""
    speculative_algorithm: Name | None = None
    speculative_draft_model_path: Name | None = None
    speculative_num_steps: Annotated[int, Field(ge=0, le=10_000)] | None = None


class _Tokenized(Reply):
    tokens: Annotated[list[Id], Field(max_length=2**21)]


class _Spelled(Reply):
    text: Annotated[list[str], Field(max_length=2**21)]


class _Reason(Reply):
    type: Name = "stop"


class _Meta(Reply):
    """What SGLang says of a generation.

    outrider_steps: where Outrider's SGLang host tells its steps
    """

    finish_reason: _Reason | None = None
    outrider_steps: object = None
    output_token_logprobs: Annotated[list[Opinion], Field(max_length=2**20)] | None = None
    output_top_logprobs: (
        Annotated[
            list[Annotated[list[Opinion], Field(max_length=100)] | None], Field(max_length=2**20)
        ]
        | None
    ) = None


Tokens = Annotated[tuple[Id, ...], Field(max_length=MOST_OF_STEP)]


class _Step(StepRecord):
    """A step as a server tells it, with bounds."""

    model_config = ConfigDict(allow_inf_nan=False)

    drafter: Annotated[str, Field(max_length=200)]
    drafts: Tokens
    parents: Annotated[tuple[Annotated[int, Field(ge=-1)], ...], Field(max_length=MOST_OF_STEP)]
    kept: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MOST_OF_STEP)]
    emitted: Tokens
    seconds: Annotated[float, Field(ge=0, le=1e6)] | None = None


class _Generated(Reply):
    """The last piece of a generation."""

    output_ids: Annotated[list[Id], Field(max_length=2**20)] | None = None
    meta_info: _Meta = _Meta()
    error: object = None


class Server:
    """An SGLang server. Its answers are data: they are shown, and name nothing that is opened."""

    def __init__(self, url: str) -> None:
        start = "start one with `outrider serve --model-path ...`, or mend --url"
        self._client = Client(url, start)
        self.url = self._client.shown

    def ask(self, kind: type[Page], path: str, body: Any = None) -> Page:
        """Return what the server answers. Raises Unsupported if it is not of this kind."""
        response = self._client.ask(path, body, PAGE)
        self.check(response.status, path, response)
        return response.parsed(kind, FIX)

    def decode(self, lists: Sequence[Sequence[int]]) -> list[str]:
        """Spell tokens with the server's own tokenizer."""
        if not lists:
            return []
        body = {"tokens": [list(ids) for ids in lists], "skip_special_tokens": False}
        texts = self.ask(_Spelled, "/detokenize", body).text
        if len(texts) != len(lists):
            raise self._wrong(f"spells {len(texts)} texts of {len(lists)}")
        if any(
            len(text) > LONGEST_TOKEN * len(ids) for text, ids in zip(texts, lists, strict=True)
        ):
            raise self._wrong(f"spells a token with more than {LONGEST_TOKEN} characters")
        return texts

    def generate(self, body: dict[str, Any], on_tokens: OnTokens) -> tuple[bytes, bool]:
        """Return the last piece of a streamed answer, and whether it was interrupted.

        SGLang tells the steps with the last piece: Ctrl-C asks for that, a second one leaves.
        """
        rid = uuid4().hex
        body = {**body, "rid": rid, "stream": True}
        with self._client.open("/generate", body, GENERATION) as exchange:
            if exchange.status != 200:
                self.check(exchange.status, "/generate", _whole(exchange, self.url))
            last, interrupted = b"", False
            while True:
                try:
                    if not (line := exchange.line()):
                        return last, interrupted
                    if line.startswith(b"data: {"):
                        last = line.removeprefix(b"data: ")
                        count = _COUNT.search(last)
                        on_tokens(int(count[1]) if count else 0)
                except KeyboardInterrupt:
                    if interrupted:
                        raise
                    interrupted = True
                    self._client.ask("/abort_request", {"rid": rid}, PAGE)

    def check(self, status: int, path: str, response: Response) -> None:
        """Raise Unsupported for another status than 200."""
        if status in (404, 405):
            raise self._wrong(f"has no {path}")
        if status != 200:
            raise Unsupported(f"{self.url}{path} refuses", fix=response.why)

    def _wrong(self, what: str) -> Unsupported:
        return Unsupported(
            f"{self.url} {what}", fix="give the URL of an SGLang 0.5.11 server with Outrider"
        )


def _whole(exchange: Exchange, source: str) -> Response:
    return Response(exchange.status, exchange.read(), source)


def record(options: ExplainOptions, url: str, on_tokens: OnTokens) -> tuple[Recording, Decode]:
    """Return the generation and how to spell its tokens. Ctrl-C ends it early, not in vain."""
    server = Server(url)
    return _record(server, options, on_tokens), server.decode


def _record(server: Server, options: ExplainOptions, on_tokens: OnTokens) -> Recording:
    about = server.ask(_About, "/server_info")
    recording = Recording(*_prompt(server, about, options))
    recording.settings = _settings(about, options)
    params: dict[str, Any] = {
        "temperature": options.temperature,
        "max_new_tokens": options.max_tokens,
        "custom_params": {"outrider": _asked(options)},
    }
    if options.temperature:
        params["sampling_seed"] = options.seed
    body = {
        "input_ids": recording.prompt_ids,
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": TOP,
    }
    started = time.perf_counter()
    last, interrupted = server.generate(body, on_tokens)
    if interrupted and not last:
        raise KeyboardInterrupt
    reply = _read(server, last)
    ids, meta = reply.output_ids or [], reply.meta_info
    if not ids or (len(ids) > 1 and meta.outrider_steps is None):
        if interrupted:
            raise KeyboardInterrupt  # there is nothing to show
        raise Unsupported(
            f"{server.url} tells no steps", fix="give it an Outrider as new as this one"
        )
    if len(ids) > options.max_tokens:
        raise Unsupported(
            f"{server.url} writes {len(ids):,} tokens where {options.max_tokens:,} were asked for",
            fix=FIX,
        )
    recording.seconds = time.perf_counter() - started
    if not interrupted:
        recording.finish_reason = meta.finish_reason.type if meta.finish_reason else "stop"
    recording.output_ids, recording.steps = ids, _steps(ids[0], meta.outrider_steps or ())
    tops = meta.output_top_logprobs or ()
    recording.logprobs = [
        Logprobs(token[0], tuple((one[1], one[0]) for one in top or ()))
        for token, top in zip(meta.output_token_logprobs or (), tops, strict=False)
    ]
    return recording


def _read(server: Server, piece: bytes) -> _Generated:
    if not piece:
        raise Unsupported(f"{server.url} says nothing that can be read", fix="ask again")
    response = Response(200, piece, f"{server.url}/generate")
    reply = response.parsed(_Generated, "ask again")
    if reply.error is not None:
        raise Unsupported(f"{server.url} refuses", fix=response.why)
    return reply


def _prompt(server: Server, about: _About, options: ExplainOptions) -> tuple[str, list[int]]:
    """Return the prompt as the model reads it, as text and ids."""
    serves, wanted = Path(about.model_path).name, options.target
    if wanted is not None and Path(wanted).name != serves:
        raise Unsupported(
            f"{server.url} serves {serves}, not {Path(wanted).name}",
            fix="leave out --target, or mend --url",
        )
    if (about.speculative_algorithm or "").upper() != "OUTRIDER":
        raise Unsupported(
            f"{server.url} serves {serves} without Outrider",
            fix="start it with `outrider serve`, or add --speculative-algorithm OUTRIDER",
        )
    text = options.prompt
    if options.chat:
        text = _chat_prompt(options.target, text)
    # a template has brought its special tokens
    body = {"prompt": text, "add_special_tokens": not options.chat}
    ids = server.ask(_Tokenized, "/tokenize", body).tokens
    if not ids:
        raise UsageError("an empty prompt", fix="give at least one token to go on from")
    return text, ids


def _chat_prompt(path: str | None, said: str) -> str:
    """Put what a user says into the template: SGLang's own endpoint for it tells no ids.

    path: from the user; a server does not choose which files are opened here
    """
    if path is None:
        raise UsageError(
            "--chat with --url needs the model's tokenizer", fix="name its folder: --target"
        )
    from outrider.explain.in_process import chat_prompt

    return chat_prompt(load_tokenizer(path), said)


def _asked(options: ExplainOptions) -> dict[str, Any]:
    """Return what is asked of Outrider."""
    asked: dict[str, Any] = {"explain": True}
    if options.drafter is not None:
        asked["drafter"] = options.drafter
    if options.max_drafts is not None:
        asked["max_drafts"] = options.max_drafts
    return asked


def _settings(about: _About, options: ExplainOptions) -> dict[str, Any]:
    draft = about.speculative_draft_model_path
    most = about.speculative_num_steps if options.max_drafts is None else options.max_drafts
    return {
        "engine": f"SGLang {about.version} with Outrider",
        "target": Path(about.model_path).name,
        "draft": Path(draft).name if draft else None,
        "drafter": options.drafter or "the server's choice",
        "max_drafts": most,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed if options.temperature else None,
    }


def _steps(first: int, told: Any) -> list[StepRecord]:
    """Return the steps; the first token, of the prompt's pass, is in none of the server's."""
    read = StepRecord(drafter="", drafts=(), parents=(), kept=(), emitted=(first,))
    try:
        steps = [read, *TypeAdapter(list[_Step]).validate_python(told)]
    except ValidationError as error:
        raise Unsupported(
            f"steps that cannot be read ({fault(error)})",
            fix="let client and server have the same version of Outrider",
        ) from error
    if (drafts := sum(len(step.drafts) for step in steps)) > MOST_DRAFTS:
        raise Unsupported(f"{drafts:,} drafts to show", fix="ask for fewer tokens: --max-tokens")
    return steps
