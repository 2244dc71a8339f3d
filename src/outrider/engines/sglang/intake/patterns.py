"""How long a pattern may take in the scheduler, which looks for it after every step."""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

if sys.version_info >= (3, 11):
    import re._parser as parser  # type: ignore[import-not-found, unused-ignore]
else:
    import sre_parse as parser

TEXT = 4096
"""Characters of the shortest text for which a pattern's time is bounded."""

CHARACTERS = 4
"""Characters that a token of an answer has, about."""

MOST_WAYS = 100_000_000
"""Ways to match a pattern in such a text, from all its places. More take seconds to try."""

LONGEST = 256
"""Characters that a pattern may have: as many bytes as SGLang 0.5.23 takes."""


def check_patterns(patterns: Sequence[str], max_tokens: int) -> None:
    """Raise ValueError if patterns cannot be looked for in every step of an answer.

    SGLang looks through all of it for a pattern whose repeats have no bounds.

    max_tokens: that the answer may have
    """
    if patterns and not are_quick(patterns, max(TEXT, CHARACTERS * max_tokens)):
        raise ValueError(
            f"stop_regex takes too long in an answer of {max_tokens:,} tokens: bound its repeats, "
            r"as `\s{0,8}`, or set a smaller max_new_tokens"
        )


def are_quick(patterns: Iterable[str], length: int = TEXT) -> bool:
    """Return whether patterns can be looked for in every step. Raises ValueError if one is none.

    length: characters of the text
    """
    return length * sum(_ways_in(pattern, length) for pattern in patterns) <= MOST_WAYS


def _ways_in(pattern: str, length: int) -> float:
    """Return a bound on the ways to match a pattern from one place. Raises ValueError.

    Python tries every way to match, one after the other: `(a+)+$` takes twice as long for each
    further `a`.
    """
    if len(pattern) > LONGEST:
        return math.inf
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = parser.parse(pattern)
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no pattern ({error!s:.80})") from error
    return _ways(tree, length)


def _ways(tree: Any, length: int) -> float:
    """Return a bound on the ways in which a part of a pattern matches from one place."""
    total = 1.0
    for kind, value in tree:
        total *= _ways_of(str(kind), value, length)
    return total


def _ways_of(kind: str, value: Any, length: int) -> float:
    if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "CATEGORY"):
        return 1.0
    if kind == "SUBPATTERN":
        return _ways(value[-1], length)
    if kind in ("ASSERT", "ASSERT_NOT"):
        return _ways(value[1], length)
    if kind == "BRANCH":
        return sum(_ways(branch, length) for branch in value[1])
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, most, inner = value
        times, ways = min(int(most), length), _ways(inner, length)
        if inner.getwidth()[0] == 0 and int(least) > 1:
            # nothing is matched as often as it must be, however often that is: `(?:\b){4000000000}`
            return math.inf if ways > 1.0 else float(least)
        if ways == 1.0:
            return float(max(1, times - min(int(least), length) + 1))
        return math.inf if times * len(bin(int(min(ways, 1e9)))) > 60 else ways ** (times + 1)
    return math.inf  # references to groups, and what later Pythons may add
