"""Heads for the tiny target: trained, random, and ones that read the wrong states.

Shared by test_heads.py and benchmarks/heads_parity.py.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import torch

from outrider.drafters.heads import (
    Block,
    DFlashDrafter,
    DFlashHead,
    Eagle3Head,
    EagleHead,
    HeadConfig,
    HeadDrafter,
    MTPHead,
    load_head,
)

TINY = Path(str(files("outrider"))) / "assets" / "tiny"
TRAINED = {"eagle3": TINY / "head", "mtp": TINY / "mtp", "dflash": TINY / "dflash"}


def random_head(target, kind="eagle3"):
    """Return a head that was never trained."""
    torch.manual_seed(0)
    shape = target.config.to_dict() | {"model_type": "qwen3", "num_hidden_layers": 1}
    size = HeadConfig.of(shape)
    if kind == "dflash":
        head = DFlashHead(size, (1, 2, 4), Block(6, 0))
    elif kind == "eagle3":
        head = Eagle3Head(HeadConfig.of(target.config.to_dict()), (1, 2, 4), 128)
    else:
        head = {"mtp": MTPHead, "eagle": EagleHead}[kind](size, 4)
    head.embed_tokens.weight.data = target.get_input_embeddings().weight.data.float()
    return head.eval().to(target.dtype).requires_grad_(False)


def trained_head(target, kind="eagle3"):
    """Return the head in the package."""
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return load_head(TRAINED[kind], embedding.detach(), 4, lm_head=output.detach())


class Shifted(HeadDrafter):
    """Reads the states of the tokens beside the ones it should."""

    def observe(self, outcomes):
        super().observe([replace(o, hidden=o.hidden.roll(1, 0)) for o in outcomes])


class ShiftedBlocks(DFlashDrafter):
    """The same, for blocks."""

    def observe(self, outcomes):
        super().observe([replace(o, hidden=o.hidden.roll(1, 0)) for o in outcomes])


def made(name, target, **more):
    """Return a drafter by kind and state: "mtp trained".

    The states are trained, random, shifted (it reads the states of the tokens beside) and layers
    (it reads the layers below those it was trained for).
    """
    kind, state = name.split()
    head = random_head(target, kind) if state == "random" else trained_head(target, kind)
    if state == "layers":
        head.hidden_layers = tuple(layer - 1 for layer in head.hidden_layers)
    if kind == "dflash":
        drafter = ShiftedBlocks if state == "shifted" else DFlashDrafter
    else:
        drafter = Shifted if state == "shifted" else HeadDrafter
    return drafter(head, 512, **more)
