"""How every command ends: with a meant exit code, and a sentence instead of a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from outrider.errors import OutriderError, UsageError
from outrider.redact import redact
from outrider.report.console import Exit, Terminal, complain

__all__ = ["Commands", "PassesOn", "passed_on"]

EXTRAS = {
    "matplotlib": "tools",
    "scipy": "tools",
    "torch": "transformers",
    "transformers": "transformers",
}
"""The extra of `pip install 'outrider[EXTRA]'` that brings a package."""


PASSED_ON = "outrider.passed_on"


class PassesOn(TyperCommand):
    """A command with arguments of its own that passes on what follows `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what follows `--` apart: else it would count as an argument that was left out."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[PASSED_ON] = tuple(args[at + 1 :])
        return list(super().parse_args(ctx, args[:at]))


def passed_on(context: typer.Context) -> tuple[str, ...]:
    """Return what followed `--`."""
    found: tuple[str, ...] = context.meta.get(PASSED_ON, ())
    return found


class Commands(TyperGroup):
    """Runs a command. What it raises becomes a message and an exit code; --debug shows it all."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            complain(Terminal(stderr=True), "interrupted")
            raise SystemExit(Exit.INTERRUPTED) from None
        except BrokenPipeError:  # whoever read our output has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(Exit.COULD_NOT_RUN) from None
        except Exception as error:
            if isinstance(error, typer.Abort) or hasattr(error, "exit_code"):
                if hasattr(error, "message"):
                    error.message = redact(error.message)
                raise  # typer's own
            if ctx.params.get("debug"):
                sys.stderr.write(redact(traceback.format_exc()))
            complain(Terminal(stderr=True), _said(error))
            code = Exit.USAGE if isinstance(error, UsageError) else Exit.COULD_NOT_RUN
            raise SystemExit(code) from error


def _said(error: Exception) -> str:
    if isinstance(error, ImportError) and error.name:
        name = error.name.partition(".")[0]
        wanted = f"'outrider[{EXTRAS[name]}]'" if name in EXTRAS else name
        return f"{name} cannot be imported here ({error}); pip install {wanted}"
    if isinstance(error, OutriderError | OSError):
        return redact(str(error))
    return (
        f"unexpected {type(error).__name__}: {redact(str(error))}; "
        "`outrider --debug ...` shows where, please report it"
    )
