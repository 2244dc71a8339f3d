"""Drafters by name: ours, and those that other packages install."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from outrider.core import Drafter, Unsupported
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.suffix import SuffixDrafter

GROUP = "outrider.drafters"
"""The entry point group under which a package offers a drafter: name = "package.module:factory"."""

OURS: Mapping[str, Callable[..., Drafter]] = {
    "ngram": NgramDrafter,
    "none": NoDrafter,
    "suffix": SuffixDrafter,
}
"""Those that come with Outrider and need no model."""


def make_drafter(name: str, options: Mapping[str, Any], *, others: Iterable[str] = ()) -> Drafter:
    """Return a new drafter of that name, made with these options.

    others: names that the caller makes itself, for the message about an unknown one
    """
    factory = OURS.get(name)
    if factory is None:
        found = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name not in found:
            known = ", ".join(sorted({*OURS, *found, *others}))
            raise Unsupported(f"drafter {name!r}", fix=f"choose one of {known}, or install it")
        factory = found[name].load()
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        raise Unsupported(
            f"drafter {name!r} with options {dict(options)}", fix=str(error)
        ) from error
