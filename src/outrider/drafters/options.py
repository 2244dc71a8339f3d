"""Checks of drafters' options, which come from files: a wrong one is named in one line."""

from __future__ import annotations

import math
from numbers import Real
from typing import SupportsFloat, cast

from outrider.core import is_whole

MAX_TOKENS = 1 << 31
"""Lengths of texts and matches lie below."""


def check_whole(name: str, value: object, least: int, most: int = MAX_TOKENS) -> int:
    """Return an option's value, a whole number from `least` to `most`; raise if it is not one."""
    if isinstance(value, bool) or not is_whole(value, least) or cast(int, value) > most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}")
    return int(cast(int, value))


def check_number(name: str, value: object, least: float, most: float = math.inf) -> float:
    """Return an option's value, a finite number from `least` to `most`; raise if it is not one."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(cast(SupportsFloat, value)) if is_number else math.nan
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and least <= number <= most):
        limit = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{name} must be a number {limit}")
    return number
