"""Linear layers that read 4-bit or 8-bit weights: for drafts, whose opinions need not be exact.

A draft model that writes one token at a time is bound by reading its weights: a quarter of the
bytes is up to four times the speed. The target never uses these, so the output does not change.
"""

from __future__ import annotations

import copy
import logging
from functools import lru_cache
from typing import Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from outrider.errors import Unsupported, check_choice

__all__ = ["Bits", "QuantizedLinear", "QuantizedWeight", "quantized_copy"]

Bits = Literal[4, 8]
FEW_ROWS = {4: 8, 8: 4}
"""Up to so many rows the product of few bits is the faster one on CPU (measured with AVX-512)."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

GROUPS = (32, 64, 128, 256)
"""How many 4-bit weights of an output may share a scale: the fewer, the closer."""

OUTPUTS = 16
"""torch packs 4-bit weights for a multiple of so many outputs."""

SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried: a narrower one errs on the extremes and is finer."""

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=nn.Module)


class QuantizedWeight(nn.Module):
    """A matrix in few bits, and its product with a few rows.

    8 bits: one scale for each output. 4 bits: a scale and a zero for each group of inputs. A matrix
    whose inputs no group divides, or whose outputs are no multiple of 16, is kept in 8 bits; a
    warning says so.
    """

    def __init__(self, weight: Tensor, bits: Bits) -> None:
        super().__init__()
        check_choice("bits", bits, get_args(Bits))
        if weight.device.type != "cpu" or weight.dtype not in DTYPES:
            raise Unsupported(
                f"{bits}-bit weights from {weight.dtype} on {weight.device}",
                fix="use float32, bfloat16 or float16 on CPU; elsewhere load a quantized model",
            )
        self.outputs, inputs = weight.shape
        self.group = next((g for g in GROUPS if inputs % g == 0), 0)
        fits = self.group > 0 and self.outputs % OUTPUTS == 0
        self.bits: Bits = bits if fits else 8
        if self.bits != bits:
            _warn_of_8_bits(self.outputs, inputs)
        packed, scale = self._pack4(weight) if self.bits == 4 else self._pack8(weight)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)

    def serves(self, rows: int) -> bool:
        """Say whether the product with so many rows is faster than with the original weights."""
        return rows <= FEW_ROWS[self.bits]

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T. x: [.., K] -> [.., N]."""
        packed, scale = cast(Tensor, self.packed), cast(Tensor, self.scale)
        flat = x.reshape(-1, x.shape[-1])
        if self.bits == 8:
            out = torch._weight_int8pack_mm(flat, packed, scale)
        else:
            out = torch._weight_int4pack_mm_for_cpu(flat, packed, self.group, scale)
        return out.view(*x.shape[:-1], self.outputs)

    @staticmethod
    def _pack8(weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = weight.float().abs().amax(1).clamp(min=1e-8) / 127
        return (weight.float() / scale[:, None]).round().to(torch.int8), scale.to(weight.dtype)

    def _pack4(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each group's range by its squared error. A weight is (code - 8) * scale + zero."""
        parts = [
            self._codes(rows) for rows in torch.split(weight, 8192)
        ]  # bounds the scratch of a head
        codes, scales = (torch.cat(part) for part in zip(*parts, strict=True))
        packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
        return packed, scales.transpose(0, 1).contiguous()

    def _codes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes, [N, K] int32, and a scale and a zero for each group, [N, K / group, 2]."""
        x = weight.float().view(len(weight), -1, self.group)
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        least = torch.full_like(low, torch.inf)
        codes, scales = torch.zeros_like(x), torch.cat([low, low], -1)
        for share in SHRINK:
            scale = ((high - low) * (share / 15)).clamp(min=1e-8).to(weight.dtype).float()
            zero = (low * share + 8 * scale).to(weight.dtype).float()
            found = ((x - zero) / scale + 8).round().clamp(0, 15)
            error = ((found - 8) * scale + zero - x).square().sum(-1, keepdim=True)
            better = error < least
            least = torch.where(better, error, least)
            codes = torch.where(better, found, codes)
            scales = torch.where(better, torch.cat([scale, zero], -1), scales)
        return codes.to(torch.int32).view(weight.shape), scales.to(weight.dtype)


class QuantizedLinear(nn.Module):
    """A linear layer with its weights in few bits too.

    A few rows use these; many rows, as in a prompt, the original ones, which it shares.
    """

    def __init__(self, linear: nn.Linear, bits: Bits) -> None:
        super().__init__()
        self.linear = linear
        self.quantized = QuantizedWeight(linear.weight.detach(), bits)

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias. x: [.., K] -> [.., N]."""
        if not self.quantized.serves(x.numel() // x.shape[-1]):
            return cast(Tensor, self.linear(x))
        out = cast(Tensor, self.quantized(x))
        return out if self.linear.bias is None else out + self.linear.bias


@lru_cache(maxsize=64)
def _warn_of_8_bits(outputs: int, inputs: int) -> None:
    """Warn once for each shape."""
    logger.warning(
        "a weight of %d x %d is kept in 8 bits: 4 bits need outputs divisible by %d and inputs "
        "divisible by %d",
        *(outputs, inputs, OUTPUTS, GROUPS[0]),
    )


def quantized_copy(model: M, bits: Bits = 4) -> M:
    """Return a copy of a model with linear layers of few bits. Its other weights are shared.

    Use it for a draft model: the target's answers do not change, the drafts cost less.

    model: on CPU, in float32, bfloat16 or float16
    bits: 4 or 8; a layer whose shape does not allow 4 is kept in 8, with a warning
    """
    check_choice("bits", bits, get_args(Bits))
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    found = [
        (module, name, child)
        for module in copied.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear and not isinstance(module, QuantizedLinear)
    ]
    if not found:
        raise Unsupported(
            f"{type(model).__name__} without nn.Linear layers to quantize", fix="use it as it is"
        )
    for module, name, child in found:
        setattr(module, name, QuantizedLinear(child, bits))
    return copied
