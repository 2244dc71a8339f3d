"""Outrider: speculative decoding that never changes the answer.

Importing this package imports nothing heavy; `generate`, `stream` and the rest load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outrider.core import Draft, Drafter, Proposal, SamplingParams, Stats, Unsupported, chain
    from outrider.drafters import (
        AheadDrafter,
        ModelDrafter,
        NgramDrafter,
        NoDrafter,
        SuffixDrafter,
    )
    from outrider.engines.transformers.custom_generate import custom_generate
    from outrider.engines.transformers.generate import (
        Generation,
        Stream,
        adaptive,
        generate,
        stream,
    )
    from outrider.engines.transformers.heads import load_drafter
    from outrider.kernels.quantized_linear import quantized_copy

_HOMES = {
    "AheadDrafter": "outrider.drafters",
    "Draft": "outrider.core",
    "Drafter": "outrider.core",
    "Generation": "outrider.engines.transformers.generate",
    "ModelDrafter": "outrider.drafters",
    "NgramDrafter": "outrider.drafters",
    "NoDrafter": "outrider.drafters",
    "Proposal": "outrider.core",
    "SamplingParams": "outrider.core",
    "Stats": "outrider.core",
    "Stream": "outrider.engines.transformers.generate",
    "SuffixDrafter": "outrider.drafters",
    "Unsupported": "outrider.core",
    "adaptive": "outrider.engines.transformers.generate",
    "chain": "outrider.core",
    "custom_generate": "outrider.engines.transformers.custom_generate",
    "generate": "outrider.engines.transformers.generate",
    "load_drafter": "outrider.engines.transformers.heads",
    "quantized_copy": "outrider.kernels.quantized_linear",
    "stream": "outrider.engines.transformers.generate",
}

__all__ = [
    "AheadDrafter",
    "Draft",
    "Drafter",
    "Generation",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "Proposal",
    "SamplingParams",
    "Stats",
    "Stream",
    "SuffixDrafter",
    "Unsupported",
    "__version__",
    "adaptive",
    "chain",
    "custom_generate",
    "generate",
    "load_drafter",
    "quantized_copy",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
