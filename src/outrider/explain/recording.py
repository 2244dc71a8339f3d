"""What an engine tells of a generation: ids only, as Outrider's SGLang host sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "Decode",
    "ExplainOptions",
    "Foreseen",
    "Logprobs",
    "OnTokens",
    "Recording",
    "StepRecord",
]

TOP = 3
"""How many of the target's most likely tokens are shown at each place."""

Foreseen = Literal["hit", "miss", "end", "none"]
"""What a draft server had for a step before any wait: drafts; drafts of another text; none beyond
the end of its tree; no tree."""

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Returns the text of each list of ids, special tokens included."""

OnTokens = Callable[[int], None]
"""Is told how many tokens there are so far."""


@dataclass(frozen=True)
class ExplainOptions:
    """What the user asks for.

    target, draft: folders or names of models; None is the tiny pair, or what the server has
    drafter: who drafts; None is the draft model, else n-grams, or what the server prefers
    max_drafts: K; None is the engine's default
    chat: whether the prompt is what a user says, to be put into the model's chat template
    compare: whether to decode again without drafts, bit for bit
    """

    prompt: str
    target: str | None = None
    draft: str | None = None
    drafter: str | None = None
    max_tokens: int = 100
    max_drafts: int | None = None
    temperature: float = 0.0
    seed: int = 0
    chat: bool = False
    compare: bool = False


class StepRecord(BaseModel):
    """One pass of the target.

    drafts, parents: a tree of ids; a parent is the index of another draft, or -1
    kept: the indices of the accepted drafts, along their path
    emitted: ids; beyond those of the accepted drafts there is at most one, the target's own
    foreseen: if a draft server was asked
    """

    model_config = ConfigDict(frozen=True)

    drafter: str
    drafts: tuple[int, ...]
    parents: tuple[int, ...]
    kept: tuple[int, ...]
    emitted: tuple[int, ...]
    foreseen: Foreseen | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Logprobs:
    """The target's opinion at one place. token: of what was emitted; top: ids, best first."""

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Recording:
    """A generation so far.

    prompt: as the model reads it
    steps: the first of them reads the prompt
    logprobs: one for each output id, or none
    plain_ids: what plain decoding wrote, if that was asked for
    settings: what is worth knowing of models and parameters
    """

    prompt: str
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str = "interrupted"
    seconds: float | None = None
    plain_ids: list[int] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
