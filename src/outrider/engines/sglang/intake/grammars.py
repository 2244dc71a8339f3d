"""What a grammar may have. Its compiler is C++ that recurses: what it trips over ends the process.

So these are bounds on how deep it recurses, not on what it understands. What it fails at in an
orderly way ends the request alone: see `hooks.compile_grammar`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 200
"""Brackets within each other."""

MAX_LEVELS = 4000
"""Levels within each other by way of names: a schema's definitions, a grammar's rules."""

ANY_JSON = "$$ANY$$"
"""SGLang's own word for a schema that any JSON fits."""


def fault(text: str) -> str | None:
    """Return what a regular expression or an EBNF grammar has to be, if it is something else."""
    if "\0" in text:
        return "a text without null characters"
    if text.count("::=") > MAX_LEVELS:
        return f"a grammar of at most {MAX_LEVELS} rules"
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_DEPTH:
            return f"a text of at most {MAX_DEPTH} brackets within each other"
    return None


def fault_of_json(text: str) -> str | None:
    """Return what a JSON schema or a structural tag has to be, if it is something else.

    Brackets are those of the JSON: one in a string closes none.
    """
    if text == ANY_JSON:
        return None
    deep = f"JSON of at most {MAX_DEPTH} brackets within each other"
    try:
        found = json.loads(text, strict=False, object_pairs_hook=_once)
    except RecursionError:
        return deep
    except ValueError:
        return "JSON, with each key once"
    depth, level, names = 0, [found], set[str]()
    while level:
        for value in level:
            for one in _texts(value):
                if (wanted := fault(one)) is not None:
                    return wanted
            if isinstance(value, Mapping) and isinstance(value.get("$ref"), str):
                names.add(value["$ref"])
        level = [inner for value in level for inner in _inner(value)]
        if (depth := depth + 1) > MAX_DEPTH + 1:
            return deep
    if depth * len(names) > MAX_LEVELS:
        return f"JSON whose depth, times the definitions it refers to, is at most {MAX_LEVELS}"
    return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ValueError if it has a key twice: what stood there is lost here."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _inner(value: Any) -> Iterator[Any]:
    """Yield the lists and objects in a value."""
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (list, Mapping)):
        yield from (one for one in inner if isinstance(one, (list, Mapping)))


def _texts(value: Any) -> Iterator[str]:
    """Yield a value if it is a text, and the texts in it: patterns are among them."""
    if isinstance(value, Mapping):
        yield from (one for pair in value.items() for one in pair if isinstance(one, str))
    else:
        found = value if isinstance(value, list) else [value]
        yield from (one for one in found if isinstance(one, str))
