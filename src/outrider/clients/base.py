"""What an engine is asked, and what it answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol
from urllib.parse import urlsplit

from outrider.errors import Unsupported, UsageError
from outrider.redact import quoted

__all__ = [
    "Answer",
    "Counts",
    "Engine",
    "Heard",
    "OnRefused",
    "Query",
    "Refused",
    "Token",
    "base_url",
    "shown_url",
    "without_password",
]


@dataclass(frozen=True)
class Query:
    """A prompt and how to go on from it. The defaults are greedy.

    chat: whether the prompt is a user's message, put into the model's chat template
    logprobs: how many alternatives to report for each token; None reports nothing
    ignore_eos: go on to max_tokens (an extension of OpenAI's API that SGLang and vLLM have)
    """

    prompt: str
    chat: bool = True
    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Token:
    """A token of an answer, with what the engine says about it.

    logprob: of the model, if the engine was asked for it
    top: the most likely tokens at its place, best first
    """

    text: str
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """What an engine said, and when.

    tokens: empty if it does not tell them apart
    count: how many tokens it counts
    arrivals: (seconds on this process's clock, tokens so far), the first when the query was sent
    """

    text: str
    tokens: tuple[Token, ...]
    count: int
    finish_reason: str | None
    arrivals: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        """From the query to the last token."""
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def first_token(self) -> float:
        """From the query to the first token: exact only if the answer was streamed."""
        return (
            next(t for t, n in self.arrivals if n > 0 or t == self.arrivals[-1][0])
            - (self.arrivals[0][0])
        )


@dataclass
class Counts:
    """What speculation did so far, as far as an engine tells. The difference of two is a run's.

    steps: passes of the target; request_steps: the same, once for each request in it
    rows: of these passes
    emitted, drafted, accepted: tokens
    accepted_at, proposed_at: drafts by position in their block
    by_drafter: draft tokens by who proposed them
    seconds: of the steps, by part
    fallbacks: requests that a step served without drafts, by reason
    """

    steps: float = 0
    request_steps: float = 0
    rows: float = 0
    emitted: float = 0
    drafted: float = 0
    accepted: float = 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    proposed_at: Counter[int] = field(default_factory=Counter)
    by_drafter: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __sub__(self, before: Counts) -> Counts:
        return Counts(**{f.name: _minus(getattr(self, f.name), getattr(before, f.name))
                         for f in fields(self)})  # fmt: skip

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name)
                         for f in fields(self)})  # fmt: skip

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gets from one pass of the target: 1 is plain decoding."""
        return self.emitted / self.request_steps if self.request_steps else 0.0

    @property
    def step_seconds(self) -> float:
        """How long a step takes, on average."""
        return sum(self.seconds.values()) / self.steps if self.steps else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: {str(k): round(v, 4) for k, v in sorted(value.items())}
            if isinstance(value, Counter)
            else value
            for name, value in found.items()
        }


def _minus(a: Any, b: Any) -> Any:
    return Counter({key: a[key] - b[key] for key in a}) if isinstance(a, Counter) else a - b


Heard = Callable[[int, Answer], None]
"""Called with the number of a query and its answer, as they come in."""


class Refused(Unsupported):
    """A query that an engine refuses, and others need not share its fate: too long a prompt."""


OnRefused = Callable[[int, Refused], None]
"""Called with the number of a query that is refused. It has no answer then."""


class Engine(Protocol):
    """Something that answers.

    spec: the string that names it
    """

    spec: str

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
        """Return the answers, in order. Without `refused`, the first refusal is raised.

        concurrency: the most queries that are open at once
        stream: whether answers come in pieces, so that `arrivals` says when
        rate: queries a second, at random (a Poisson process of fixed seed); None sends as many as
            may be open
        """
        ...

    def variant(self, options: Mapping[str, Any], salt: str | None = None) -> Engine:
        """Return the same engine with other options for Outrider: drafter, max_drafts.

        salt: whose cached prefixes it shares; by default those of the same options
        """
        ...

    def counts(self) -> Counts | None:
        """Return what speculation did so far, or None if this engine does not tell."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what it says about itself: model, version."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def outrider_body(options: Mapping[str, Any], salt: str | None = None) -> dict[str, Any]:
    """Return the fields that carry a request's options for Outrider.

    They come with a salt: who drafts with a model needs a prefix that this model has read too, and
    would not find one in what other options have left in the server's prefix cache.
    """
    if not options:
        return {}
    salt = salt or said(options)
    return {"custom_params": {"outrider": dict(options)}, "cache_salt": f"outrider {salt}"}


def said(options: Mapping[str, Any]) -> str:
    """Return options as they are written after an engine's name."""
    return ",".join(f"{key}={value}" for key, value in options.items())


def base_url(url: str) -> str:
    """Return a server's address without a slash at its end. Raises UsageError if it is none."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise UsageError(
            f"{quoted(without_password(url))} is no address",
            fix="write it as http://localhost:30000",
        )
    return url.rstrip("/")


def shown_url(url: str) -> str:
    """Return a server's address without the user and the password in it: as tools write it."""
    return re.sub(r"^(https?://)[^/?#]*@", r"\1", url)


def without_password(text: str) -> str:
    """Return what should have been an address: whatever stands before an @ may be a password."""
    return re.sub(r"(^|//).*@", r"\1", text)
