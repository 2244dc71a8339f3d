"""An SGLang without a contract file: it runs as if Outrider were not installed.

A server that asks for Outrider stops before it loads a model. The last line of its output has both
versions and what to install.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from outrider import __version__
from outrider.serving.profile import REPAIR_VARIABLE

FLAG = "--speculative-algorithm"


def register(name: str, known: str) -> None:
    """Hook the places where SGLang reads its arguments, to refuse ours. Nothing else is touched.

    name: the algorithm that is refused
    known: the versions of SGLang to install
    """
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def refuse_flags(argv: Sequence[str], *args: Any, **kwargs: Any) -> None:
        # before SGLang parses them: it may not know our other flags (--attention-backend outrider)
        if chosen_by(argv, name):
            _stop(known, f"leave {FLAG} {name} out")

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        # sglang.Engine, --config and abbreviated flags
        if str(getattr(self, "speculative_algorithm", None)).upper() == name:
            _stop(known, f"leave {FLAG} {name} out")
        if os.environ.get(REPAIR_VARIABLE):
            _stop(known, f"unset {REPAIR_VARIABLE}")

    arguments = getattr(server_args, "ServerArgs", None)
    # from 0.5.20 on a msgspec struct, which ignores a __post_init__ that is replaced
    method = "resolve_once" if hasattr(arguments, "resolve_once") else "__post_init__"
    for target, original, hook in (
        ("prepare_server_args", getattr(server_args, "prepare_server_args", None), refuse_flags),
        (f"ServerArgs.{method}", getattr(arguments, method, None), refuse),
    ):
        # SGLang logs a traceback for a hook whose target does not exist
        if callable(original):
            HookRegistry.register(f"{server_args.__name__}.{target}", hook, HookType.BEFORE)


def chosen_by(argv: Sequence[str], name: str) -> bool:
    """Say whether these flags choose the algorithm. The last of several counts."""
    chosen = ""
    for i, arg in enumerate(argv):
        flag, has_value, value = arg.partition("=")
        if flag == FLAG:
            chosen = value if has_value else "".join(argv[i + 1 : i + 2])
    return chosen.upper() == name


def _stop(known: str, instead: str) -> None:
    import sglang

    # SGLang logs other exceptions of a plugin and goes on
    raise SystemExit(
        f"outrider: found SGLang {sglang.__version__}, Outrider {__version__}: "
        f"install SGLang {known}, or {instead}"
    )
