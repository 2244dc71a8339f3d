"""When, where, by which command and from which sources a result was made; secrets are in none."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import outrider
from outrider.redact import hide, redact_args

__all__ = ["document", "installed", "provenance"]

PACKAGES = ("outrider", "torch", "triton", "transformers", "sglang", "vllm")


def provenance() -> dict[str, Any]:
    """Return what made a figure: date, command, commit, versions, machine."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": [Path(sys.argv[0]).name, *redact_args(sys.argv[1:])],
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: found for name in PACKAGES if (found := installed(name))},
        },
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "platform": platform.platform()},
    }


def document(result: Any) -> str:
    """Return a result as the JSON document that a tool writes or prints, without secrets."""
    return hide(json.dumps(result, indent=1)) + "\n"


def installed(package: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str | None:
    """Return the commit of the checkout that this package is part of, "-dirty" if changed."""
    package = Path(outrider.__file__).parent
    root = package.parents[1]
    # an installed package may lie inside of somebody else's repository
    if package != root / "src" / "outrider" or not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    command += ["--exclude=*", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
