"""Texts of tokens so that they can be seen: white space, control characters, lone bytes."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

__all__ = ["LONE_BYTES", "label", "visible"]

LONE_BYTES = "◌"
"""Stands for bytes that are not a character by themselves."""

LONGEST = 24
"""Cells of a label."""

_CONTROLS = {code: 0x2400 + code for code in range(32)} | {127: 0x2421}
_LINES = {ord("\n"): "⏎", ord("\t"): "⇥"}
_KEEP_LINES = {code: mark for code, mark in _CONTROLS.items() if code not in _LINES}
_ONE_LINE = _CONTROLS | _LINES
_SPACES = _ONE_LINE | {ord(" "): "·"}


def visible(text: str, lines: bool = False) -> str:
    """Return a text without control characters. lines: whether its lines and tabs stay as such."""
    return text.translate(_KEEP_LINES if lines else _ONE_LINE)


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
