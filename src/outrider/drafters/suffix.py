"""Suffix lookup: what followed the longest suffix of the text where it occurred before.

Unlike an n-gram lookup it takes the longest match there is, looks at several earlier occurrences,
and lets them vote: how much they agree says how far the draft may be trusted.

*Memory.* A sequence is kept as arrays: its tokens (5 bytes each, with room to grow), and the hash
of every ANCHOR tokens with its position, in the order of the hashes (12 bytes). Tokens emitted
since the last merge are in a dict until there are enough of them to be merged. That makes 17 bytes
a token, and SPARE entries of about 200: 256 requests of 32,768 tokens take at most 170 MB.

*Time.* A lookup is a binary search and a few comparisons of short runs, whatever the length of the
sequence; a merge sorts, and is paid for by the tokens it takes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.core import Budget, Law, Outcome, Proposal, Request, chain

ANCHOR = 3
"""The shortest match, in tokens: what is hashed. Longer matches are found by looking behind it."""

SPARE = 512
"""How many tokens may wait for a merge."""

TRUST = 4
"""A match of so many tokens is half as good as an endless one."""

WIDTH = 8
"""How many earlier occurrences are asked: the latest of the longest."""

_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
Longs = NDArray[np.uint64]
Ints = NDArray[np.int32]


def _hashes(tokens: Ints) -> Longs:
    """Hash each run of ANCHOR tokens: entry i is of tokens[i : i + ANCHOR]."""
    count = len(tokens) - ANCHOR + 1
    total = np.zeros(max(0, count), np.uint64)
    for i, multiplier in enumerate(_MULTIPLIERS):
        total += (tokens[i : i + count].astype(np.uint64) + np.uint64(1)) * multiplier
        total ^= total >> np.uint64(29)
    return total


@dataclass(frozen=True)
class Match:
    """An earlier occurrence of the end of a text.

    end:    the position after it: what followed begins there
    length: how many tokens before that are the same
    """

    end: int
    length: int


class SuffixIndex:
    """Finds where the end of a growing text occurred before."""

    def __init__(self, max_match: int = 64) -> None:
        self._tokens: Ints = np.empty(0, np.int32)
        self._length = 0
        self._max_match = max_match
        self._sorted: Longs = np.empty(0, np.uint64)  # hashes, in order
        self._ends: Ints = np.empty(0, np.int32)  # the position after each hashed run
        self._recent: dict[int, list[int]] = {}
        self._merged = 0  # runs that end at or before this position are in the arrays

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Return the bytes of its arrays, without the dict of recent tokens."""
        return self._tokens.nbytes + self._sorted.nbytes + self._ends.nbytes

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        first, new = self._length, len(tokens)
        if first + new > len(self._tokens):
            grown = np.empty((first + new) * 5 // 4 + 64, np.int32)
            grown[:first] = self._tokens[:first]
            self._tokens = grown
        self._tokens[first : first + new] = tokens
        self._length = first + new
        if self._length - self._merged > SPARE:
            self._merge()
            return
        start = max(0, first - ANCHOR + 1)
        for i, value in enumerate(_hashes(self._tokens[start : self._length]).tolist()):
            end = start + i + ANCHOR
            if end > first:
                self._recent.setdefault(value, []).append(end)

    def _merge(self) -> None:
        start = max(0, self._merged - ANCHOR + 1)
        new = _hashes(self._tokens[start : self._length])
        ends = np.arange(start + ANCHOR, self._length + 1, dtype=np.int32)
        keep = ends > self._merged
        hashes = np.concatenate([self._sorted, new[keep]])
        all_ends = np.concatenate([self._ends, ends[keep]])
        order = np.argsort(hashes, kind="stable")  # of equals, the earlier position first
        self._sorted, self._ends = hashes[order], all_ends[order]
        self._recent = {}
        self._merged = self._length

    def matches(self) -> list[Match]:
        """Return the latest occurrences of the text's end before it, the longest first."""
        if self._length < ANCHOR:
            return []
        value = _hashes(self._tokens[self._length - ANCHOR : self._length])[0]
        recent = self._recent.get(int(value), [])[-WIDTH - 1 :]
        low = int(np.searchsorted(self._sorted, value, "left"))
        high = int(np.searchsorted(self._sorted, value, "right"))
        ends = [*self._ends[max(low, high - WIDTH - 1) : high].tolist(), *recent]
        found = [Match(end, self._same(end)) for end in ends if end < self._length]
        found = [match for match in found if match.length >= ANCHOR]  # hashes may collide
        return sorted(found, key=lambda match: (match.length, match.end), reverse=True)[:WIDTH]

    def _same(self, end: int) -> int:
        """Return how many tokens before `end` are those at the end of the text."""
        span = min(end, self._max_match)
        here = self._tokens[end - span : end]
        last = self._tokens[self._length - span : self._length]
        differ = np.flatnonzero(here != last)
        return span - (int(differ[-1]) + 1 if len(differ) else 0)

    def following(self, match: Match, count: int) -> list[int]:
        """Return what followed a match. A copy that reaches the end goes on with itself."""
        period = self._length - match.end
        if count <= period:
            return [int(token) for token in self._tokens[match.end : match.end + count]]
        return [int(self._tokens[match.end + i % period]) for i in range(count)]


@dataclass(frozen=True)
class Continuation:
    """A chain of drafts, with the chance of each to be right as the occurrences vote.

    tokens, votes: [K]; votes[i] is the share of the occurrences that agree up to draft i
    length: of the match behind it
    """

    tokens: tuple[int, ...]
    votes: tuple[float, ...]
    length: int

    @property
    def confidences(self) -> tuple[float, ...]:
        """How sure to be of each token, given those before it: agreement, and a long match."""
        trust = self.length / (self.length + TRUST)
        before = (1.0, *self.votes)
        return tuple(
            trust * share / above for share, above in zip(self.votes, before, strict=False)
        )


def vote(index: SuffixIndex, count: int) -> Continuation:
    """Return what most of the earlier occurrences say comes next, token by token."""
    found = index.matches()
    if not found or not count:
        return Continuation((), (), 0)
    # an occurrence that matches less is worth less: it may be another context
    says = [(index.following(match, count), float(match.length)) for match in found]
    total = sum(weight for _, weight in says)
    tokens: list[int] = []
    votes: list[float] = []
    for i in range(count):
        weights: dict[int, float] = {}
        for text, weight in says:
            weights[text[i]] = weights.get(text[i], 0.0) + weight
        # of equals the one that the longest, latest match says: it comes first
        best = max(weights, key=lambda token: weights[token])
        tokens.append(best)
        votes.append(weights[best] / total)
        says = [(text, weight) for text, weight in says if text[i] == best]
    return Continuation(tuple(tokens), tuple(votes), found[0].length)


class SuffixDrafter:
    """Drafts what followed the longest suffix before, as far as the occurrences agree.

    min_vote: drafts end where fewer of the occurrences agree, as a share
    max_match: tokens of a match that are looked at; longer ones are not told apart
    """

    name = "suffix"

    def __init__(self, min_vote: float = 0.3, max_match: int = 64) -> None:
        if not 0 <= min_vote <= 1 or max_match < ANCHOR:
            raise ValueError(f"need 0 <= min_vote <= 1 and max_match >= {ANCHOR}")
        self._min_vote, self._max_match = min_vote, max_match
        self._indices: dict[int, SuffixIndex] = {}

    def start(self, requests: Sequence[Request]) -> None:
        """Index the prompts."""
        for request in requests:
            index = self._indices[request.id] = SuffixIndex(self._max_match)
            index.extend([*request.prompt, *request.output])

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal[Law]:
        """Propose what most occurrences say."""
        drafts = []
        for request, most in zip(requests, budget.max_drafts, strict=True):
            found = vote(self._indices[request.id], most)
            count = sum(share >= self._min_vote for share in found.votes)  # votes only fall
            drafts.append(chain(found.tokens[:count], confidences=found.confidences[:count]))
        return Proposal.of(drafts)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Index the emitted tokens."""
        for outcome in outcomes:
            self._indices[outcome.request.id].extend(outcome.tokens)

    def stop(self, requests: Sequence[Request]) -> None:
        """Forget the requests."""
        for request in requests:
            self._indices.pop(request.id, None)
