"""What servers with OpenAI's API and SGLang answer: the fields that are read, with their bounds.

Names and versions have no control characters; texts and tokens may have any.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["Completion", "Count", "Id", "Logprob", "ModelCard", "ModelList", "Name", "Reply"]

TOKENS = 200_000
"""Tokens of one answer."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it has control characters")
    return text


Name = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
"""A model, a path, a version, a drafter: one line, as it is shown."""

Count = Annotated[int, Field(ge=0, le=2**31)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
"""A token's number."""

Logprob = Annotated[float, Field(ge=-3.5e38, le=0.1)]
"""Rounding may lift one above 0; llama.cpp's lowest is that of float32."""


class Reply(BaseModel):
    """A JSON object of a server's. Other fields of it are left out."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class ModelCard(Reply):
    """A model that is served.

    root: what it was loaded from (vLLM)
    """

    id: Name
    root: Name | None = None
    owned_by: Name | None = None
    max_model_len: Annotated[int, Field(ge=1, le=2**40)] | None = None


class ModelList(Reply):
    """The answer of /v1/models."""

    data: Annotated[list[ModelCard], Field(max_length=10_000)]


class TopToken(Reply):
    """One of the likeliest tokens; its logprob is null where it would be -inf."""

    token: str
    logprob: Logprob | None = None


class ChatToken(TopToken):
    """A token of a chat completion."""

    top_logprobs: Annotated[list[TopToken], Field(max_length=1000)] | None = None


class Logprobs(Reply):
    """OpenAI's two shapes of logprobs: `content` of chat, the others of completions."""

    content: Annotated[list[ChatToken], Field(max_length=TOKENS)] | None = None
    tokens: Annotated[list[str], Field(max_length=TOKENS)] | None = None
    token_logprobs: Annotated[list[Logprob | None], Field(max_length=TOKENS)] | None = None
    top_logprobs: (
        Annotated[list[dict[str, Logprob | None] | None], Field(max_length=TOKENS)] | None
    ) = None


class Message(Reply):
    """What a chat completion says, whole or in part."""

    content: str | None = None


class Choice(Reply):
    """An answer, whole or in part."""

    text: str | None = None
    message: Message | None = None
    delta: Message | None = None
    finish_reason: Name | None = None
    logprobs: Logprobs | None = None

    @property
    def said(self) -> str:
        """The text, whichever form it has."""
        message = self.message or self.delta
        return (message.content if message is not None else self.text) or ""


class Usage(Reply):
    """What an answer took."""

    completion_tokens: Count | None = None


class Completion(Reply):
    """A completion, or a piece of one that is streamed.

    error: what a server says instead of a piece
    """

    choices: Annotated[list[Choice], Field(max_length=100)] = []
    usage: Usage | None = None
    error: object = None
