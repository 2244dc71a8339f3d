"""Errors that say what, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class OutriderError(Exception):
    """Base class of every error that Outrider raises on purpose."""


class Unsupported(OutriderError):
    """A combination that cannot be served exactly, refused instead of approximated.

    what: that was asked for
    fix: what to do instead
    """

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.what = what
        self.fix = fix


class UsageError(Unsupported):
    """A command, or a file that it names, that cannot be understood: nothing was tried."""


class DraftFault(OutriderError):
    """A proposal that cannot be used. It costs speed only: the request goes on with K = 0."""


def check_choice(
    name: str,
    value: object,
    allowed: Iterable[object],
    *,
    where: str = "",
    error: type[Unsupported] = Unsupported,
) -> None:
    """Raise an error unless an option has one of the allowed values.

    where: the option was read, for the message: "in 'transformers:MODEL#mode=fast'"
    """
    choices = tuple(allowed)
    if value not in choices:
        known = ", ".join(map(str, choices))
        raise error(f"{name}={value!r:.80} {where}".rstrip(), fix=f"choose one of {known}")
