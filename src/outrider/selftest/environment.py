"""What a result was made with: the machine, the versions, the command."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider.selftest.check import Setting

__all__ = ["environment", "provenance"]


def environment(setting: Setting) -> dict[str, Any]:
    """Return what the kernels run on and with; None where it is not known."""
    found: dict[str, Any] = {
        "device": "Triton's interpreter on CPU" if setting.interpreted else "GPU",
        "gpu": None,
        "arch": f"as {setting.arch}" if setting.interpreted else setting.arch,
        "memory_gb": None,
        "free_memory_gb": None,
        "processors": None,
        "driver": _driver(),
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else _cuda(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "outrider": outrider.__version__,
        "sglang": _version("sglang"),
    }
    if not setting.interpreted:
        properties = torch.cuda.get_device_properties(setting.device)
        free, total = torch.cuda.mem_get_info(setting.device)
        found |= {
            "gpu": properties.name,
            "memory_gb": round(total / 1e9, 1),
            "free_memory_gb": round(free / 1e9, 1),
            "processors": properties.multi_processor_count,
        }
    return found


def provenance() -> dict[str, Any]:
    """Return when, by which command and from which sources this is made."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda() -> str | None:
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else None


def _driver() -> str | None:
    for module in ("amdgpu", "nvidia"):
        file = Path("/sys/module") / module / "version"
        if file.exists():
            return f"{module} {file.read_text().strip()}"
    return None


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
