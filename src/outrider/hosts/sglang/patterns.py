"""How long a pattern may take in the scheduler, which looks for it after every step."""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Iterable
from typing import Any

if sys.version_info >= (3, 11):
    import re._parser as parser  # type: ignore[import-not-found, unused-ignore]
else:
    import sre_parse as parser

TEXT = 4096
"""Characters of a text in which a pattern is looked for, at which its time is bounded."""

MOST_WAYS = 100_000_000
"""Ways to match a pattern in such a text, from all its places. More take seconds to try."""

LONGEST = 256
"""Characters that a pattern may have: as many bytes as SGLang 0.5.23 takes."""


def are_quick(patterns: Iterable[str]) -> bool:
    """Return whether patterns can be looked for in every step. Raises ValueError if one is none."""
    return TEXT * sum(map(_ways_in, patterns)) <= MOST_WAYS


def is_quick(pattern: str) -> bool:
    """Return whether a pattern can be looked for in every step. Raises ValueError if it is none."""
    return are_quick([pattern])


def _ways_in(pattern: str) -> float:
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
    return _ways(tree)


def _ways(tree: Any) -> float:
    """Return a bound on the ways in which a part of a pattern matches from one place."""
    total = 1.0
    for kind, value in tree:
        total *= _ways_of(str(kind), value)
    return total


def _ways_of(kind: str, value: Any) -> float:
    if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "CATEGORY"):
        return 1.0
    if kind == "SUBPATTERN":
        return _ways(value[-1])
    if kind in ("ASSERT", "ASSERT_NOT"):
        return _ways(value[1])
    if kind == "BRANCH":
        return sum(map(_ways, value[1]))
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, most, inner = value
        times, ways = min(int(most), TEXT), _ways(inner)
        if inner.getwidth()[0] == 0 and int(least) > 1:
            # nothing is matched as often as it must be, however often that is: `(?:\b){4000000000}`
            return math.inf if ways > 1.0 else float(least)
        if ways == 1.0:
            return float(max(1, times - min(int(least), TEXT) + 1))
        return math.inf if times * len(bin(int(min(ways, 1e9)))) > 60 else ways ** (times + 1)
    return math.inf  # references to groups, and what later Pythons may add
