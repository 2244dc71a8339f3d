"""One HTML page that needs nothing else: readable in light and dark, on a screen and on a phone."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any, Literal

from outrider.report.console import printable

__all__ = ["Page", "State", "table"]

State = Literal["good", "bad", "other"]
"""How a verdict is coloured: kept, broken, or something to look at."""


@dataclass
class Page:
    """A page that grows from top to bottom.

    tool: which tool made it, as "Outrider audit"
    verdict: one sentence, the headline
    state: its colour
    subtitle: of what, and when
    style: CSS beyond that of all pages
    script: the only one that a browser runs in the page; it stands at the end
    """

    tool: str
    verdict: str
    state: State = "good"
    subtitle: str = ""
    style: str = ""
    script: str = ""
    parts: list[str] = field(default_factory=list)

    def add(self, *html: str) -> None:
        """Append HTML. Text in it must have been escaped."""
        self.parts += html

    def section(self, title: str, *html: str) -> None:
        """Append a heading and what stands below it."""
        self.add(f"<h2>{escape(title)}</h2>", *html)

    def made_with(self, facts: Mapping[str, Any]) -> None:
        """Append what the page was made with, name by name."""
        self.section("Made with", "<dl>")
        for name, value in facts.items():
            said = "not known" if value is None else str(value)
            if name == "argv":
                said = shlex.join(value)
            elif isinstance(value, Mapping):
                said = ", ".join(f"{key} {one}" for key, one in value.items() if one is not None)
            name = name.replace("_", " ")
            self.add(f"<div><dt>{escape(name)}</dt><dd>{escape(said)}</dd></div>")
        self.add("</dl>")

    def html(self) -> str:
        """Return the whole page, without control characters."""
        style = files("outrider.report").joinpath("page.css").read_text(encoding="utf-8")
        lines = [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{self._policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(self.tool)}: {escape(self.verdict)}</title>",
            f"<style>{style}{self.style}</style></head><body><main>",
            f'<header class="{self.state}"><p>{escape(self.tool)}</p>',
            f"<h1>{escape(self.verdict)}</h1>",
            f"<p>{escape(self.subtitle)}</p></header>",
            *self.parts,
            f"<script>{self.script}</script>" if self.script else "",
            "</main></body></html>\n",
        ]
        return printable("\n".join(lines))

    @property
    def _policy(self) -> str:
        """What a browser may load: nothing from outside, and no script but the page's own."""
        allowed = "'none'"
        if self.script:
            digest = hashlib.sha256(self.script.encode()).digest()
            allowed = f"'sha256-{base64.b64encode(digest).decode()}'"
        return (
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        )


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Any]],
    states: Mapping[tuple[int, int], State] | None = None,
) -> str:
    """Return a table that scrolls sideways where it must; on a phone each row is a card.

    states: the colours of cells, by (row, column)
    """
    states = states or {}
    out = ["<div class='scroll stack'><table><thead><tr>"]
    out += [f"<th>{escape(head)}</th>" for head in heads] + ["</tr></thead><tbody>"]
    for r, row in enumerate(rows):
        out.append("<tr>")
        for c, cell in enumerate(row):
            mark = f" class='{states[r, c]}'" if (r, c) in states else ""
            head = heads[c] if c < len(heads) else ""
            out.append(f"<td{mark} data-head='{escape(head)}'>{escape(str(cell))}</td>")
        out.append("</tr>")
    return "".join([*out, "</tbody></table></div>"])
