"""Copies of SGLang's batches."""

from __future__ import annotations

from typing import Any


def changed(batch: Any, **fields: Any) -> Any:
    """Return a copy of SGLang's batch in which these fields are others.

    `dataclasses.replace` does the same 15 times slower: it calls `__init__` with 100 arguments.
    """
    made = object.__new__(type(batch))
    made.__dict__.update(batch.__dict__, **fields)
    return made
