"""Models of Transformers, heads and drafters, as users name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.errors import Unsupported, UsageError, check_choice

__all__ = ["check_drafter", "check_target", "draft_kind", "load_model", "load_tokenizer"]


def check_drafter(name: str) -> None:
    """Refuse a name that no drafter has, and list those there are."""
    from outrider.drafters.registry import known_drafters

    check_choice("drafter", name, known_drafters("adaptive", "model"), error=UsageError)


def draft_kind(path: str) -> str:
    """Return what a draft is, by its files here: "model", or a kind of head as `eagle3`."""
    if not (Path(path) / "config.json").is_file():
        return "model"  # a name of the hub, or a mistake that whoever loads it will meet
    from outrider.drafters.heads.formats import kind_of, read_config

    return kind_of(read_config(Path(path)))


def check_target(name: str) -> None:
    """Refuse a head where a model is expected."""
    if (kind := draft_kind(name)) != "model":
        raise UsageError(
            f"{name} is a head ({kind}), not a model",
            fix="name the model that it drafts for, and the head as the draft",
        )


def load_model(name: str, dtype: Any) -> Any:
    """Return a model of Transformers, ready to generate. Raises Unsupported if there is none."""
    from outrider.engines.transformers import loading

    try:
        found = loading.load_model(loading.directory_of(name), dtype)
    except Unsupported as error:
        raise Unsupported(f"no model at {name!r:.200} ({error.what})", fix=error.fix) from error
    found.config.name_or_path = name  # not where the hub's files are kept
    return found


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model of Transformers. Raises Unsupported if it has none."""
    from outrider.engines.transformers import loading

    try:
        return loading.load_tokenizer(loading.directory_of(name, weights=False))
    except Unsupported as error:
        raise Unsupported(f"no tokenizer at {name!r:.200} ({error.what})", fix=error.fix) from error
