"""Outrider on Hugging Face Transformers: research, laptops, and the reference for other hosts."""

from outrider.engines.transformers.custom_generate import custom_generate
from outrider.engines.transformers.generate import (
    Generation,
    StepEvent,
    Stream,
    TokenLogprobs,
    adaptive,
    generate,
    stream,
)
from outrider.engines.transformers.host import TransformersHost
from outrider.engines.transformers.passes import NAME
from outrider.engines.transformers.runner import Runner

__all__ = [
    "NAME",
    "Generation",
    "Runner",
    "StepEvent",
    "Stream",
    "TokenLogprobs",
    "TransformersHost",
    "adaptive",
    "custom_generate",
    "generate",
    "stream",
]
