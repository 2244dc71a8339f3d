"""Heads: drafters that read the target's hidden states. One file for each architecture."""

from outrider.drafters.heads.blocks import DFlashDrafter
from outrider.drafters.heads.checkpoint import AnyHead, load_head
from outrider.drafters.heads.dflash import Block, DFlashHead
from outrider.drafters.heads.drafter import Head, HeadDrafter
from outrider.drafters.heads.eagle import EagleHead
from outrider.drafters.heads.eagle3 import Eagle3Head, Eagle3Norms
from outrider.drafters.heads.formats import has_mtp, head_layers, head_shape, kind_of, read_config
from outrider.drafters.heads.layers import HeadConfig
from outrider.drafters.heads.mtp import MTPHead

__all__ = [
    "AnyHead",
    "Block",
    "DFlashDrafter",
    "DFlashHead",
    "Eagle3Head",
    "Eagle3Norms",
    "EagleHead",
    "Head",
    "HeadConfig",
    "HeadDrafter",
    "MTPHead",
    "has_mtp",
    "head_layers",
    "head_shape",
    "kind_of",
    "load_head",
    "read_config",
]
