"""What a host and a draft server say to each other: lines of JSON over a Unix socket.

From the host, each with what it is about:

    {"hello": VERSION}                                 the first line
    {"open": [[id, prompt, output, seed, sampling, eos], ...]}
    {"commit": [[id, length, tokens], ...]}            length: before these tokens
    {"close": [id, ...]}

From the draft server:

    {"hello": VERSION, "model": NAME}
    {"grown": [[id, began, parent, first, tokens, sure], ...]}    see `Grown`
    {"unknown": [id, ...]}                             it has no such text: open it again
    {"left_out": [id, ...]}                            it takes no such text: do not open it again
    {"refused": WHY}                                   the last line

Nothing but token ids and numbers crosses the boundary: no code, no logits. Ids are those of the
connection: two hosts may use the same. Both sides check all that they are told. What is wrong with
one text costs that text its drafts; what cannot be understood at all ends the connection.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.core import DraftFault, Request, SamplingParams
from outrider.drafters.ahead.connection import MAX_REPLY, Closed
from outrider.drafters.ahead.growth import Grown
from outrider.errors import OTHER_FORM

VERSION = 3

MAX_TEXTS = 256
"""Texts of one host. It opens no more, and goes without drafts for others."""

SENT = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)
"""Sampling parameters that shape the distribution. A grammar is a function and stays at home."""

MAX_SIZE = 1e10
"""Of a sampling parameter; what divides logits is at least 1 / MAX_SIZE, or 0."""

MAX_BIASES = 300
"""Tokens of a logit bias, as in OpenAI's API: each costs time in every pass."""

MAX_ENDS = 1024
"""End tokens of a text."""

MAX_CHILDREN = 1024
"""Tokens that may follow a node."""

MAX_NUMBERS = MAX_REPLY // 24
"""Numbers of a message from a draft server: a longer list comes in several messages."""

USUAL = asdict(SamplingParams())

FROM_HOST = {"hello": int, "open": list, "commit": list, "close": list}
FROM_SERVER = {
    "hello": int,
    "model": str,
    "grown": list,
    "unknown": list,
    "left_out": list,
    "refused": str,
}


class BadText(Exception):
    """A text that cannot be drafted for; the others can."""


def check_message(message: Mapping[str, Any], known: Mapping[str, type]) -> None:
    """Raise Closed unless a message says something, and only what is known.

    known: the type of each value, by its name
    """
    for name, value in message.items():
        if type(value) is not known.get(name):
            raise Closed(f"a message that is none: {name!r:.40} of {type(value).__name__}")
        if type(value) is list and name != "grown" and len(value) > MAX_TEXTS:
            raise Closed(f"a message about more than {MAX_TEXTS} texts")
    if not message:
        raise Closed("a message that says nothing")


def check_ids(ids: Iterable[Any]) -> None:
    """Raise ValueError unless these are whole numbers in [0, 2**63)."""
    if not all(type(token) is int and 0 <= token < 2**63 for token in ids):
        raise ValueError("ids that are none")


def ids_of(said: Sequence[Any]) -> Sequence[int]:
    """Return the ids of texts. Raises Closed if they are none."""
    try:
        check_ids(said)
    except ValueError as error:
        raise Closed(str(error)) from error
    return said


def id_of(said: Any) -> int:
    """Return the id of the text that a part of a message is about. Raises Closed if it has none."""
    if type(said) is not list or not said:
        raise Closed("a text without an id")
    return ids_of(said[:1])[0]


def opened(request: Request) -> list[Any]:
    """Return what `open` says of a request."""
    sampling = request.sampling
    said = {name: getattr(sampling, name) for name in SENT}
    said["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    changed = {name: value for name, value in said.items() if value != USUAL[name]}
    ends = [] if sampling.ignore_eos else sorted(request.eos_token_ids)
    prompt, output = list(request.prompt), list(request.output)
    return [request.id, prompt, output, request.seed, changed, ends]


def request_of(said: Any, vocab_size: int) -> Request:
    """Return the request that `open` tells of. Raises BadText if it is none.

    vocab_size: of the draft model
    """
    try:
        key, prompt, output, seed, sampling, ends = said
        check_ids([key, seed])
        check_ids([*prompt, *output, *ends])
        if len(ends) > MAX_ENDS:
            raise ValueError(f"more than {MAX_ENDS} end tokens")
        params = _sampling_of(sampling, vocab_size)
        return Request(key, tuple(prompt), params, seed, frozenset(ends), output=list(output))
    except OTHER_FORM as error:
        raise BadText(f"an open that is none: {error!s:.200}") from error


def _sampling_of(said: dict[str, Any], vocab_size: int) -> SamplingParams:
    """Return sampling parameters whose logits stay numbers. Raises an error of `OTHER_FORM`."""
    if set(said) - set(SENT):
        raise ValueError("a sampling parameter that is not known")
    numbers = {name: value for name, value in said.items() if name != "logit_bias"}
    biases = said.get("logit_bias", {})
    if len(biases) > MAX_BIASES:
        raise ValueError(f"a logit bias of more than {MAX_BIASES} tokens")
    bias: dict[int, float] = {}
    for token, value in biases.items():
        if not (token.isascii() and token.isdigit()):
            raise ValueError("a logit bias of a token that is none")
        if int(token) < vocab_size:  # one beyond the vocabulary has no logit
            bias[int(token)] = value
    for name, value in [*numbers.items(), *(("logit_bias", value) for value in bias.values())]:
        if type(value) not in (int, float):
            raise TypeError(f"{name} is no number")
        is_ban = name == "logit_bias" and value == -math.inf  # JSON of Python has a word for it
        if not (abs(value) <= MAX_SIZE or is_ban):
            raise ValueError(f"{name} is larger than {MAX_SIZE:g}")
        if name in ("temperature", "repetition_penalty") and 0 < value < 1 / MAX_SIZE:
            raise ValueError(f"{name} is smaller than {1 / MAX_SIZE:g}")
    return SamplingParams(**numbers, logit_bias=bias)


def commit_of(said: Any) -> tuple[int, Sequence[int]]:
    """Return the length and the tokens that `commit` tells of. Raises BadText if it does not."""
    try:
        _, length, tokens = said
        check_ids([length, *tokens])
    except OTHER_FORM as error:
        raise BadText(f"a commit that is none: {error!s:.200}") from error
    return length, tokens


def said_growth(key: int, grown: Grown) -> list[Any]:
    """Return what `grown` says of an addition to a text's tree."""
    return [key, *grown[1:5], [round(chance, 4) for chance in grown.sure]]


def growth_of(said: Any) -> Grown:
    """Return the addition that `grown` tells of. Raises DraftFault if it is none."""
    try:
        grown = Grown(*said)
        check_ids([*grown[:4], *grown.tokens])
        fits = len(grown.tokens) == len(grown.sure) <= MAX_CHILDREN
        if not fits or not all(type(p) is float and 0.0 <= p <= 1.0 for p in grown.sure):
            raise ValueError("tokens and how sure they are")
    except OTHER_FORM as error:
        raise DraftFault(f"an addition to a tree that is none: {error!s:.200}") from error
    return grown


def batches(grown: Iterable[list[Any]]) -> Iterator[list[list[Any]]]:
    """Yield additions in lists that are short enough for one message each."""
    batch, numbers = list[list[Any]](), 0
    for said in grown:
        more = 4 + 2 * len(said[4])
        if numbers + more > MAX_NUMBERS and batch:
            yield batch
            batch, numbers = [], 0
        batch.append(said)
        numbers += more
    if batch:
        yield batch
