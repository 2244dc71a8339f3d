"""Suffix lookup: what followed the longest suffix of the text where it occurred before.

Unlike an n-gram lookup it takes the longest match there is, looks at several earlier occurrences,
and lets them vote: how much they agree says how far the draft may be trusted.

*Memory.* A text is kept as its tokens, 4 bytes each, and a sorted array of keys, 8 bytes each: the
hash of every few tokens, and where they end. With the room that a growing text is given, that is at
most 13 bytes a token: 256 requests of 32,768 tokens take 109 MB.

*Time.* A lookup is a binary search and a few comparisons of short runs, whatever the length of the
text. The latest tokens, which have no keys yet, are searched as bytes. Once there are SPARE of them
they get their keys: that takes time linear in the text (90 us at 32,768 tokens), so texts are not
merged all in the same step.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core import (
    Budget,
    Draft,
    Law,
    Outcome,
    PointMass,
    Proposal,
    Request,
    chain,
    likeliest,
    survival,
    unite,
)
from outrider.drafters.shared import SEPARATOR, SharedTexts, tenant_of

ANCHOR = 3
"""The shortest match, in tokens: what is hashed. Longer matches are found by looking behind it."""

SPARE = 512
"""How many tokens may wait for their keys."""

TRUST = 4
"""A match of so many tokens is half as good as an endless one."""

WIDTH = 8
"""How many earlier occurrences are asked."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_64_BITS = 2**64 - 1
_BYTES = 4  # of a token
_END_BITS = 32  # of a key; the other 31 are the hash
Longs = NDArray[np.int64]


class Match(NamedTuple):
    """An earlier occurrence of the end of a text. The longest is the greatest, then the latest.

    length: how many tokens are the same
    end:    the position after them: what followed begins there
    """

    length: int
    end: int


class SuffixIndex:
    """Finds where the end of a growing text occurred before.

    max_match: tokens of a match that are looked at; longer ones are not told apart
    anchor: tokens of the shortest match
    salt: sets its hashes apart from those of other texts, and the steps in which it merges
    """

    def __init__(self, max_match: int = 64, anchor: int = ANCHOR, salt: int = 0) -> None:
        self._max_match, self._anchor, self._salt = max_match, anchor, salt & _64_BITS
        self._text = bytearray()  # can be searched for a run of tokens, which an array cannot
        self._keys: Longs = np.empty(0, np.int64)  # hash and end of each run, in order
        self._merged = 0  # runs that end at or before this position have their keys

    def __len__(self) -> int:
        return len(self._text) // _BYTES

    @property
    def nbytes(self) -> int:
        """Return the bytes it takes, but for some 200 that are the same for every text."""
        return sys.getsizeof(self._text) + self._keys.nbytes

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        self._text += array("i", tokens)
        phase = self._salt % SPARE
        if (len(self) + phase) // SPARE > (self._merged + phase) // SPARE:
            self._merge()

    def _merge(self) -> None:
        start = max(0, self._merged - self._anchor + 1)
        tokens = np.frombuffer(self._text, np.int32)[start:].astype(np.uint64)
        count = max(0, len(tokens) - self._anchor + 1)
        total = np.full(count, self._salt, np.uint64)
        for i in range(self._anchor):  # as _hash does
            total = (total + tokens[i : i + count]) * np.uint64(_MULTIPLIER)
        new = (total >> np.uint64(_END_BITS + 1)).astype(np.int64) << _END_BITS
        new |= np.arange(count) + start + self._anchor
        new.sort()
        keys = np.concatenate([self._keys, new])
        keys.sort(kind="stable")  # merges what is sorted in two parts
        self._keys, self._merged = keys, len(self)

    def _hash(self, run: bytes) -> int:
        total = self._salt
        for token in array("i", run):
            total = (total + token) * _MULTIPLIER & _64_BITS
        return total >> (_END_BITS + 1)

    def matches(self, of: SuffixIndex | None = None) -> list[Match]:
        """Return where the end of the text occurred before: the longest and the latest.

        of: another text whose end is meant
        """
        ending = bytes((self if of is None else of)._text[-_BYTES * self._max_match :])
        run = ending[-_BYTES * self._anchor :]
        if len(run) < _BYTES * self._anchor:
            return []
        recent = self._recent(run)
        ends = list(islice(recent, WIDTH))
        key = self._hash(run) << _END_BITS
        high = int(self._keys.searchsorted(key | len(self)))
        split = max(0, high - WIDTH + len(ends))
        ends += [k - key for k in self._keys[split:high].tolist() if k >= key]
        found = self._measure(ends, ending)
        if len(ends) == WIDTH and max(found).length < self._max_match:  # a longer one may be older
            old = self._keys[self._keys.searchsorted(key) : split] - key
            rest = np.concatenate([old, np.fromiter(recent, np.int64)[::-1]])
            found += self._measure(self._longest(rest, ending), ending)
        found = [match for match in found if match.length >= self._anchor]  # hashes may collide
        found.sort(reverse=True)
        return found[:WIDTH]

    def _recent(self, run: bytes) -> Iterator[int]:
        """Yield where the run ends among the tokens without keys, the latest first."""
        start = _BYTES * max(0, self._merged - self._anchor + 1)
        at = len(self._text) - len(run)  # where nothing follows is no match
        while (at := self._text.rfind(run, start, at + len(run) - 1)) >= 0:
            if at % _BYTES == 0:
                yield at // _BYTES + self._anchor

    def _measure(self, ends: Sequence[int], ending: bytes) -> list[Match]:
        """Return the matches at these ends, with their lengths."""
        found, span, last = [], len(ending) // _BYTES, int.from_bytes(ending, "little")
        for end in ends:
            first = max(0, end - span)
            here = int.from_bytes(self._text[_BYTES * first : _BYTES * end], "little")
            # aligned at their ends, the last tokens are the highest digits
            differ = (here << 8 * _BYTES * (first - end + span)) ^ last
            same = span - -(-differ.bit_length() // (8 * _BYTES))
            found.append(Match(min(same, end), end))
        return found

    def _longest(self, ends: Longs, ending: bytes) -> list[int]:
        """Return ends of the longest matches among those of an anchor, the latest ones."""
        text, last = np.frombuffer(self._text, np.int32), np.frombuffer(ending, np.int32)
        for n in range(self._anchor + 1, len(last) + 1):
            if len(ends) <= WIDTH:
                break
            ends = ends[int(ends[0] < n) :]  # all are n - 1 or more, and in order
            longer = ends[text[ends - n] == last[-n]]
            if not len(longer):
                break
            ends = longer
        latest: list[int] = ends[-WIDTH:].tolist()
        return latest

    def following(self, match: Match, count: int) -> tuple[int, ...]:
        """Return what followed a match. A copy that reaches the end goes on with itself."""
        run = tuple(array("i", self._text[_BYTES * match.end : _BYTES * (match.end + count)]))
        return run if len(run) == count else (run * (count // len(run) + 1))[:count]

    def tokens_from(self, start: int) -> list[int]:
        """Return the tokens at position `start` and beyond."""
        return array("i", self._text[_BYTES * start :]).tolist()


@dataclass(frozen=True)
class Continuation:
    """A chain of drafts, with the chance of each to be right as the occurrences vote.

    tokens, votes: [K]; votes[i] is the share of the occurrences that agree up to draft i
    length: of the match behind it
    other: what the strongest of those say who are the first to disagree, from the same beginning;
        nothing if all agree
    split: where they disagree
    share: of those who agree up to there, how many are on their side
    """

    tokens: tuple[int, ...] = ()
    votes: tuple[float, ...] = ()
    length: int = 0
    other: tuple[int, ...] = ()
    split: int = 0
    share: float = 0.0

    @property
    def trust(self) -> float:
        """How far to trust a match of this length."""
        return self.length / (self.length + TRUST)

    @property
    def confidences(self) -> tuple[float, ...]:
        """How sure to be of each token, given those before it: agreement, and a long match."""
        before = (1.0, *self.votes)
        return tuple(
            self.trust * share / above for share, above in zip(self.votes, before, strict=False)
        )

    def disagrees(self, least: float) -> bool:
        """Say whether a share of at least this is on the other side."""
        return len(self.other) > self.split and self.share >= least

    def branch(self) -> Draft[PointMass]:
        """Return the others' text as a chain."""
        sure = [self.trust] * len(self.other)
        sure[: self.split + 1] = [*self.confidences[: self.split], self.trust * self.share]
        return chain(self.other, confidences=sure)


def vote(
    index: SuffixIndex, count: int, width: int = WIDTH, of: SuffixIndex | None = None
) -> Continuation:
    """Return what most of the earlier occurrences say comes next, token by token.

    width: how many of them are asked
    of: another text that is to be continued
    """
    found = index.matches(of)[:width] if count else []
    if not found:
        return Continuation()
    # an occurrence that matches less is worth less: it may be another context
    says: dict[tuple[int, ...], int] = {}
    for match in found:
        text = index.following(match, count)
        says[text] = says.get(text, 0) + match.length
    total = sum(says.values())
    tokens: list[int] = []
    votes: list[float] = []
    other: tuple[int, ...] = ()
    split, share = 0, 0.0
    while len(says) > 1:
        i, weights = len(tokens), dict[int, int]()
        for text, weight in says.items():
            weights[text[i]] = weights.get(text[i], 0) + weight
        # of equals the one that the longest, latest match says: it comes first
        best = max(weights, key=weights.__getitem__)
        tokens.append(best)
        votes.append(weights[best] / total)
        if not other and len(weights) > 1:
            rest = {text: weight for text, weight in says.items() if text[i] != best}
            other, split = max(rest, key=rest.__getitem__), i
            share = weights[other[i]] / sum(weights.values())
        says = {text: weight for text, weight in says.items() if text[i] == best}
    [(text, weight)] = says.items()  # texts that agree to the end are the same
    alone = count - len(tokens)
    return Continuation(
        (*tokens, *text[len(tokens) :]),
        (*votes, *[weight / total] * alone),
        found[0].length,
        other[: _end(other)],
        split,
        share,
    )


def _end(text: Sequence[int]) -> int:
    """Return where a shared text ends."""
    return text.index(SEPARATOR) if SEPARATOR in text else len(text)


class SuffixDrafter:
    """Drafts what followed the longest suffix before, as far as the occurrences agree.

    min_vote: drafts end where fewer of the occurrences agree, as a share
    min_match: tokens of the shortest match
    max_match: tokens of a match that are looked at; longer ones are not told apart
    width: how many occurrences are asked
    shared_tokens: of finished outputs, so many tokens are kept for requests of the same tenant
        whose own text has no match. 0 for none: a draft that is found there is verified faster,
        and so tells users of a tenant about each other.
    """

    name = "suffix"

    def __init__(
        self,
        min_vote: float = 0.3,
        min_match: int = ANCHOR,
        max_match: int = 64,
        width: int = WIDTH,
        shared_tokens: int = 0,
    ) -> None:
        if not 0 <= min_vote <= 1 or not 1 <= min_match <= max_match or not 1 <= width <= WIDTH:
            raise ValueError(
                f"need 0 <= min_vote <= 1, 1 <= min_match <= max_match and 1 <= width <= {WIDTH}"
            )
        self._min_vote, self._width = min_vote, width
        self._new_index = partial(SuffixIndex, max_match, min_match)
        self._indices: dict[int, SuffixIndex] = {}
        self._shared = SharedTexts(shared_tokens, self._new_index)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all texts."""
        return sum(index.nbytes for index in self._indices.values()) + self._shared.nbytes

    def start(self, requests: Sequence[Request]) -> None:
        """Index the prompts."""
        for request in requests:
            index = self._indices[request.id] = self._new_index(request.id)
            index.extend([*request.prompt, *request.output])

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal[Law]:
        """Propose what most occurrences say; in a tree, also what the first to disagree say."""
        drafts = []
        for request, most in zip(requests, budget.max_drafts, strict=True):
            found = self._continue(request, most)
            count = sum(share >= self._min_vote for share in found.votes)  # votes only fall
            count = min(count, _end(found.tokens))
            draft = chain(found.tokens[:count], confidences=found.confidences[:count])
            if budget.trees and found.split < count and found.disagrees(self._min_vote):
                tree, _ = unite([draft, found.branch()])
                draft = tree.keep(likeliest(survival(tree.parents, tree.sure), most))
            drafts.append(draft)
        return Proposal.of(drafts)

    def _continue(self, request: Request, count: int) -> Continuation:
        own = self._indices[request.id]
        found = vote(own, count, self._width)
        if not found.tokens and count:
            for text in self._shared.of(tenant_of(request)):
                if (found := vote(text, count, self._width, of=own)).tokens:
                    break
        return found

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Index the emitted tokens."""
        for outcome in outcomes:
            self._indices[outcome.request.id].extend(outcome.tokens)

    def stop(self, requests: Sequence[Request]) -> None:
        """Forget the requests, but for outputs that are to be shared."""
        for request in requests:
            if index := self._indices.pop(request.id, None):
                self._shared.add(tenant_of(request), index.tokens_from(len(request.prompt)))
