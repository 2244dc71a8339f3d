"""What tools say on a terminal. Progress and complaints go to stderr: stdout is the result's."""

from __future__ import annotations

from rich.console import Console

__all__ = ["INTERRUPTED", "complain"]

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


def complain(console: Console, error: BaseException) -> None:
    """Print an error in red, as it is: in one line, whose brackets are no markup."""
    console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
