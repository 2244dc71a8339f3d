"""The plugin: what SGLang calls at start-up.

In a version that has a contract file, hooks are laid and checked: see `hooks` and `host`. In any
other nothing is touched but the refusal: see `guest`.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider import __version__
from outrider.hosts.sglang import contract, guest, sanitizer
from outrider.hosts.sglang.hooks import ATTENTION_BACKEND, NAME, Hook, attention_backend
from outrider.hosts.sglang.host import host
from outrider.hosts.sglang.profile import REPAIR_VARIABLE

WITHOUT_US = f"leave --speculative-algorithm {NAME} out"


def register() -> None:
    """Lay the hooks. SGLang calls this in each of its processes."""
    if contract.known_contract() is None:
        guest.register(NAME, contract.VERSIONS)
        return
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    host().register(NAME)
    lay({contract.hook_target(name): hook for name, hook in host().hooks().items()})
    if sanitizer.is_wanted():
        lay(sanitizer.Sanitizer().hooks())
    server_args.add_attention_backend_choices([ATTENTION_BACKEND])
    server_args.add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    server_args.add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    register_attention_backend(ATTENTION_BACKEND)(attention_backend)


def lay(hooks: Mapping[str, Hook]) -> None:
    """Lay these hooks, by full name."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, (hook, kind) in hooks.items():
        HookRegistry.register(name, hook, HookType[kind])


def check_hooks(front: bool = False) -> None:
    """Stop the server unless every hook was laid: SGLang logs a failure and goes on.

    front: whether those of the HTTP server are meant too
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    laid, wanted = HookRegistry._patched, host().hooks() | (host().front_hooks() if front else {})
    missing = [name for name in wanted if contract.hook_target(name) not in laid]
    if sanitizer.is_wanted():
        missing += [name for name in sanitizer.Sanitizer().hooks() if name not in laid]
    if missing:
        stop(f"these hooks were not laid: {', '.join(missing)}")


def check_contract() -> None:
    """Stop the server unless this SGLang is as the contract says."""
    _check(contract.differences(host().contract), WITHOUT_US)


def check_repair() -> None:
    """Stop the server unless what the repair for ROCm sets is as the contract says."""
    _check(contract.rocm_differences(host().contract), f"unset {REPAIR_VARIABLE}")


def _check(changed: list[str], instead: str) -> None:
    if changed:
        version = host().contract.VERSION
        stop(
            f"this SGLang differs from the {version} that Outrider knows", *changed, instead=instead
        )


def stop(what: str, *details: str, instead: str = WITHOUT_US) -> None:
    """Stop the server, and say why."""
    import sglang

    lines = "".join(f"\n  - {detail}" for detail in details)
    raise SystemExit(
        f"outrider: {what}{lines}\nfound SGLang {sglang.__version__}, Outrider {__version__}: "
        f"install SGLang {contract.VERSIONS}, or {instead}"
    )
