"""The plugin: what SGLang calls at start-up.

In a version that has a contract file, hooks are laid and checked: see `hooks` and `versions`. In
any other nothing is touched but the refusal: see `guest`.
"""

from __future__ import annotations

from outrider.engines.sglang.arguments.chosen import ATTENTION_BACKEND, NAME
from outrider.engines.sglang.hooks.common import Hooks
from outrider.engines.sglang.hooks.sglang_0_5_11 import Hooks0511
from outrider.engines.sglang.hooks.sglang_0_5_23 import Hooks0523
from outrider.engines.sglang.sanitizer.sanitizer import Sanitizer, is_wanted
from outrider.engines.sglang.versions import contract, guest
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.engines.sglang.versions.sglang_0_5_11 import Sglang0511
from outrider.engines.sglang.versions.sglang_0_5_23 import Sglang0523

HOOKS: dict[str, tuple[type[SglangVersion], type[Hooks]]] = {
    version.contract.VERSION: (version, hooks)
    for version, hooks in ((Sglang0511, Hooks0511), (Sglang0523, Hooks0523))
}
"""What each version that we know is hooked by: those in `contract.CONTRACTS`."""


def register() -> None:
    """Lay the hooks. SGLang calls this in each of its processes."""
    hooks = installed_hooks()
    if hooks is None:
        guest.register(NAME, contract.VERSIONS)
        return
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    hooks.register()
    hooks.lay()
    server_args.add_attention_backend_choices([ATTENTION_BACKEND])
    server_args.add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    server_args.add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    register_attention_backend(ATTENTION_BACKEND)(hooks.attention_backend)


def installed_hooks() -> Hooks | None:
    """Return what the installed SGLang is hooked by; None if we do not know its version."""
    known = contract.known_contract()
    if known is None:
        return None
    make_version, make_hooks = HOOKS[known.VERSION]
    version = make_version()
    return make_hooks(version, load_here, Sanitizer(version).hooks() if is_wanted() else {})


def load_here() -> None:
    """Load SGLang's plugins in this process, and make sure that all hooks hold."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    check_hooks()


def check_hooks() -> None:
    """Stop unless every hook was laid."""
    hooks = installed_hooks()
    assert hooks is not None, "this SGLang has no contract file"
    hooks.check()
