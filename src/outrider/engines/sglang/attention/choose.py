"""Which attention backend serves a device."""

from __future__ import annotations

from typing import Any

import torch

from outrider.engines.sglang.attention.backend import OutriderAttention
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.kernels import use_triton


def attention_backend(runner: Any, version: SglangVersion) -> OutriderAttention:
    """Return the backend for a model runner's device."""
    if use_triton(torch.device(runner.device)):
        from outrider.engines.sglang.attention.triton import TritonAttention

        return TritonAttention(runner, version)
    return OutriderAttention(runner, version)
