"""Marking methods as hooks, laying them, and stopping a server in which one of them was not laid.

A hook calls SGLang's own code unless OUTRIDER was chosen: `_mark` sees to that. A hook that must
also act without it, or whose arguments say whether it was chosen, is marked `always`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from outrider import __version__
from outrider.engines.sglang.arguments.chosen import NAME, chosen_args
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.engines.sglang.versions.contract import CONTRACTS, VERSIONS, hook_target

Hook = tuple[Callable[..., Any], str]
"""What is called, and how: BEFORE, AFTER or AROUND what it hooks."""

Table = dict[str, Hook]
"""Hooks by what they hook."""

WITHOUT_US = f"leave --speculative-algorithm {NAME} out"

F = TypeVar("F", bound=Callable[..., Any])


class _Mark(NamedTuple):
    """Where a method is laid, how, and whether only in processes with an HTTP server."""

    names: tuple[str, ...]
    kind: str
    front: bool


def _mark(kind: str, *names: str, always: bool = False, front: bool = False) -> Callable[[F], F]:
    def mark(method: F) -> F:
        @wraps(method)
        def hook(self: HookTable, *args: Any, **kwargs: Any) -> Any:
            if always or self.chosen_args() is not None:
                return method(self, *args, **kwargs)
            return args[0](*args[1:], **kwargs) if kind == "AROUND" else None

        hook.mark = _Mark(names, kind, front)  # type: ignore[attr-defined]
        return cast(F, hook)

    return mark


before, after = partial(_mark, "BEFORE"), partial(_mark, "AFTER")
"""Mark a method that is called before or after what these names of the contract stand for. After
it, the method gets the result first."""

around = partial(_mark, "AROUND")
"""Mark a method that is called instead, and gets the original first."""


class HookTable:
    """The hooks of one version of SGLang: the methods that are marked.

    version: the version
    load: loads the plugins in another process of the server's; it is pickled by its name
    others: further hooks that must be laid, by full name
    """

    def __init__(
        self,
        version: SglangVersion,
        load: Callable[[], None],
        others: Mapping[str, Hook] | None = None,
    ) -> None:
        self.version, self._load, self._others = version, load, dict(others or {})

    def chosen_args(self) -> Any:
        """Return this process's arguments if they choose our algorithm, else None."""
        return chosen_args(self.version)

    def table(self, front: bool = False) -> Table:
        """Return the hooks to lay at start-up, by name of the contract.

        front: return those of the HTTP server instead, for the processes that have one
        """
        names = [name for name in dir(type(self)) if hasattr(getattr(type(self), name), "mark")]
        hooks = [getattr(self, name) for name in names]
        return {
            name: (hook, hook.mark.kind)
            for hook in hooks
            if hook.mark.front == front
            for name in hook.mark.names
        }

    def lay(self, front: bool = False) -> None:
        """Hand these hooks to SGLang, which lays them."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        own = {hook_target(name): hook for name, hook in self.table(front).items()}
        for name, (hook, kind) in (own if front else own | self._others).items():
            HookRegistry.register(name, hook, HookType[kind])

    def check(self, front: bool = False) -> None:
        """Stop the server unless every hook was laid: SGLang logs a failure and goes on.

        front: whether those of the HTTP server are meant too
        """
        from sglang.srt.plugins.hook_registry import HookRegistry

        laid = HookRegistry._patched
        hooks = self.table() | (self.table(front=True) if front else {})
        missing = [name for name in hooks if hook_target(name) not in laid]
        missing += [name for name in self._others if name not in laid]
        if missing:
            stop(f"these hooks were not laid: {', '.join(missing)}", instead=WITHOUT_US)


def stop(what: str, *details: str, instead: str) -> NoReturn:
    """Stop the server, and say why."""
    from sglang import __version__ as found

    lines = "".join(f"\n  - {detail}" for detail in details)
    wanted = f"{found} again: this one was changed" if found in CONTRACTS else VERSIONS
    raise SystemExit(
        f"outrider: {what}{lines}\nfound SGLang {found}, Outrider {__version__}: "
        f"install SGLang {wanted}, or {instead}"
    )
