"""The levels of exactness of a host that runs in this process, by name."""

from __future__ import annotations

from typing import Any, Literal

Exactness = Literal["lossless", "bitwise"]


def current_name(exactness: Any) -> Any:
    """Return the name that a level has now: "lossless" was "law", which users may still give."""
    return "lossless" if exactness == "law" else exactness
