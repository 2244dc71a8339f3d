"""Keys, tokens and passwords: what Outrider writes and prints comes through here, to be without.

`redact` is for what people, programs and libraries write: commands, addresses, errors, logs. It
finds secrets by the names beside them. `hide` is for everything else, the words of models included:
it changes only what cannot be anything but a secret, or is a secret of this process.
"""

from __future__ import annotations

import base64
import difflib
import html
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

__all__ = ["HIDDEN", "hide", "is_secret", "quoted", "redact", "redact_args", "redact_value"]

HIDDEN = "***"
"""What stands in place of a secret."""

SERVER_FLAGS = (
    *("--api-key", "--admin-api-key", "--ssl-keyfile-password"),
    *("--watermark-key", "--watermark-key-b", "--watermark-config"),
)
"""SGLang's flags whose values are secrets. Its parser takes their beginnings, too: `--api-k`."""

SHORTEST_EVERYWHERE = 8
"""Characters of a secret that is hidden wherever it occurs; a shorter one only as a whole word."""
SHORTEST = 4
"""Characters of a value that is looked for at all where no name is beside it."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[-. ]+")
_SECRET_NAME = re.compile(
    r"passw|passphrase|_pwd$|secret|credential"
    r"|(?:^|_)(?:o?auth(?:entication|orization)?|cookie|bearer|pw|pat|sig|signature)(?:_|$)"
    r"|keys?(?:_[a-z0-9])?$|(?<!per_)(?<!first_)token(?:_[a-z0-9])?$"
)
_NO_VALUE = ("None", "null", "True", "False", "true", "false", "''", '""', HIDDEN)

# Each of these takes time in proportion to the text: what a server says may be long.
_QUOTED = r"\\{1,3}\"[^\"]*\"?|\"(?:[^\"\\]|\\.)*\"?|\\{1,3}'[^']*'?|'(?:[^'\\]|\\.)*'?"
_USERINFO = re.compile(
    # as it should be, and with a slash in the password: then what follows the colon is no port
    r"://(?:[^\s/?#<>]*|[^\s/?#<>@:]{0,64}:(?!\d*(?:[/?#'\"\s]|$))[^\s<>]{0,128})@"
)
_QUERY = re.compile(r"([?&;#])([\w.-]+)=([^&#\s'\"<>]+)")
_HEADER = re.compile(
    r"(?i)(?<![\w-])(authorization|cookie|[a-z][a-z0-9]*(?:[-_][a-z0-9]+)+)"
    r"(\\{0,3}[\"']?\s*:\s*\\{0,3}[\"']?)([^\"'\r\n]+)"
)
_ENTRY = re.compile(rf"(\\{{0,3}}[\"'])([\w.-]+)(\\{{0,3}}[\"']\s*:\s*)({_QUOTED}|[^\s,}}\]]+)")
_FLAG = re.compile(
    rf"(?<![\w-])(--?[A-Za-z][\w-]*)(\s*=\s*|[\"'],\s*(?=[\"'])|\s+)({_QUOTED}|[^\s\"']\S*)"
)
_ASSIGNED = re.compile(rf"(?<![\w.-])([A-Za-z_][\w.-]*)(\s?=\s?)({_QUOTED}|[^\s\"'&]+)")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s\"'<>,;]{8,}")
_BASIC = re.compile(r"\b([Bb]asic\s+)(?=[\w+/-]*[\d=])[\w+/=-]{8,}")
_SHAPES = re.compile(
    r"(?<![\w-])(?:sk-|hf_|gh[opsu]_|github_pat_|glpat-|xox[abps]-|AKIA|pypi-)[\w-]{16,}"
)


@lru_cache(maxsize=1024)
def is_secret(name: str) -> bool:
    """Say whether what has this name is a secret: an option, variable, header or key of JSON."""
    return bool(_SECRET_NAME.search(_CAMEL.sub("_", name.strip("-_")).lower()))


def redact(text: str) -> str:
    """Return a text without what its names, its form or this process say to be secrets."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            read = json.loads(text)
            if (clean := redact_value(read)) != read:
                return json.dumps(clean, ensure_ascii=False)
        except (ValueError, RecursionError):
            pass  # not JSON after all
    text = hide(text)
    text = _FLAG.sub(lambda m: _beside(m, _is_secret_flag(m[1])), text)
    text = _ENTRY.sub(lambda m: m[1] + _beside(m, is_secret(m[2]), 2), text)
    text = _HEADER.sub(lambda m: _beside(m, is_secret(m[1])), text)
    text = _QUERY.sub(
        lambda m: f"{m[1]}{m[2]}={HIDDEN}" if is_secret(m[2]) else m[0],
        text,
    )
    # a bare "key" is how this package writes "key=value" in its help
    text = _ASSIGNED.sub(lambda m: _beside(m, m[1] != "key" and is_secret(m[1])), text)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def hide(text: str) -> str:
    """Return a text without passwords in addresses, known forms of keys, this process's secrets.

    The last are in its command line, and in variables whose name says so.
    """
    long, short = _known(tuple(sys.argv[1:]), tuple(_secret_variables()))
    for form in long:
        text = text.replace(form, HIDDEN)
    if short is not None:
        text = short.sub(HIDDEN, text)
    if "@" in text:
        text = _USERINFO.sub(f"://{HIDDEN}@", text)
    text = _BASIC.sub(rf"\1{HIDDEN}", text)  # the form in which a password is sent
    return _SHAPES.sub(HIDDEN, text)


def redact_args(args: Sequence[str]) -> list[str]:
    """Return a command without secrets, argument by argument."""
    found, before = list[str](), ""
    for arg in args:
        if before and not arg.startswith("--"):
            found.append(HIDDEN)
            before = before if before.endswith("s") else ""  # --api-keys A B
            continue
        name, equals, value = arg.partition("=")
        if secret := name.startswith("-") and _is_secret_flag(name):
            found.append(f"{name}={HIDDEN}" if equals else name)
        elif name.startswith("-") and equals:
            found.append(f"{name}={redact(value)}")
        else:
            found.append(redact(arg))
        before = name if secret and not equals else ""
    return found


def redact_value(value: Any) -> Any:
    """Return plain values, as JSON has them, without what their keys say to be secrets."""
    if isinstance(value, dict):
        return {
            key: HIDDEN
            if is_secret(str(key)) and value is not None and not isinstance(value, bool)
            else redact_value(value)
            for key, value in value.items()
        }
    if isinstance(value, list | tuple):
        if all(isinstance(one, str) for one in value):
            return redact_args(value)
        return [redact_value(one) for one in value]
    return redact(value) if isinstance(value, str) else value


def quoted(value: object, longest: int = 200) -> str:
    """Return a value for a message: in quotes and cut, its secrets hidden before they are cut."""
    said = repr(redact(value)) if isinstance(value, str) else redact(repr(value))
    return said[:longest]


def _beside(match: re.Match[str], secret: bool, first: int = 1) -> str:
    """Return what was found, its value hidden if it is a secret. Its quotes stay."""
    name, between, value = match[first], match[first + 1], match[first + 2]
    if (
        not secret
        or value.rstrip(",;)]}\\") in _NO_VALUE
        or (value.startswith("--") and "=" not in between)
    ):
        return "".join((name, between, value))
    mark = re.match(r"\\*[\"']", value)
    edge = mark[0] if mark else ""
    rest = value[len(edge) :]
    return f"{name}{between}{edge}{HIDDEN}{edge if rest.endswith(edge) else ''}"


@lru_cache(maxsize=256)
def _is_secret_flag(name: str) -> bool:
    if is_secret(name):
        return True
    if not name.startswith("--") or len(name) < 4:
        return False
    shortened = any(flag.startswith(name) for flag in SERVER_FLAGS)
    return shortened or bool(difflib.get_close_matches(name, SERVER_FLAGS, 1, 0.86))


def _secret_variables() -> Iterator[str]:
    for name, value in os.environ.items():
        # keys such as EMPTY and none stand for none, and are words; where keys are is no secret
        if len(value) < SHORTEST_EVERYWHERE or not is_secret(name):
            continue
        if not (value.startswith("/") and os.path.exists(value)):
            yield value


@lru_cache(maxsize=4)
def _known(
    args: tuple[str, ...], variables: tuple[str, ...]
) -> tuple[tuple[str, ...], re.Pattern[str] | None]:
    """Return the secrets of this process as they are written: long ones, and a pattern of short."""
    secrets = {one for one in (*variables, *_in_args(args)) if len(one) >= SHORTEST}
    forms = {(form, len(one) < SHORTEST_EVERYWHERE) for one in secrets for form in _forms(one)}
    long = sorted((form for form, is_short in forms if not is_short), key=len, reverse=True)
    short = "|".join(re.escape(form) for form, is_short in forms if is_short)
    return tuple(long), re.compile(rf"(?<!\w)(?:{short})(?!\w)") if short else None


def _forms(secret: str) -> Iterator[str]:
    """Yield how a secret is written in text, Python, JSON, HTML and addresses."""
    yield from (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], html.escape(secret))
    yield from (quote(secret, safe=""), unquote(secret))
    yield base64.b64encode(unquote(secret).encode(errors="replace")).decode()


def _in_args(args: Sequence[str]) -> Iterator[str]:
    """Yield the secrets of a command line."""
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        name, equals, value = arg.partition("=")
        if name.startswith("-") and _is_secret_flag(name):
            yield value if equals else following
        if match := re.search(r"://(.*)@", arg):
            yield match[1]
            yield match[1].partition(":")[2]
        for query in _QUERY.finditer(arg):
            if is_secret(query[2]):
                yield query[3]
        for header in _HEADER.finditer(arg):
            if is_secret(header[1]):
                yield header[3].split()[-1]
