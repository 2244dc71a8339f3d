"""Linear layers that read 8-bit weights: for drafts, whose opinions need not be exact.

A draft model that writes one token at a time is bound by reading its weights; half the bytes is
up to twice the speed. The target never uses these, so the output does not change.
"""

from __future__ import annotations

import copy
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

__all__ = ["Int8Linear", "int8_copy"]

FEW_ROWS = 2
"""Up to so many rows the 8-bit product is the faster one on CPU (measured with AVX-512)."""

M = TypeVar("M", bound=nn.Module)


class Int8Linear(nn.Module):
    """A linear layer with its weights in 8 bits too, one scale for each output.

    A few rows use the 8-bit weights; many rows, as in a prompt, the original ones, which it shares.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        weight = linear.weight.detach()
        scale = weight.float().abs().amax(1).clamp(min=1e-8) / 127
        self.register_buffer("int8", (weight.float() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias. x: [.., K] -> [.., N]."""
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) > FEW_ROWS:
            return cast(Tensor, self.linear(x))
        int8, scale = cast(Tensor, self.int8), cast(Tensor, self.scale)
        out = torch._weight_int8pack_mm(flat, int8, scale).view(*x.shape[:-1], len(int8))
        return out if self.linear.bias is None else out + self.linear.bias


def int8_copy(model: M) -> M:
    """Return a copy of a model with 8-bit linear layers. Its other weights are shared with it."""
    if next(model.parameters()).device.type != "cpu":
        raise NotImplementedError("8-bit draft weights are for CPU so far")
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    for module in list(copied.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not isinstance(module, Int8Linear):
                setattr(module, name, Int8Linear(child))
    return copied
