"""Whether a server's arguments choose Outrider."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider.core import Unsupported
from outrider.engines.sglang.versions.base import SglangVersion

NAME = "OUTRIDER"
"""Our algorithm, for --speculative-algorithm."""

ATTENTION_BACKEND = "outrider"
"""Our attention backend: it reads a request's cache once for all of its rows."""


def is_chosen(args: Any) -> bool:
    """Say whether these arguments choose our algorithm."""
    return args is not None and (args.speculative_algorithm or "").upper() == NAME


def chosen_args(version: SglangVersion) -> Any:
    """Return this process's arguments if they choose our algorithm, else None."""
    args = version.current_arguments()
    return args if is_chosen(args) else None


@contextmanager
def refusing_start() -> Iterator[None]:
    """Stop the server, with the message, at what Outrider does not support."""
    try:
        yield
    except Unsupported as error:
        raise SystemExit(f"outrider: {error}") from error
