"""Texts of tokens so that they can be seen: white space, control characters, lone bytes."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

from outrider.report.console import CONTROLS, printable

__all__ = ["LONE_BYTES", "label", "visible"]

LONE_BYTES = "◌"
"""Stands for bytes that are not a character by themselves."""

LONGEST = 24
"""Cells of a label."""

_ONE_LINE: dict[int, int | str] = {**CONTROLS, ord("\n"): "⏎", ord("\t"): "⇥"}
_SPACES = _ONE_LINE | {ord(" "): "·"}


def visible(text: str, lines: bool = False) -> str:
    """Return a text without control characters. lines: whether its lines and tabs stay as such."""
    return printable(text) if lines else text.translate(_ONE_LINE)


def label(text: str) -> str:
    """Return a token's name: never empty, with its spaces visible, and not too long."""
    if not text:
        return LONE_BYTES
    if len(text) > 3 and not text.strip(" "):
        return f"·\N{MULTIPLICATION SIGN}{len(text)}"
    text = text.translate(_SPACES)
    if cell_len(text) > LONGEST:
        text = set_cell_size(text, LONGEST - 1).rstrip() + "…"
    return text
