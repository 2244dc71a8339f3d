"""Texts that grow, and where the end of each occurred before: for all requests in one call.

A text is a row of tokens. Every run of ANCHOR tokens is hashed; runs of one hash are chained, the
latest first. To look the end of a text up is to walk the chain of its last run: at most PROBES
steps, whatever the length of the text. Longer matches are found by looking behind the run.

*Memory.* 4 bytes a token for the text, 4 for the chains, 4 to 8 for the heads of the chains: at
most 16 bytes a token. Rows are as wide as the longest text, but memory that was never written to
takes no room.

*Time.* With numba about a microsecond for each request, for looking up and for learning new
tokens each. Without, the same loops run in Python, and take about a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.proposal import Floats, Ints
from outrider.drafters.compiled import compiled

ANCHOR = 3
"""The shortest match, in tokens: what is hashed."""

PROBES = 128
"""How many earlier occurrences of the last run are looked at, the latest first."""

TRUST = 4
"""A match of so many tokens is half as good as an endless one."""

WIDTH = 8
"""How many of the occurrences are asked: the longest matches, of equals the latest."""

SEPARATOR = -1
"""Ends each of several texts in one row. No token, so that no text goes on with the next."""

_FEWEST_BITS = 6  # of a hash table
Tokens = NDArray[np.int32]


class Match(NamedTuple):
    """An earlier occurrence of the end of a text.

    length: how many tokens are the same
    end:    the position after them: what followed begins there
    """

    length: int
    end: int


class Arena(NamedTuple):
    """The arrays of all texts: a row for each.

    tokens: [rows, width]
    before: [rows, width] for each run, by where it ends: where the one before it of its hash ends
    heads: [rows, width] for each hash, where the latest run of it ends; 0 for none
    lengths: [rows] of the texts
    bits: [rows] of the hashes
    salts: [rows] set the hashes of a text apart from those of others
    """

    tokens: Tokens
    before: Tokens
    heads: Tokens
    lengths: Ints
    bits: Ints
    salts: Ints


class Drafts(NamedTuple):
    """Where drafts are written to: tokens, parents and confidences."""

    tokens: Ints
    parents: Ints
    sure: Floats

    @staticmethod
    def room(size: int) -> Drafts:
        """Return room for so many."""
        return Drafts(np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size))

    def first(self, count: int) -> Drafts:
        """Return the first of them."""
        return Drafts(self.tokens[:count], self.parents[:count], self.sure[:count])


class Texts:
    """Growing texts, each in a row of its own.

    anchor: tokens of the shortest match
    max_match: tokens of a match that are looked at; longer ones are not told apart
    """

    def __init__(self, anchor: int = ANCHOR, max_match: int = 64) -> None:
        self._anchor, self._max_match = anchor, max_match
        self._free: list[int] = []
        self._arena = _arena(0, 256)

    @property
    def lengths(self) -> Ints:
        """[rows] how many tokens each text has; 0 for a row without one."""
        return self._arena.lengths

    @property
    def nbytes(self) -> int:
        """Return the bytes that the texts take."""
        tables = 1 << self._arena.bits[self.lengths > 0]
        return int(8 * self.lengths.sum() + 4 * tables.sum())

    def open(self, salt: int = 0) -> int:
        """Return the row of a new text.

        salt: sets its hashes apart from those of other texts
        """
        rows, width = self._arena.tokens.shape
        if not self._free:
            self._grow(max(8, 2 * rows), width)
        row = self._free.pop()
        self._arena.salts[row], self._arena.bits[row] = salt & 0x7FFFFFFF, _FEWEST_BITS
        return row

    def close(self, row: int) -> None:
        """Forget a text."""
        self._arena.heads[row, : 1 << self._arena.bits[row]] = 0
        self._arena.lengths[row] = 0
        self._free.append(row)

    def extend(self, row: int, tokens: Sequence[int] | Ints) -> None:
        """Append to one text."""
        self.extend_all(np.array([row]), np.asarray(tokens, np.int64), np.array([len(tokens)]))

    def extend_all(self, rows: Ints, tokens: Ints, counts: Ints) -> None:
        """Append to several texts. tokens: [T] those of each row, one after the other."""
        if not len(tokens):
            return
        longest = int((self.lengths[rows] + counts).max())
        if longest > self._arena.tokens.shape[1]:
            self._grow(len(self.lengths), 1 << (longest - 1).bit_length())
        _extend(self._arena, rows, tokens, counts, self._anchor)

    def tokens_from(self, row: int, start: int) -> list[int]:
        """Return the tokens of a text at position `start` and beyond."""
        found: list[int] = self._arena.tokens[row, start : self.lengths[row]].tolist()
        return found

    def matches(self, row: int, of: tuple[Texts, int] | None = None) -> list[Match]:
        """Return where the end of a text occurred before: the longest first, then the latest.

        of: another text whose end is meant
        """
        ends, lengths = np.zeros(WIDTH, np.int64), np.zeros(WIDTH, np.int64)
        found = self._find(row, (self, row) if of is None else of, ends, lengths)
        pairs = zip(lengths[:found].tolist(), ends[:found].tolist(), strict=True)
        return [Match(*pair) for pair in pairs]

    def propose(
        self, rows: Ints, most: Ints, width: int, min_vote: float, trees: bool
    ) -> tuple[Ints, Drafts]:
        """Return what follows the end of each text, as drafts: see `_draft`.

        Returns their number for each row, and those of all rows one after the other.

        most: the most drafts for each row
        """
        counts, drafts = np.zeros(len(rows), np.int64), Drafts.room(int(most.sum()))
        limits = self._anchor, self._max_match, width
        total = _propose(self._arena, rows, most, *limits, min_vote, trees, counts, drafts)
        return counts, drafts.first(total)

    def propose_one(
        self, row: int, of: tuple[Texts, int], most: int, width: int, min_vote: float, trees: bool
    ) -> Drafts:
        """Return what follows the end of another text in this one, as drafts."""
        ends, lengths = np.zeros(width, np.int64), np.zeros(width, np.int64)
        found, drafts = self._find(row, of, ends, lengths), Drafts.room(most)
        if not found:
            return drafts.first(0)
        text, length = self._arena.tokens[row], int(self.lengths[row])
        matches = ends, lengths, found
        return drafts.first(_draft(text, length, *matches, most, min_vote, trees, drafts, 0))

    def _find(self, row: int, of: tuple[Texts, int], ends: Ints, lengths: Ints) -> int:
        other, its_row = of
        limits = self._anchor, self._max_match
        return _matches(self._arena, row, other._arena, its_row, *limits, ends, lengths)

    def _grow(self, rows: int, width: int) -> None:
        """Make room for more texts, or longer ones."""
        old, self._arena = self._arena, _arena(rows, width)
        used = len(old.lengths)
        self._arena.lengths[:used], self._arena.bits[:used] = old.lengths, old.bits
        self._arena.salts[:used] = old.salts
        for row in np.flatnonzero(old.lengths).tolist():
            length, size = old.lengths[row], 1 << old.bits[row]
            self._arena.tokens[row, :length] = old.tokens[row, :length]
            self._arena.before[row, :length] = old.before[row, :length]
            self._arena.heads[row, :size] = old.heads[row, :size]
        self._free += range(rows - 1, used - 1, -1)


def _arena(rows: int, width: int) -> Arena:
    """Return new arrays. They take memory when they are written to."""

    def texts() -> Tokens:
        return np.zeros((rows, width), np.int32)

    def numbers(value: int = 0) -> Ints:
        return np.full(rows, value, np.int64)

    return Arena(texts(), texts(), texts(), numbers(), numbers(_FEWEST_BITS), numbers())


# -- the loops. They are compiled, so they are plain: numbers and arrays


@compiled
def _bucket(text: Tokens, end: int, anchor: int, bits: int, salt: int) -> int:
    """Return where the run that ends before `end` belongs in a table of 2**bits entries."""
    found = salt
    for i in range(end - anchor, end):
        found = ((found + int(text[i])) * 1540483477) & 0x7FFFFFFF
        found ^= found >> 15
    return found & ((1 << bits) - 1)


@compiled
def _extend(arena: Arena, rows: Ints, new: Ints, counts: Ints, anchor: int) -> None:
    """Append new tokens to each row, and chain the runs that end there."""
    at = 0
    for r in range(len(rows)):
        row, length = rows[r], arena.lengths[rows[r]]
        text, before, heads = arena.tokens[row], arena.before[row], arena.heads[row]
        first = max(anchor, length + 1)
        for _ in range(counts[r]):
            text[length] = new[at]
            length += 1
            at += 1
        arena.lengths[row] = length
        if length > 1 << arena.bits[row]:  # the table is full: all runs go to a larger one
            while length > 1 << arena.bits[row]:
                arena.bits[row] += 1
            heads[: 1 << arena.bits[row]] = 0
            first = anchor
        for end in range(first, length + 1):
            bucket = _bucket(text, end, anchor, int(arena.bits[row]), int(arena.salts[row]))
            before[end - 1] = heads[bucket]
            heads[bucket] = end


@compiled
def _matches(
    arena: Arena,
    row: int,
    other: Arena,
    its_row: int,
    anchor: int,
    max_match: int,
    ends: Ints,
    lengths: Ints,
) -> int:
    """Find where the end of another text occurs in this one. Return the number of matches.

    ends, lengths: [width] they go here: the longest first, of equals the latest
    """
    text, length = arena.tokens[row], arena.lengths[row]
    ending, span = other.tokens[its_row], other.lengths[its_row]
    found, width = 0, len(ends)
    if span < anchor or length < anchor:
        return found
    bucket = _bucket(ending, span, anchor, int(arena.bits[row]), int(arena.salts[row]))
    end = int(arena.heads[row, bucket])
    for _ in range(PROBES):
        if end == 0:
            break
        if end < length:  # where nothing follows is no match
            same, most = 0, min(end, span, max_match)
            while same < most and text[end - 1 - same] == ending[span - 1 - same]:
                same += 1
            if same >= anchor and (found < width or same > lengths[width - 1]):
                found = min(found + 1, width)
                place = found - 1
                while place > 0 and same > lengths[place - 1]:
                    ends[place], lengths[place] = ends[place - 1], lengths[place - 1]
                    place -= 1
                ends[place], lengths[place] = end, same
                if found == width and lengths[width - 1] == max_match:
                    break  # none is better
        end = int(arena.before[row, end - 1])
    return found


@compiled
def _draft(
    text: Tokens,
    length: int,
    ends: Ints,
    lengths: Ints,
    found: int,
    most: int,
    min_vote: float,
    trees: bool,
    out: Drafts,
    at: int,
) -> int:
    """Write what the matches say comes next, from `at` on. Return how many drafts that is.

    They vote, token by token, each with its length: one that matches less may be another context.
    Drafts end where the share of the votes that agree up to there falls below min_vote. In a tree,
    those who are the first to disagree have a branch of their own, if their share is as large.

    A match whose text reaches the end goes on with itself.
    """
    total = 0
    for i in range(found):
        total += lengths[i]
    trust = lengths[0] / (lengths[0] + TRUST)
    agree, above, count = (1 << found) - 1, 1.0, 0
    split, other, share = -1, 0, 0.0
    while count < most:
        best, best_weight, second, second_weight, alive = -1, 0, -1, 0, 0
        for i in range(found):
            if not agree >> i & 1:
                continue
            alive += lengths[i]
            says, weight, is_first = _says(text, length, ends[i], count), 0, True
            for j in range(found):
                if agree >> j & 1 and _says(text, length, ends[j], count) == says:
                    weight += lengths[j]
                    is_first = is_first and j >= i
            if is_first and weight > best_weight:
                second, second_weight = best, best_weight
                best, best_weight = i, weight
            elif is_first and weight > second_weight:
                second, second_weight = i, weight
        token, vote = _says(text, length, ends[best], count), best_weight / total
        if token == SEPARATOR or vote < min_vote:
            break
        if split < 0 and second >= 0:
            split, other, share = count, second, second_weight / alive
        for i in range(found):
            if _says(text, length, ends[i], count) != token:
                agree &= ~(1 << i)
        out.tokens[at + count], out.parents[at + count] = token, count - 1
        out.sure[at + count] = trust * vote / above
        above = vote
        count += 1
    if not trees or split < 0 or split >= count or share < min_vote:
        return count
    return _branch(text, length, ends[other], split, share, trust, count, most, out, at)


@compiled
def _says(text: Tokens, length: int, end: int, place: int) -> int:
    """Return the token that follows a match, so many places behind it."""
    return int(text[end + place % (length - end)])


@compiled
def _branch(
    text: Tokens,
    length: int,
    end: int,
    split: int,
    share: float,
    trust: float,
    count: int,
    most: int,
    out: Drafts,
    at: int,
) -> int:
    """Put a branch beside a chain of drafts, from `split` on. Return the number of drafts.

    Of both the likeliest stay: as many as there may be.
    """
    along = 1.0  # the chance that the chain's drafts so far are accepted
    for i in range(split):
        along *= out.sure[at + i]
    aside = along * trust * share  # and that the branch's next one is
    kept, beside = split, 0
    while kept + beside < most:
        next_along = along * out.sure[at + kept] if kept < count else -1.0
        if _says(text, length, end, split + beside) == SEPARATOR:
            aside = -1.0
        if next_along < 0 and aside < 0:
            break
        if next_along >= aside:
            along = next_along
            kept += 1
        else:
            aside *= trust
            beside += 1
    for i in range(beside):
        out.tokens[at + kept + i] = _says(text, length, end, split + i)
        out.parents[at + kept + i] = kept + i - 1 if i else split - 1
        out.sure[at + kept + i] = trust if i else trust * share
    return kept + beside


@compiled
def _propose(
    arena: Arena,
    rows: Ints,
    most: Ints,
    anchor: int,
    max_match: int,
    width: int,
    min_vote: float,
    trees: bool,
    counts: Ints,
    out: Drafts,
) -> int:
    """Write the drafts of each row, one after the other. Return how many there are."""
    ends, lengths, at = np.zeros(width, np.int64), np.zeros(width, np.int64), 0
    for r in range(len(rows)):
        if most[r] == 0:
            continue
        row = rows[r]
        found = _matches(arena, row, arena, row, anchor, max_match, ends, lengths)
        if found:
            text, length = arena.tokens[row], arena.lengths[row]
            matches = ends, lengths, found
            counts[r] = _draft(text, length, *matches, most[r], min_vote, trees, out, at)
            at += counts[r]
    return at
