"""Record a generation of a running SGLang server with Outrider."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from outrider.engines import authorization, base_url, load_tokenizer
from outrider.errors import Unsupported, UsageError, reading
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

STEPS = "outrider_steps"
"""Where Outrider's SGLang host tells its steps, within `meta_info`."""

SILENCE = 300.0
"""Seconds that a server may stay silent: it may have others to serve first."""

_COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')


class Server:
    """An SGLang server, asked with nothing but the standard library."""

    def __init__(self, url: str) -> None:
        self.url = base_url(url)
        self._headers = {"Content-Type": "application/json", **authorization()}

    def ask(self, path: str, body: Any = None) -> Any:
        """Return the JSON that the server answers. Raises Unsupported if it does not."""
        with self.open(path, body) as reply, self.listening():
            try:
                return json.loads(reply.read())
            except (ValueError, RecursionError) as error:
                raise self._wrong(f"answers no JSON at {path}") from error

    def info(self) -> dict[str, Any]:
        """Return SGLang's settings. Raises Unsupported if it is somebody else's server."""
        about = self.ask("/server_info")
        if not isinstance(about, dict) or not isinstance(about.get("model_path"), str):
            raise self._wrong("is no SGLang server")
        return about

    def decode(self, lists: Sequence[Sequence[int]]) -> list[str]:
        """Spell tokens with the server's own tokenizer."""
        if not lists:
            return []
        body = {"tokens": [list(ids) for ids in lists], "skip_special_tokens": False}
        with _reading(self):
            texts = [str(text) for text in self.ask("/detokenize", body)["text"]]
        if len(texts) != len(lists):
            raise self._wrong(f"spells {len(texts)} texts of {len(lists)}")
        return texts

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Say it in our words if the server hangs up."""
        try:
            yield
        except (OSError, HTTPException) as error:
            raise self._wrong(f"hung up ({error})") from error

    def open(self, path: str, body: Any = None) -> HTTPResponse:
        """Return the answer, unread. Raises Unsupported if there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, self._headers)
        try:
            reply: HTTPResponse = urlopen(request, timeout=SILENCE)
            return reply
        except HTTPError as error:
            if error.code in (401, 403):
                raise Unsupported(
                    f"{self.url} wants a key", fix="set OPENAI_API_KEY to it"
                ) from error
            if error.code in (404, 405):
                raise self._wrong(f"has no {path}") from error
            raise Unsupported(f"{self.url}{path} refuses", fix=_message(error.read())) from error
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise Unsupported(
                f"no server answers at {self.url} ({reason})",
                fix="start one with `outrider serve --model-path ...`, or mend --url",
            ) from error

    def _wrong(self, what: str) -> Unsupported:
        return Unsupported(
            f"{self.url} {what}", fix="give the URL of an SGLang 0.5.11 server with Outrider"
        )


def _reading(server: Server) -> AbstractContextManager[None]:
    return reading(f"what {server.url} says", fix="give the URL of an SGLang server with Outrider")


def record(options: ExplainOptions, url: str, on_tokens: OnTokens) -> tuple[Recording, Decode]:
    """Return the generation and how to spell its tokens. Ctrl-C ends it early, not in vain."""
    server = Server(url)
    with _reading(server):
        return _record(server, options, on_tokens), server.decode


def _record(server: Server, options: ExplainOptions, on_tokens: OnTokens) -> Recording:
    about = server.info()
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
    last, interrupted = _listen(server, body, on_tokens)
    if interrupted and not last:
        raise KeyboardInterrupt
    reply = _read(server, last)
    ids, meta = reply.get("output_ids") or [], reply.get("meta_info", {})
    if not ids or (len(ids) > 1 and STEPS not in meta):
        if interrupted:
            raise KeyboardInterrupt  # there is nothing to show
        raise Unsupported(
            f"{server.url} tells no steps", fix="give it an Outrider as new as this one"
        )
    recording.seconds = time.perf_counter() - started
    if not interrupted:
        recording.finish_reason = (meta.get("finish_reason") or {}).get("type", "stop")
    recording.output_ids, recording.steps = _ids(ids), _steps(ids[0], meta.get(STEPS, ()))
    recording.logprobs = [
        Logprobs(float(token[0]), tuple((int(one[1]), float(one[0])) for one in top or ()))
        for token, top in zip(
            meta.get("output_token_logprobs", ()), meta.get("output_top_logprobs", ()), strict=False
        )
    ]
    return recording


def _listen(server: Server, body: dict[str, Any], on_tokens: OnTokens) -> tuple[bytes, bool]:
    """Return the last piece of a streamed answer, and whether it was interrupted.

    SGLang tells the steps with the last piece: Ctrl-C asks for that, a second one leaves.
    """
    rid, last, interrupted = uuid4().hex, b"", False
    with server.open("/generate", {**body, "rid": rid, "stream": True}) as reply:
        while True:
            try:
                with server.listening():
                    line = reply.readline()
                if not line:
                    return last, interrupted
                if line.startswith(b"data: {"):
                    last = line.removeprefix(b"data: ")
                    count = _COUNT.search(last)
                    on_tokens(int(count[1]) if count else 0)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                server.open("/abort_request", {"rid": rid}).close()


def _read(server: Server, piece: bytes) -> dict[str, Any]:
    try:
        reply: dict[str, Any] = json.loads(piece)
    except (ValueError, RecursionError) as error:
        raise Unsupported(f"{server.url} says nothing that can be read", fix="ask again") from error
    if "error" in reply:
        raise Unsupported(f"{server.url} refuses", fix=_message(piece))
    return reply


def _prompt(
    server: Server, about: dict[str, Any], options: ExplainOptions
) -> tuple[str, list[int]]:
    """Return the prompt as the model reads it, as text and ids."""
    serves, wanted = Path(about["model_path"]).name, options.target
    if wanted is not None and Path(wanted).name != serves:
        raise Unsupported(
            f"{server.url} serves {serves}, not {Path(wanted).name}",
            fix="leave out --target, or mend --url",
        )
    if (about.get("speculative_algorithm") or "").upper() != "OUTRIDER":
        raise Unsupported(
            f"{server.url} serves {serves} without Outrider",
            fix="start it with `outrider serve`, or add --speculative-algorithm OUTRIDER",
        )
    text = options.prompt
    if options.chat:
        text = _chat_prompt(options.target, text)
    # a template has brought its special tokens
    body = {"prompt": text, "add_special_tokens": not options.chat}
    ids = _ids(server.ask("/tokenize", body)["tokens"])
    if not ids:
        raise UsageError("an empty prompt", fix="give at least one token to go on from")
    return text, ids


def _chat_prompt(path: str | None, said: str) -> str:
    """Put what a user says into the template: SGLang's own endpoint for it tells no ids.

    path: that the user named; what a server names is not loaded
    """
    if path is None:
        raise UsageError(
            "--chat without a tokenizer: a path that a server names is not loaded",
            fix="name the folder that has it: --target",
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


def _settings(about: dict[str, Any], options: ExplainOptions) -> dict[str, Any]:
    draft = about.get("speculative_draft_model_path")
    most = about.get("speculative_num_steps") if options.max_drafts is None else options.max_drafts
    return {
        "engine": f"SGLang {about.get('version', '')} with Outrider",
        "target": Path(about["model_path"]).name,
        "draft": Path(draft).name if draft else None,
        "drafter": options.drafter or "the server's choice",
        "max_drafts": most,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed if options.temperature else None,
    }


def _ids(told: Any) -> list[int]:
    return TypeAdapter(list[int]).validate_python(told, strict=True)


def _steps(first: int, told: Any) -> list[StepRecord]:
    """Return the steps; the first token, of the prompt's pass, is in none of the server's."""
    read = StepRecord(drafter="", drafts=(), parents=(), kept=(), emitted=(first,))
    try:
        return [read, *TypeAdapter(list[StepRecord]).validate_python(told)]
    except ValidationError as error:
        raise Unsupported(
            f"steps that cannot be read ({error.error_count()} faults)",
            fix="let client and server have the same version of Outrider",
        ) from error


def _message(body: bytes) -> str:
    """Return what a server says is wrong, in one line."""
    try:
        found = json.loads(body)
        error = found.get("error", found)
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:300] or "it does not say why"
