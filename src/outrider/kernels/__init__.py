"""GPU and CPU operations, one folder each: reference.py (plain torch), triton.py, and the maths."""

from __future__ import annotations

import os
from typing import Any

import torch

from outrider.errors import check_choice

KERNELS = "OUTRIDER_KERNELS"
"""Environment variable: "torch" or "triton" for all devices; unset: Triton on GPUs."""


def use_triton(device: torch.device) -> bool:
    """Return whether operations on this device run as Triton kernels.

    On CPU they do only if asked for, and need Triton's interpreter (TRITON_INTERPRET=1).
    """
    asked = os.environ.get(KERNELS)
    if asked is None:
        return device.type == "cuda"
    check_choice(KERNELS, asked, ("torch", "triton"))
    return asked == "triton"


def arch(device: torch.device) -> str:
    """Return the processor that kernels for this device are compiled for; CPU: the interpreter."""
    if device.type != "cuda":
        return "gfx942"
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def launch_options(num_warps: int) -> dict[str, Any]:
    """Return the options that every launch has.

    Multiply-adds are never fused: whether Triton fuses them by default depends on its version, and
    a sum must not depend on what a compiler found to fuse.
    """
    return {"num_warps": num_warps, "enable_fp_fusion": False}
