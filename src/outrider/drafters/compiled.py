"""Loops over tokens, compiled by numba where it is installed; else the same functions, slower.

Both give the same results: there is one source. OUTRIDER_NUMBA=0 does without numba.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from outrider.errors import check_choice

F = TypeVar("F", bound=Callable[..., Any])

NUMBA = "OUTRIDER_NUMBA"
"""Environment variable: "0" runs the loops in plain Python; by default numba is used if present."""

IS_COMPILED = False
"""Whether loops are compiled here."""

check_choice(NUMBA, os.environ.get(NUMBA, "1"), ("0", "1"))
try:
    if os.environ.get(NUMBA) != "0":
        import numba

        IS_COMPILED = True
except ImportError:
    pass


def compiled(function: F) -> F:
    """Return the function compiled, or as it is. The machine code is kept on disk if it can be."""
    if not IS_COMPILED:
        return function
    jit: Any
    try:
        jit = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no directory for it that can be written to
        jit = numba.njit(nogil=True)(function)
    return cast(F, jit)
