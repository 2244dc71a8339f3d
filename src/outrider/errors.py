"""Errors that say what, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from outrider.redact import quoted, redact

LONGEST = 1000
"""Characters of a line in a message."""


class OutriderError(Exception):
    """Base class of every error that Outrider raises on purpose."""


def one_line(text: str) -> str:
    """Return a text as one short line without secrets: others' messages quote what they read."""
    line = redact(" ".join(filter(None, map(str.strip, text.splitlines()))))
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


class Unsupported(OutriderError):
    """A combination that cannot be served exactly, refused instead of approximated.

    what: that was asked for, in one line
    fix: what to do instead, in one line
    """

    def __init__(self, what: str, *, fix: str) -> None:
        what, fix = one_line(what), one_line(fix)
        super().__init__(f"{what}; {fix}")
        self.what = what
        self.fix = fix


class UsageError(Unsupported):
    """A command, or a file that it names, that cannot be understood: nothing was tried."""


OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What code raises that reads data of another form than it expects."""


@contextmanager
def reading(what: str, *, fix: str) -> Iterator[None]:
    """Refuse what others wrote if it has another form than expected: as a context or a decorator.

    what: is read
    """
    try:
        yield
    except OTHER_FORM as error:
        raise Unsupported(f"{what} cannot be read ({quoted(error)})", fix=fix) from error


class NoToken(OutriderError, RuntimeError):
    """No token can follow: the logits are NaN, or a grammar or a bias rules every token out.

    Plain decoding raises a RuntimeError there, or emits a token that was ruled out.
    """


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
