"""The engine that a string names: see this package's docstring."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from outrider.clients.base import Engine, base_url, outrider_body, shown_url, without_password
from outrider.errors import UsageError
from outrider.redact import quoted


def open_engine(spec: str) -> Engine:
    """Return the engine that a string names; see this package's docstring."""
    where, _, given = spec.partition("#")
    if where.startswith(("http://", "https://")):
        from outrider.clients.server import ServerEngine

        return ServerEngine(spec, base_url(where), _body(spec, given))
    kind, _, model = where.partition(":")
    if kind == "transformers" and model:
        from outrider.clients.local import LocalEngine

        return LocalEngine(spec, model, _options(spec, given))
    raise UsageError(
        f"{quoted(without_password(spec))} names no engine",
        fix="use a server's address, http://host:port, or transformers:MODEL",
    )


def both_modes(spec: str) -> tuple[str, str]:
    """Return the names of the plain and the speculative engine, of one that can be both."""
    where, _, given = spec.partition("#")
    if where.startswith("transformers:"):
        dtype = [part for part in given.split(",") if part.startswith("dtype=")]
        plain = where + "".join(f"#{part}" for part in dtype)
        if plain != spec:
            return plain, spec
        raise UsageError(f"{spec} drafts nothing", fix="add #draft=MODEL, or name two engines")
    with closing(open_engine(spec)) as engine:
        algorithm = engine.facts().get("speculative_algorithm")
    if algorithm != "OUTRIDER" or given.startswith("{"):
        raise UsageError(
            f"{shown_url(spec)} cannot be asked to answer without drafts",
            fix="name two engines, the plain one first",
        )
    options = [part for part in given.split(",") if part and not part.startswith("max_drafts=")]
    return f"{where}#{','.join([*options, 'max_drafts=0'])}", spec


def _body(spec: str, given: str) -> dict[str, Any]:
    """Return what to add to each request's body: JSON as it is, or options for Outrider."""
    if not given.startswith("{"):
        options: dict[str, Any] = dict(_options(spec, given))
        model = options.pop("model", None)
        return {**({"model": model} if model else {}), **outrider_body(options)}
    try:
        found: dict[str, Any] = json.loads(given)
    except json.JSONDecodeError as error:
        raise UsageError(f"{quoted(given)} is not JSON ({error})", fix="quote it") from error
    return found


def _options(spec: str, given: str) -> Mapping[str, Any]:
    """Return key=value,key=value as a mapping; numbers and truths are read as such."""
    found: dict[str, Any] = {}
    for part in filter(None, given.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"{quoted(part)} in {quoted(spec)}", fix="write key=value,key=value")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    drafts = found.get("max_drafts", 0)
    if not isinstance(drafts, int) or drafts < 0 or drafts is True:
        raise UsageError(
            f"max_drafts={drafts} in {quoted(spec)}", fix="write a whole number, 0 or more"
        )
    return found
