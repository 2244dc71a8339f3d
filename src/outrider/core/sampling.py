"""Sampling parameters: what a user asks of the target's distribution, and when a request ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from torch import Tensor

from outrider.core.lazy import lazy

Grammar = Callable[[Sequence[int]], Tensor]
"""Maps a request's output ids, drafts on the path included, to the tokens allowed next.

It returns a [V] bool tensor and must not remember calls: it is asked about paths that are never
taken.
"""


Process = Callable[[Sequence[int], Tensor], Tensor]
"""Maps a request's output ids, drafts on the path included, and its logits, [V], to other logits.

It must not remember calls, either.
"""

Ends = Callable[[Sequence[int]], bool]
"""Says whether a request ends with its output ids; it is asked after each token that is emitted."""


def is_whole(value: object, least: int) -> bool:
    """Say whether it is a whole number, of Python or numpy, and at least this one."""
    return isinstance(value, Integral) and int(value) >= least


def _is_real(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """Say whether it is a finite number in this range."""
    return isinstance(value, Real) and math.isfinite(value) and least <= float(value) <= most


def _is_bias(value: object) -> bool:
    """Say whether it can be added to a logit; -inf rules a token out."""
    return isinstance(value, Real) and float(value) < math.inf


@dataclass(frozen=True)
class SamplingParams:
    """How plain decoding would choose tokens. The defaults are greedy.

    temperature: 0 is greedy
    top_k: keep the k most likely tokens (0: all; ties with the last are kept)
    top_p: keep the smallest set of most likely tokens whose mass reaches top_p
    min_p: keep tokens at least min_p times as likely as the most likely one
    repetition_penalty: divides positive and multiplies negative logits of tokens seen in the
        prompt or the output
    frequency_penalty: subtracted once for each time a token occurs in the output
    presence_penalty: subtracted from every token that occurs in the output
    logit_bias: added to the logits of single tokens
    grammar: which tokens may follow
    process: changes the logits, before all other parameters do
    ends: ends the request, besides the other conditions
    seed: of the coins; None lets the host draw one
    max_tokens: the most tokens to emit
    stop: strings that end the request when they appear in the output
    stop_token_ids: tokens that end the request
    ignore_eos: whether the model's own end tokens are passed over
    logprobs: how many of the model's most likely tokens to report at each position, beside the
        emitted one; None reports nothing. They are those of the model, before any transform.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    process: Process | None = None
    ends: Ends | None = None
    seed: int | None = None
    max_tokens: int = 128
    stop: str | Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        allowed = {
            "temperature must be finite and >= 0": _is_real(self.temperature, 0),
            "top_k must be a whole number >= 0 (0 keeps all)": is_whole(self.top_k, 0),
            "top_p must be in (0, 1]": _is_real(self.top_p, 0, 1) and self.top_p > 0,
            "min_p must be in [0, 1]": _is_real(self.min_p, 0, 1),
            "repetition_penalty must be finite and > 0": _is_real(self.repetition_penalty, 0)
            and self.repetition_penalty > 0,
            "frequency_penalty must be finite": _is_real(self.frequency_penalty),
            "presence_penalty must be finite": _is_real(self.presence_penalty),
            "logit_bias must be numbers < inf by token id": isinstance(self.logit_bias, Mapping)
            and all(is_whole(t, 0) and _is_bias(b) for t, b in self.logit_bias.items()),
            "grammar must be a function": self.grammar is None or callable(self.grammar),
            "process must be a function": self.process is None or callable(self.process),
            "ends must be a function": self.ends is None or callable(self.ends),
            "seed must be a whole number in [0, 2**63)": self.seed is None
            or (is_whole(self.seed, 0) and self.seed < 2**63),
            "max_tokens must be a whole number >= 1": is_whole(self.max_tokens, 1),
            "stop must be a string or strings, and not empty": isinstance(self.stop, Sequence)
            and all(isinstance(stop, str) and stop for stop in self.stop_strings),
            "stop_token_ids must be token ids": isinstance(self.stop_token_ids, Collection)
            and all(is_whole(token, 0) for token in self.stop_token_ids),
            "ignore_eos must be True or False": isinstance(self.ignore_eos, bool),
            "logprobs must be a whole number >= 0": self.logprobs is None
            or (is_whole(self.logprobs, 0) and not isinstance(self.logprobs, bool)),
        }
        broken = [
            f"{rule}, not {getattr(self, rule.partition(' ')[0])!r:.80}"
            for rule, holds in allowed.items()
            if not holds
        ]
        if broken:
            raise ValueError("; ".join(broken))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, be it one or several."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the distribution is a point mass on the most likely token."""
        return self.temperature == 0

    @lazy
    def looks_back(self) -> bool:
        """Whether the distribution depends on what has been said, but for the model's logits."""
        is_penalised = self.repetition_penalty != 1 or self.frequency_penalty != 0
        is_function = self.grammar is not None or self.process is not None
        return is_penalised or self.presence_penalty != 0 or is_function

    @lazy
    def is_raw(self) -> bool:
        """Whether the distribution is that of the model's logits, as they are."""
        cut = not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        changed = self.temperature not in (0, 1) or bool(self.logit_bias) or self.looks_back
        return not cut and not changed
