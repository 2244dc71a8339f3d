"""Hostile input from a seed: texts, numbers, JSON documents and files that are almost right."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from html.parser import HTMLParser
from typing import Any

TEXTS = (
    "",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "'\"><svg onload=alert(1)>",
    "' onmouseover='alert(1)",
    "<!--",
    "]]>",
    "</pre></table></main>",
    "&lt;b&gt;&#60;i",
    "\u2028alert(1)\u2029",
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31m",
    "\u202eright to left\u2066",
    "\ud800",
    "a\x00b",
    "\r\nSet-Cookie: a=b",
    "[/red]",
    "[link=file:///etc/passwd]here[/link]",
    "[bold",
    "%s%n{0}{name!r}",
    "../../../etc/passwd",
    "\N{COMBINING ACUTE ACCENT}" * 40,
    "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}",
    "long " * 2000,
)
"""What steers a page, a terminal, a log, rich's markup, a format, a path."""

NUMBERS = (
    *(0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 10**5000),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
)
LITERALS = (
    *("1e999", "-1E+9999", "NaN", "Infinity", "0x1F", "1_000", "007", "9" * 5000, "1:30:60"),
    *("2001-99-99", "!!python/object/apply:os.system [id]", "!!binary x", "*a", "&a [*a]", "<<: 1"),
    *("\\ud800", "\u2028", "\ufeff", "null", "true", "{}", "[]", "~", "? ", "- - - ", "'", '"'),
)
"""Pieces of JSON and YAML that readers trip over."""


class Hostile(random.Random):
    """A source of hostile input; the same seed gives the same."""

    def text(self) -> str:
        """Return a text of hostile pieces."""
        return " ".join(self.choices(TEXTS, k=self.choice((1, 1, 1, 2, 3))))

    def value(self, depth: int = 3) -> Any:
        """Return a value that JSON can hold, or a number that it cannot."""
        kind = self.randrange(7 if depth else 5)
        if kind == 0:
            return self.choice((None, True, False))
        if kind in (1, 2):
            return self.choice(NUMBERS)
        if kind in (3, 4):
            return self.text()
        if kind == 5:
            return [self.value(depth - 1) for _ in range(self.randrange(4))]
        return {self.text(): self.value(depth - 1) for _ in range(self.randrange(4))}

    def nested(self) -> Any:
        """Return lists or objects within each other, deeper than readers recurse."""
        made: Any = self.value(0)
        for _ in range(self.choice((50, 300, 900, 3000))):
            made = [made] if self.random() < 0.5 else {"a": made}
        return made

    def mutated(self, document: Any, changes: int = 0) -> Any:
        """Return a copy of a document with places changed, removed, added or swapped."""
        copy = deepcopy(document)
        for _ in range(changes or self.choice((1, 1, 2, 5))):
            places = list(_places(copy))
            if not places:
                return self.value()
            holder, key = self.choice(places)
            what = self.randrange(6)
            if what == 0:
                del holder[key]
            elif what == 1:
                other, at = self.choice(places)
                holder[key] = deepcopy(other[at])
            elif what == 2 and isinstance(holder, dict):
                holder[self.text()] = self.value()
            else:
                holder[key] = self.value()
        return copy

    def written(self, document: Any) -> str:
        """Return a document as JSON, now and then damaged: duplicate keys, cuts, odd literals."""
        text = dumps(document)
        what = self.randrange(6)
        if what == 0:
            text = text[: self.randrange(len(text) + 1)]
        elif what == 1:
            at = self.randrange(len(text) + 1)
            text = text[:at] + self.choice(LITERALS) + text[at:]
        elif what == 2 and text.startswith("{") and len(text) > 2:
            text = "{" + text[1:-1] + ", " + text[1:]  # every key twice
        return text

    def damaged(self, content: bytes) -> bytes:
        """Return bytes cut, turned, repeated or overwritten."""
        made = bytearray(content)
        for _ in range(self.choice((1, 1, 3))):
            at, what = self.randrange(len(made) + 1), self.randrange(5)
            if what == 0:
                del made[at:]
            elif what == 1 and at < len(made):
                made[at] ^= 1 << self.randrange(8)
            elif what == 2:
                made[at:at] = self.randbytes(self.choice((1, 8, 100)))
            elif what == 3:
                made[:8] = self.randrange(2**64).to_bytes(8, "little")
            else:
                made[at : at + 16] = self.choice((b"\0", b"\xff")) * 16
        return bytes(made)


def dumps(document: Any) -> str:
    """Return a document as JSON, however deep it is and however long its numbers are."""
    out: list[str] = []
    waiting = [("value", document)]
    while waiting:
        kind, one = waiting.pop()
        if kind == "as it is":
            out.append(one)
        elif isinstance(one, (list, dict)):
            ends, pairs = ("{}", one.items()) if isinstance(one, dict) else ("[]", enumerate(one))
            inner: list[tuple[str, Any]] = []
            for number, (key, value) in enumerate(pairs):
                name = f"{json.dumps(key)}: " if isinstance(one, dict) else ""
                inner += [("as it is", ", " * bool(number) + name), ("value", value)]
            waiting += [("as it is", ends[1]), *reversed(inner), ("as it is", ends[0])]
        elif isinstance(one, int) and not isinstance(one, bool) and abs(one) > 10**400:
            out.append("-" * (one < 0) + "9" * 5000)
        else:
            out.append(json.dumps(one))
    return "".join(out)


def _places(document: Any) -> Any:
    """Yield where values are: (holder, key)."""
    waiting = [document]
    while waiting:
        one = waiting.pop()
        keys = range(len(one)) if isinstance(one, list) else [*one] if isinstance(one, dict) else ()
        for key in keys:
            yield one, key
            waiting.append(one[key])


class Tags(HTMLParser):
    """Finds what a page would run or load.

    found: scripts, handlers and addresses in it
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at a tag."""
        if tag in ("script", "iframe", "object", "embed", "base", "link", "form", "img"):
            self.found.append(tag)
        self.found += [f"{tag} {name}" for name, _ in attrs if name.startswith("on")]
        self.found += [f"{tag} {k}" for k, v in attrs if k in ("src", "href") and v and v[0] != "#"]
