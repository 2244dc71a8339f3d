"""Checks of single values in a request: what a value has to be, if it is something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outrider.engines.sglang.intake.grammars import fault, fault_of_json
from outrider.engines.sglang.intake.patterns import are_quick

MAX_REAL = 3.4028234e38
"""The largest number of 32 bits."""

MAX_BIAS = 1e10
"""The largest bias: what it makes of a logit stays a number when a temperature divides it."""

MIN_PENALTY = 1e-10
"""The least repetition penalty, which divides logits, too."""

INT32, INT64 = 2**31 - 1, 2**63 - 1

MAX_STOPS = 1024
"""Stop strings of a request; each is looked for after every step."""

MAX_NESTED = 32
"""Lists and mappings within each other in a value; what sends it to the scheduler recurses."""

Check = Callable[[Any], "str | None"]
"""Returns what a value has to be, if it is something else."""


def whole(low: int, high: int) -> Check:
    """Return a check that a value is a whole number from `low` to `high`."""

    def check(value: Any) -> str | None:
        is_whole = isinstance(value, int)  # 20.0 is none
        return None if is_whole and low <= value <= high else f"a whole number in [{low}, {high}]"

    return check


def real(low: float = -MAX_REAL, high: float = MAX_REAL) -> Check:
    """Return a check that a value is a number from `low` to `high`, which is finite."""

    def check(value: Any) -> str | None:
        is_real = isinstance(value, (int, float))  # NaN is in no range
        return None if is_real and low <= value <= high else f"a number in [{low:g}, {high:g}]"

    return check


def text(value: Any) -> str | None:
    """Check that a value is a text that can be encoded: no half of a surrogate pair alone."""
    return None if isinstance(value, str) and _is_unicode(value) else "a text in Unicode"


def texts(value: Any) -> str | None:
    """Check that a value is a text, or a list of texts."""
    found = value if isinstance(value, list) else [value]
    if len(found) > MAX_STOPS:
        return f"at most {MAX_STOPS} texts"
    return None if all(text(one) is None for one in found) else "a text, or a list of texts"


def patterns(value: Any) -> str | None:
    """Check that a value is a pattern, or a list of patterns, that the scheduler can look for."""
    if (wanted := texts(value)) is not None:
        return wanted
    try:
        quick = are_quick(value if isinstance(value, list) else [value])
    except ValueError:
        return "a regular expression, or a list of them"
    return None if quick else r"of few repeats with bounds, as `\s{0,8}`: others take too long"


def grammar(value: Any) -> str | None:
    """Check that a value is a text that the compiler of grammars can take."""
    wanted = text(value)
    return fault(value) if wanted is None else wanted


def schema(value: Any) -> str | None:
    """Check that a value is JSON that the compiler of grammars can take."""
    wanted = text(value)
    return fault_of_json(value) if wanted is None else wanted


def tag(value: Any) -> str | None:
    """Check that a value is a structural tag: SGLang takes an empty one for none, and for one."""
    return "a structural tag" if value == "" else schema(value)


def flag(value: Any) -> str | None:
    """Check that a value is true or false."""
    return None if isinstance(value, bool) else "true or false"


def mapping(value: Any) -> str | None:
    """Check that a value is a mapping."""
    return None if isinstance(value, Mapping) else "a mapping"


def anything(value: Any) -> str | None:
    """Leave a value to SGLang, which refuses it or does not look at it."""
    return None


def shallow(value: Any) -> str | None:
    """Check that lists and mappings are not too deep within each other."""
    level = [value]
    for _ in range(MAX_NESTED):
        inner = [one.values() if isinstance(one, Mapping) else one for one in level]
        level = [one for some in inner for one in some if isinstance(one, (list, tuple, Mapping))]
        if not level:
            return None
    return f"a value of at most {MAX_NESTED} lists and mappings within each other"


def nothing(value: Any) -> str | None:
    """Check that a field is not set: it is SGLang's own, within the server."""
    return None if value is False else "left out: it is the server's own"


def tokens_only(value: Any) -> str | None:
    """Check that a field that stands for tokens is not set: drafts come from tokens.

    SGLang makes one tensor of the `input_embeds` of a batch, and its scheduler stops if their
    types or sizes differ from the model's, or if another request of the batch has tokens.
    """
    return "left out: send the tokens themselves"


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """Return a value as a message has it: short, and in ASCII."""
    if isinstance(value, int) and abs(value) >= 2**70:
        return "a huge number"
    try:
        return ascii(value)[:80]
    except RecursionError:
        return "lists and mappings within each other"
