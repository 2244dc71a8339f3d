"""`outrider serve`: SGLang's own server, with OUTRIDER chosen."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from outrider.errors import Unsupported
from outrider.hosts.sglang.profile import CONFIG_VARIABLE, load_profile
from outrider.report.console import complain


def run(profile: Path | None, arguments: Sequence[str]) -> None:
    """Check the profile and become `python -m sglang.launch_server`."""
    console = Console(stderr=True)
    environment = dict(os.environ)
    try:
        if profile is not None:
            load_profile(str(profile))
            environment[CONFIG_VARIABLE] = str(profile.resolve())
        if importlib.util.find_spec("sglang") is None:
            raise Unsupported("SGLang is not installed here", fix="install sglang==0.5.11")
    except Unsupported as error:
        complain(console, error)
        raise SystemExit(1) from error
    command = [sys.executable, "-m", "sglang.launch_server"]
    command += ["--speculative-algorithm", "OUTRIDER", *arguments]
    os.execve(sys.executable, command, environment)
