"""What a check says: how bad it is, why it matters, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LEVELS", "Area", "Finding", "Level", "milder", "size"]

Level = Literal["ok", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")
"""From good to bad. A problem is what stops a server, or changes answers."""

Area = Literal["models", "tokenizer", "cost", "context", "memory", "hosts", "server", "known bad"]


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    what: what is so
    why: why it matters; what follows from it
    fix: what to do about it; empty where nothing need be done
    id: of an entry in the list of known faults
    maybe: whether it depends on something that is not known here
    """

    area: Area
    level: Level
    what: str
    why: str = ""
    fix: str = ""
    id: str | None = None
    maybe: bool = False


def milder(level: Level) -> Level:
    """Return the level below: for what may be so, where it is not certain."""
    return LEVELS[max(1, LEVELS.index(level) - 1)]


def size(count: float) -> str:
    """Return bytes in words: 2.88 GiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
