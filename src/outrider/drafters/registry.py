"""Drafters by name: ours, and those that other packages install."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from outrider.core import Drafter, Unsupported
from outrider.drafters.ahead import AheadDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.suffix import SuffixDrafter

GROUP = "outrider.drafters"
"""The entry point group under which a package offers a drafter: name = "package.module:factory"."""

OURS: Mapping[str, Callable[..., Drafter]] = {
    "ahead": AheadDrafter,
    "ngram": NgramDrafter,
    "none": NoDrafter,
    "suffix": SuffixDrafter,
}
"""Those that come with Outrider and need no model in this process."""


def known_drafters(*others: str) -> dict[str, EntryPoint | None]:
    """Return the names of all drafters, sorted, each with the package's entry point that makes it.

    others: names of drafters that the caller makes itself
    """
    found: dict[str, EntryPoint | None] = {e.name: e for e in entry_points(group=GROUP)}
    found.update(dict.fromkeys([*OURS, *others]))
    return dict(sorted(found.items()))


def make_drafter(name: str, options: Mapping[str, Any], *, others: Iterable[str] = ()) -> Drafter:
    """Return a new drafter of that name, made with these options.

    others: names that the caller makes itself, for the message about an unknown one
    """
    factory = OURS.get(name)
    if factory is None:
        known = known_drafters(*others)
        entry = known.get(name)
        if entry is None:
            names = ", ".join(known)
            raise Unsupported(f"drafter {name!r}", fix=f"choose one of {names}, or install it")
        factory = entry.load()
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        raise Unsupported(
            f"drafter {name!r} with options {dict(options)}", fix=str(error)
        ) from error
