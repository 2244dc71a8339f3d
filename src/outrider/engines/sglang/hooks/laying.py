"""Laying hooks, and stopping a server in which one of them was not laid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from outrider import __version__
from outrider.engines.sglang.versions.contract import VERSIONS, hook_target

Hook = tuple[Callable[..., Any], str]
"""What is called, and how: BEFORE, AFTER or AROUND what it hooks."""

Table = dict[str, Hook]
"""Hooks by what they hook."""


def lay(hooks: Mapping[str, Hook]) -> None:
    """Lay these hooks, by full name."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, (hook, kind) in hooks.items():
        HookRegistry.register(name, hook, HookType[kind])


def check_laid(hooks: Mapping[str, Hook], others: Mapping[str, Hook], instead: str) -> None:
    """Stop the server unless every hook was laid.

    others: by full name
    instead: what helps
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    laid = HookRegistry._patched
    missing = [name for name in hooks if hook_target(name) not in laid]
    missing += [name for name in others if name not in laid]
    if missing:
        stop(f"these hooks were not laid: {', '.join(missing)}", instead=instead)


def stop(what: str, *details: str, instead: str) -> NoReturn:
    """Stop the server, and say why."""
    import sglang

    lines = "".join(f"\n  - {detail}" for detail in details)
    raise SystemExit(
        f"outrider: {what}{lines}\nfound SGLang {sglang.__version__}, Outrider {__version__}: "
        f"install SGLang {VERSIONS}, or {instead}"
    )
