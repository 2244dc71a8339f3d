"""Heads: drafters that read the target's hidden states. One file for each architecture."""

from outrider.drafters.heads.checkpoint import (
    head_layers,
    head_shape,
    kind_of,
    load_head,
    read_config,
)
from outrider.drafters.heads.drafter import Head, HeadDrafter
from outrider.drafters.heads.eagle3 import Eagle3Head
from outrider.drafters.heads.layers import HeadConfig

__all__ = [
    "Eagle3Head",
    "Head",
    "HeadConfig",
    "HeadDrafter",
    "head_layers",
    "head_shape",
    "kind_of",
    "load_head",
    "read_config",
]
