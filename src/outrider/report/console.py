"""What tools say on a terminal. Progress and complaints go to stderr: stdout is the result's."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import TextColumn
from rich.segment import Segment
from rich.text import Text

from outrider.redact import hide

__all__ = ["CONTROLS", "Exit", "Stage", "Terminal", "complain", "printable", "words"]


class Exit(IntEnum):
    """What the exit code of every command means; see docs/tools/exit-codes.md."""

    GOOD = 0
    FINDING = 1  # it ran, and found what it looks for: different answers, a failed check
    USAGE = 2  # the command, or a file that it names, cannot be understood: nothing was tried
    COULD_NOT_RUN = 3  # a package, model or server is missing, refuses or crashed
    UNDECIDED = 4  # it ran, and the evidence is not enough for a verdict
    INTERRUPTED = 130  # by Ctrl-C, as shells have it


CONTROLS: dict[int, int] = {code: 0x2400 + code for code in range(32)} | {127: 0x2421}
# the terminal commands of ISO 6429's second half, what turns the direction of text, and halves of
# surrogate pairs, which cannot be written
_HIDDEN = (
    *range(0x80, 0xA0),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
)
CONTROLS |= dict.fromkeys(_HIDDEN, ord("\N{REPLACEMENT CHARACTER}"))
"""Characters that would steer a terminal or stop it, and what is shown for them."""

_KEEP_LINES = {code: mark for code, mark in CONTROLS.items() if code not in (9, 10)}


def printable(text: str) -> str:
    """Return what a model, server or file says: it cannot steer a terminal, and has no secrets."""
    return hide(text).translate(_KEEP_LINES)


class Terminal(Console):
    """A console whose text steers nothing: no markup in it, no control characters, no links.

    Every tool prints on one, so that what a server or a file says needs no care where it is
    printed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of what is printed; rich's own commands stay as they are."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


class Stage(TextColumn):
    """The description of a task in a progress bar: brackets in it are no markup."""

    def __init__(self, text: str = "{task.description}") -> None:
        super().__init__(text, markup=False)


def words(text: object) -> Text:
    """Return the same for a table or a line of rich's: their brackets are no markup."""
    return Text(printable(str(text)))


def complain(console: Console, error: BaseException | str) -> None:
    """Print an error in red, as it is: in one line, whose brackets are no markup."""
    said = printable(str(error))
    console.print(said, style="red", markup=False, highlight=False, soft_wrap=True)
