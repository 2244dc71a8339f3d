"""What the kernels run on and with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import outrider
from outrider.report.provenance import installed
from outrider.selftest.check import Setting

__all__ = ["environment"]


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
        "triton": installed("triton"),
        "outrider": outrider.__version__,
        "sglang": installed("sglang"),
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


def _cuda() -> str | None:
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else None


def _driver() -> str | None:
    for module in ("amdgpu", "nvidia"):
        file = Path("/sys/module") / module / "version"
        if file.exists():
            return f"{module} {file.read_text().strip()}"
    return None
