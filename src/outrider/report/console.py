"""What tools say on a terminal. Progress and complaints go to stderr: stdout is the result's."""

from __future__ import annotations

from enum import IntEnum

from rich.console import Console

__all__ = ["Exit", "complain"]


class Exit(IntEnum):
    """What the exit code of every command means; see docs/tools/exit-codes.md."""

    GOOD = 0
    FINDING = 1  # it ran, and found what it looks for: different answers, a failed check
    USAGE = 2  # the command, or a file that it names, cannot be understood: nothing was tried
    COULD_NOT_RUN = 3  # a package, model or server is missing, refuses or crashed
    UNDECIDED = 4  # it ran, and the evidence is not enough for a verdict
    INTERRUPTED = 130  # by Ctrl-C, as shells have it


def complain(console: Console, error: BaseException | str) -> None:
    """Print an error in red, as it is: in one line, whose brackets are no markup."""
    console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
