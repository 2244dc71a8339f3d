"""What the pages of the documentation say: code, commands, files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
]
SHELL = ("bash", "sh", "console")

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*?) -->\n+)?"
    r"^(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_INDENTED = re.compile(r"(?:^(?: {4}[^\n]*)?\n)+", re.MULTILINE)
_COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ +)*(?:\S*/|python -m )?outrider(?: +(.*))?$")
_MARK = r"test(: exit \d+)?$|not run: \S|run by (?P<test>tests/[\w/]+\.py)"
_PROGRAM = r"(\S+=\S+ )*(\S*/|\$ )?(outrider|python|pip|git|docker|curl|hf|export|scripts)\b"


@dataclass(frozen=True)
class Block:
    """A fenced block.

    mark: the comment before it: `test`, `test: exit 1`, `run by tests/...`, or `not run: why`
    prints: the text block that follows directly: what the block prints
    """

    language: str
    body: str
    mark: str = ""
    prints: str | None = None


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    found = [*_BLOCK.finditer(page)]
    made = []
    for match, after in zip_longest(found, found[1:]) if found else ():
        prints = None
        if after and after["language"] == "text" and not page[match.end() : after.start()].strip():
            prints = after["body"]
        made.append(Block(match["language"], match["body"], match["mark"] or "", prints))
    return made


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words after `outrider` of each command in code: fenced, indented, or in a line."""
    shells = [block.body for block in blocks(page) if block.language in SHELL]
    rest = _BLOCK.sub("", page)
    shells += [match[0] for match in _INDENTED.finditer(rest) if match[0].strip()]
    shells += re.findall(r"(?<!`)`([^`]+)`(?!`)", _INDENTED.sub("\n", rest))
    for shell in shells:
        lines = shell.replace("\\\n", " ").splitlines()
        for piece in (p.strip() for line in lines for p in re.split(r" && | \| |; ", line)):
            if match := _COMMAND.match(piece):
                yield _words(match[1] or "")


def unmarked(page: str) -> list[str]:
    """Return the shell blocks that do not say who runs them, or why nobody does.

    Commands in indented blocks count, too: no comment can stand before those.
    """
    found = [
        block.body
        for block in blocks(page)
        if block.language in SHELL and not re.match(_MARK, block.mark)
    ]
    indented = (match[0] for match in _INDENTED.finditer(_BLOCK.sub("", page)))
    return found + [text for text in indented if re.match(_PROGRAM, text.strip())]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that goes on in another line
        return text.split()


def files(page: str) -> set[str]:
    """Return the files of the repository that a page names."""
    tops = "src|tests|benchmarks|scripts|docs|docker|examples|requirements|deploy"
    return {
        name
        for name in re.findall(rf"`((?:{tops})/[\w./-]+)`", page)
        if not name.startswith("benchmarks/results/<")
    }
