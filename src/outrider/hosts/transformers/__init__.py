"""Outrider on Hugging Face Transformers: research, laptops, and the reference for other hosts."""

from outrider.hosts.transformers.custom_generate import custom_generate
from outrider.hosts.transformers.generate import (
    Generation,
    StepEvent,
    Stream,
    TokenLogprobs,
    adaptive,
    generate,
    stream,
)
from outrider.hosts.transformers.host import TransformersHost
from outrider.hosts.transformers.passes import NAME
from outrider.hosts.transformers.runner import Runner

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
