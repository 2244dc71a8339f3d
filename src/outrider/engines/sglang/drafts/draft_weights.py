"""Few bits for a draft model that SGLang has loaded: its layers' own way in, `quant_method`."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from outrider.kernels.quantized_linear import Bits, QuantizedWeight


class _FewBits:
    """How a layer multiplies: a few rows by weights of few bits, many by the original ones."""

    def __init__(self, weight: Tensor, bits: Bits) -> None:
        self._weight, self._quantized = weight, QuantizedWeight(weight.detach(), bits)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias."""
        if not self._quantized.serves(x.numel() // x.shape[-1]):
            return F.linear(x, self._weight, bias)
        out: Tensor = self._quantized(x)
        return out if bias is None else out + bias


class _Head(nn.Module):
    """An output layer in few bits. SGLang asks one without `weight` for its `quant_method`."""

    def __init__(self, weight: Tensor, bits: Bits) -> None:
        super().__init__()
        self.quant_method = _FewBits(weight, bits)


def quantize(model: nn.Module, bits: Bits) -> None:
    """Let a draft model's linear layers and its head read weights of few bits."""
    for layer in model.modules():
        if isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod:
            layer.quant_method = _FewBits(layer.weight, bits)
    weight = getattr(getattr(model, "lm_head", None), "weight", None)
    if weight is not None:
        model.lm_head = _Head(weight, bits)
