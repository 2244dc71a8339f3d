"""`outrider serve`: SGLang's own server, with OUTRIDER chosen."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.clients.process import safe, sglang_command
from outrider.errors import Unsupported, UsageError


def run(profile: Path | None, arguments: Sequence[str]) -> None:
    """Check the profile and become `python -m sglang.launch_server`."""
    # before the profile, whose check needs torch
    command = sglang_command()
    from outrider.serving.profile import CONFIG_VARIABLE, load_profile

    environment = safe()
    if profile is not None:
        try:
            load_profile(str(profile))
        except Unsupported as error:
            raise UsageError(error.what, fix=error.fix) from error
        environment[CONFIG_VARIABLE] = str(profile.resolve())
    command += ["--speculative-algorithm", "OUTRIDER", *arguments]
    os.execve(sys.executable, command, environment)
