"""Two greedy answers to one prompt: where they part, and whether rounding explains it.

Speculation computes a token's logits in a pass of another shape, and floating-point sums depend on
the shape. So an engine whose rule is exact may still choose the other of two tokens that it finds
almost equally likely: a *numerical tie*. It cannot choose a token that is clearly less likely; an
engine that does is *wrong*.

What "almost" means is measured where the answers still agree: there the engines have read the
same tokens, and any difference between what they say is noise. The noise that matters is that of
the *margin*, the distance between the two likeliest tokens: a tie is a margin within it. (The
logprob of the token itself hides it: for a token of probability 1 it is 0 whatever the noise.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from outrider.clients import Answer, Token

__all__ = ["Comparison", "Divergence", "Tolerance", "Verdict", "compare", "depart", "tolerance"]

Verdict = Literal["numerical tie", "wrong", "unknown"]

LEAST, MOST = 0.05, 0.5
"""Between these a tolerance is derived from the noise. Below the first: noise. Above the second:
not rounding."""

FACTOR = 2.0
"""How far beyond the largest noise seen on agreeing tokens a tie may lie."""

ENOUGH = 100
"""Agreeing tokens from which noise can be read; with fewer, `MOST` is tolerated."""

SPACINGS = (0.25, 0.125, 0.0625, 0.03125)
"""Of logits in half precision; bfloat16's are 0.125 apart between 16 and 32."""


@dataclass(frozen=True)
class Divergence:
    """The first place where two answers differ.

    position: how many tokens agree before it; None if an engine does not tell tokens apart
    before: the text that both have written
    plain, speculative: the token of each; None where its answer has ended, or is not told
    margin: how much likelier the plain engine finds its own token, in logprobs; None if unknown
    at_least: whether the margin may be larger: the other token is not among the alternatives
    own_margin: how much likelier the speculative engine finds its own; below 0, it has emitted a
        token that it finds less likely than plain's
    spacing: of the plain engine's logits here, if they lie on a grid; else 0
    """

    position: int | None
    before: str
    plain: Token | None
    speculative: Token | None
    margin: float | None = None
    at_least: bool = False
    own_margin: float | None = None
    spacing: float = 0.0

    def verdict(self, tolerance: float) -> Verdict:
        """Say whether rounding explains it.

        Logits on a grid may be off by one spacing, however small the noise is elsewhere.
        """
        if self.margin is None:
            return "unknown"
        allowed = max(tolerance, self.spacing) + 1e-6
        contradicts = self.own_margin is not None and self.own_margin < -allowed
        return "wrong" if self.margin > allowed or contradicts else "numerical tie"


@dataclass(frozen=True)
class Comparison:
    """What two answers to one prompt have in common.

    agreed: tokens before the first difference; total: tokens of the plain answer
    divergence: the first difference, or None
    faults: what differs although the tokens do not: counts, finish reasons, text
    drifts: |difference of logprobs| of each agreeing token
    noise: |difference of margins| of each agreeing token
    """

    agreed: int
    total: int
    divergence: Divergence | None
    faults: tuple[str, ...] = ()
    drifts: tuple[float, ...] = ()
    noise: tuple[float, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return self.divergence is None and not self.faults


def compare(plain: Answer, speculative: Answer) -> Comparison:
    """Compare the answers of two engines to one greedy query, best asked with logprobs."""
    ours, theirs = plain.tokens, speculative.tokens
    if not ours or not theirs:
        return _compare_texts(plain, speculative)
    pairs = list(zip(ours, theirs, strict=False))
    agreed = next((i for i, (a, b) in enumerate(pairs) if a.text != b.text), len(pairs))
    same = pairs[:agreed]
    divergence = None
    if agreed < max(len(ours), len(theirs)) and not _same_end(plain, speculative, agreed):
        a = ours[agreed] if agreed < len(ours) else None
        b = theirs[agreed] if agreed < len(theirs) else None
        divergence = _divergence(agreed, "".join(token.text for token, _ in same), a, b)
    return Comparison(
        agreed,
        len(ours),
        divergence,
        () if divergence else tuple(_faults(plain, speculative)),
        tuple(_finite(_drift(a, b) for a, b in same)),
        tuple(_finite(_noise(a, b) for a, b in same)),
    )


def depart(plain: Answer, text: str) -> Divergence:
    """Return where a text leaves the answer of a plain engine that told its logprobs.

    The text's own token there is taken to be the longest alternative that it goes on with.
    """
    before = ""
    for position, token in enumerate(plain.tokens):
        if text.startswith(before + token.text):
            before += token.text
            continue
        rest = text[len(before) :]
        found = [Token(other) for other, _ in token.top if other and rest.startswith(other)]
        other = max(found, key=lambda one: len(one.text), default=Token(rest[:1]))
        return _divergence(position, before, token, other if rest else None)
    return Divergence(None, before, None, None)  # it goes on where plain has ended


def _compare_texts(plain: Answer, speculative: Answer) -> Comparison:
    """Compare without tokens: a difference cannot be judged then."""
    if plain.text == speculative.text:
        faults = tuple(_faults(plain, speculative))
        return Comparison(plain.count, plain.count, None, faults)
    pairs = zip(plain.text, speculative.text, strict=False)
    shorter = min(len(plain.text), len(speculative.text))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    agreed = round(plain.count * same / max(1, len(plain.text)))
    return Comparison(agreed, plain.count, Divergence(None, plain.text[:same], None, None))


def _same_end(plain: Answer, speculative: Answer, agreed: int) -> bool:
    """Whether one answer only lists the token that ends it, and the other does not."""
    ended = plain.finish_reason == speculative.finish_reason == "stop"
    rest = max(len(plain.tokens), len(speculative.tokens)) - agreed
    listed = agreed == min(len(plain.tokens), len(speculative.tokens))
    return ended and listed and rest == 1 and plain.text == speculative.text


def _faults(plain: Answer, speculative: Answer) -> Iterator[str]:
    for what, a, b in (
        ("text", plain.text, speculative.text),
        ("finish reason", plain.finish_reason, speculative.finish_reason),
        ("number of tokens", plain.count, speculative.count),
    ):
        if a != b:
            yield f"{what}: {_ending(a)} against {_ending(b)}"


def _ending(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 60 else f"...{said[-57:]}"


def _divergence(position: int, before: str, a: Token | None, b: Token | None) -> Divergence:
    if a is None or b is None:  # the end has no name among the alternatives
        return Divergence(position, before, a, b)
    margin, at_least = _margin(a, b.text)
    own, bounded = _margin(b, a.text)
    # a bound below would make the engine look surer of itself than it may be: only its sign counts
    return Divergence(
        position, before, a, b, margin, at_least, None if bounded else own, _spacing(a)
    )


def _margin(token: Token, other: str) -> tuple[float | None, bool]:
    """Return how much likelier a token is than another, and whether it may be more."""
    if token.logprob is None or not token.top:
        return None, False
    value = dict(reversed(token.top)).get(other)
    margin = token.logprob - (token.top[-1][1] if value is None else value)
    # some engines write -inf or -9999 for what they do not tell
    return (margin, value is None) if abs(margin) < 1000 else (None, False)


def _spacing(token: Token) -> float:
    """Return the grid that the logits behind these logprobs lie on, or 0."""
    steps = [token.top[0][1] - value for _, value in token.top[1:]]
    if len(steps) < 3:
        return 0.0
    fits = (s for s in SPACINGS if all(abs(d - s * round(d / s)) < 1e-4 for d in steps))
    return next(fits, 0.0)


def _drift(a: Token, b: Token) -> float | None:
    if a.logprob is None or b.logprob is None:
        return None
    # llama.cpp writes 0, and no alternatives, for what it does not know of an accepted draft
    if any(token.logprob == 0 and not token.top for token in (a, b)):
        return None
    return abs(a.logprob - b.logprob)


def _noise(a: Token, b: Token) -> float | None:
    """Return how far apart two engines see the runner-up from the token that both emit."""
    second = next((text for text, _ in a.top if text != a.text), None)
    if second is None:
        return None
    (ours, _), (theirs, bounded) = _margin(a, second), _margin(b, second)
    return None if ours is None or theirs is None or bounded else abs(ours - theirs)


def _finite(values: Iterable[float | None]) -> Iterator[float]:
    return (value for value in values if value is not None and math.isfinite(value))


@dataclass(frozen=True)
class Tolerance:
    """How large a margin rounding explains here, and why."""

    value: float
    why: str


def tolerance(comparisons: Iterable[Comparison]) -> Tolerance:
    """Return what the noise on agreeing tokens tolerates; see the module's docstring.

    Only tokens before the first divergence speak, so an engine that is wrong does not excuse itself
    by what it writes afterwards; and whatever they say, `MOST` is the most.
    """
    noise = [value for comparison in comparisons for value in comparison.noise]
    if len(noise) < ENOUGH:
        return Tolerance(MOST, f"only {len(noise)} agreeing tokens to read the noise from")
    largest = max(noise)
    value = min(MOST, max(LEAST, FACTOR * largest))
    why = f"{FACTOR:g} x the largest noise on {len(noise):,} agreeing tokens ({largest:.3g})"
    if value != FACTOR * largest:
        why += f", but {'at least' if value == LEAST else 'at most'} {value:g}"
    return Tolerance(value, why)
