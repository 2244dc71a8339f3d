"""A request: what was asked, what has been emitted, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from outrider.core.sampling import SamplingParams

Detokenize = Callable[[Sequence[int]], str]


class FinishReason(str, Enum):
    """Why a request ended, by OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass
class Request:
    """One sequence being decoded. `extend` changes it, by what `settle` decided; drafters must not.

    id: unique among the requests that a drafter knows
    prompt: token ids
    sampling: what the user asked for
    seed: of the coins
    eos_token_ids: the model's own end tokens
    detokenize: turns ids into text; needed for stop strings only
    output: the emitted ids so far
    """

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    detokenize: Detokenize | None = None
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt needs at least one token")
        if self.sampling.stop_strings and self.detokenize is None:
            raise ValueError("stop strings need a tokenizer")

    @property
    def length(self) -> int:
        """The number of tokens, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def position(self) -> int:
        """The position of the last token: the key of the next token's coin."""
        return self.length - 1

    @property
    def last_token(self) -> int:
        """The token that the next one follows."""
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def remaining(self) -> int:
        """How many more tokens may be emitted."""
        return self.sampling.max_tokens - len(self.output)

    def tokens_from(self, start: int) -> list[int]:
        """Return the tokens at position `start` and beyond."""
        return [*self.prompt[start:], *self.output[max(0, start - len(self.prompt)) :]]

    def finish_after(self, tokens: Sequence[int]) -> FinishReason | None:
        """Say whether plain decoding would end by the last of these tokens, emitted next."""
        sampling, last = self.sampling, tokens[-1]
        if last in sampling.stop_token_ids:
            return FinishReason.STOP
        if last in self.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if sampling.ends is not None and sampling.ends([*self.output, *tokens]):
            return FinishReason.STOP
        if self.detokenize is not None and (stops := sampling.stop_strings):
            # A token is at least one byte of text; the margin keeps a decoder that treats the
            # start of a text differently away from the string.
            window = max(len(stop.encode()) for stop in stops) + 4
            text = self.detokenize([*self.output[-window:], *tokens][-window:])
            if any(stop in text for stop in stops):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= self.remaining else None

    def extend(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> None:
        """Take over what `settle` decided."""
        self.output.extend(tokens)
        self.finish_reason = finish_reason
