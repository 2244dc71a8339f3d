"""Hostile input for every door: texts, numbers, JSON, YAML and bytes that are almost right."""

from __future__ import annotations

import json
from contextlib import contextmanager
from copy import deepcopy

from hypothesis import strategies as st

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
    *(0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
)

LITERALS = (
    *("1e999", "-1E+9999", "NaN", "-Infinity", "0x1F", "1_000", "007", "9" * 5000, "1:30:60"),
    *("2001-99-99", "!!python/object/apply:os.system [id]", "!!binary x", "*a", "&a [*a]", "<<: 1"),
    *("\\ud800", "\u2028", "\ufeff", "null", "true", "{}", "[]", "~", "? ", "- - - ", "'", '"'),
    *('"a": 1, "a": 2, ', "[" * 5000, '{"a":' * 3000, "# ", "%YAML 9.9\n", "---\n", "\t"),
)
"""Pieces of JSON and YAML that readers trip over."""

DEPTHS = (50, 300, 900, 3000, 50_000)
"""How deep lists and objects lie within each other: deeper than readers recurse."""

STEERS = {
    *range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A),
}  # fmt: skip
"""Characters that steer a terminal."""

LONGEST = 2500
"""Characters that a refusal may have."""


@contextmanager
def refusal(*errors):
    """Take a declared error as an answer, if it is one short line."""
    said = ""
    try:
        yield
    except errors as error:
        said = str(error)
    assert len(said.splitlines()) <= 1, "a refusal of several lines"
    assert len(said) <= LONGEST, f"a refusal of {len(said)} characters"


def texts():
    """Texts of hostile pieces, and of any characters, halves of surrogate pairs among them."""
    pieces = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3).map(" ".join)
    return st.sampled_from(TEXTS) | pieces | st.text(st.characters(), max_size=20)


def numbers():
    """Numbers of any size, NaN and infinities among them."""
    return st.sampled_from(NUMBERS) | st.integers() | st.floats()


def values():
    """Values that JSON can hold, and numbers that it cannot."""
    scalars = st.none() | st.booleans() | numbers() | texts()
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts(), inner, max_size=4),
        max_leaves=12,
    )


@st.composite
def mutated(draw, document, replacements=None):
    """A document with places changed, removed, added or swapped."""
    made, new = deepcopy(document), values() if replacements is None else replacements
    for _ in range(draw(st.integers(1, 4))):
        places = list(_places(made))
        if not places:
            return draw(new)
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        what = draw(st.sampled_from(("change", "change", "change", "remove", "swap", "add")))
        if what == "remove":
            del holder[key]
        elif what == "swap":
            other, at = places[draw(st.integers(0, len(places) - 1))]
            holder[key] = deepcopy(other[at])
        elif what == "add" and isinstance(holder, dict):
            holder[draw(texts())] = draw(new)
        else:
            holder[key] = draw(new)
    return made


def _places(document):
    """Yield where values are: (holder, key)."""
    waiting = [document]
    while waiting:
        one = waiting.pop()
        keys = range(len(one)) if isinstance(one, list) else [*one] if isinstance(one, dict) else ()
        for key in keys:
            yield one, key
            waiting.append(one[key])


@st.composite
def nested(draw):
    """JSON of lists or objects within each other."""
    depth, (begin, end) = draw(st.sampled_from(DEPTHS)), draw(
        st.sampled_from((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")))
    )  # fmt: skip
    return begin * depth + dumps(draw(numbers())) + end * depth


@st.composite
def written(draw, *documents):
    """JSON of one of these documents, changed or not; now and then damaged."""
    wanted = st.one_of([mutated(one) for one in documents] + [st.sampled_from(documents), values()])
    if draw(st.integers(0, 19)) == 19:
        return draw(nested())
    text = dumps(draw(wanted))
    what = draw(st.sampled_from(("whole", "whole", "whole", "cut", "literal", "twice", "deep")))
    if what == "twice" and text.startswith("{") and len(text) > 2:
        return f"{{{text[1:-1]}, {text[1:]}"  # every key
    if what in ("whole", "twice"):
        return text
    at = draw(st.integers(0, len(text)))
    if what == "cut":
        return text[:at]
    return text[:at] + draw(nested() if what == "deep" else st.sampled_from(LITERALS)) + text[at:]


@st.composite
def damaged(draw, content):
    """Bytes that are cut, turned, repeated or overwritten."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(made)))
        what = draw(st.sampled_from(("cut", "turn", "insert", "length", "overwrite")))
        if what == "cut":
            del made[at:]
        elif what == "turn" and at < len(made):
            made[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "insert":
            made[at:at] = draw(st.binary(min_size=1, max_size=100))
        elif what == "length":
            made[:8] = draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
        else:
            made[at : at + 16] = draw(st.sampled_from((b"\0", b"\xff"))) * 16
    return bytes(made)


def encoded(text: str) -> bytes:
    """Return a text as bytes, halves of surrogate pairs as CESU-8 has them."""
    return text.encode("utf-8", "surrogatepass")


def files(*documents):
    """Bytes of a JSON file: see `written`; now and then with bytes damaged."""
    whole = written(*documents).map(encoded)
    return whole | whole | whole.flatmap(damaged)


@st.composite
def bombs(draw, key="drafters"):
    """YAML whose aliases or merge keys stand for more than the file holds."""
    width, depth = draw(st.integers(2, 10)), draw(st.integers(1, 30))
    first, line = draw(
        st.sampled_from((
            ("x", "[{}]"),  # lists of lists
            ("{x: 1}", "{{<<: [{}]}}"),  # merge keys
            ("{x: 1}", "{{a: 1, <<: [{}]}}"),
        ))
    )  # fmt: skip
    lines = [f"a0: &a0 {first}"]
    for i in range(depth):
        lines.append(f"a{i + 1}: &a{i + 1} " + line.format(", ".join([f"*a{i}"] * width)))
    return "\n".join([*lines, f"{key}: *a{depth}"])


@st.composite
def yaml_texts(draw, usual):
    """YAML: a document with hostile values, bombs, tags, anchors that hold themselves, damage."""
    import yaml

    what = draw(st.sampled_from(("json", "bomb", "lines", "lines", "lines")))
    if what == "json":
        return draw(written(usual))
    if what == "bomb":
        return draw(bombs())
    lines = yaml.safe_dump(usual).splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        begin = draw(st.sampled_from((lines[at].partition(":")[0] + ": ", "", "&a ", "!!set ")))
        lines[at] = begin + draw(st.sampled_from(LITERALS) | texts())
    return "\n".join(lines)


def dumps(document) -> str:
    """Return a document as JSON, however deep it is."""
    out: list[str] = []
    waiting = [("value", document)]
    while waiting:
        kind, one = waiting.pop()
        if kind == "as it is":
            out.append(one)
        elif isinstance(one, (list, dict)):
            ends, pairs = ("{}", one.items()) if isinstance(one, dict) else ("[]", enumerate(one))
            inner = []
            for number, (key, value) in enumerate(pairs):
                name = f"{json.dumps(key)}: " if isinstance(one, dict) else ""
                inner += [("as it is", ", " * bool(number) + name), ("value", value)]
            waiting += [("as it is", ends[1]), *reversed(inner), ("as it is", ends[0])]
        else:
            out.append(json.dumps(one))
    return "".join(out)
