"""Weights of few bits for drafts: close, and never in the target."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.kernels.quantized_linear import (
    FEW_ROWS,
    QuantizedLinear,
    QuantizedWeight,
    quantized_copy,
)

CLOSE = {8: 0.02, 4: 0.12}
"""The error of a product, as a share of its size: about 1/127 and 1/15 of a weight, averaged."""


def error(found, expected):
    return float((found - expected).float().norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 8, 9])
@pytest.mark.parametrize("bits", [4, 8])
def test_close_to_the_original(bits, rows, bias, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(128, 96, bias=bias).to(dtype)
    x = torch.randn(1, rows, 128).to(dtype)
    with torch.inference_mode():
        found, expected = QuantizedLinear(linear, bits)(x), linear(x)
    assert found.shape == expected.shape
    assert error(found, expected) < CLOSE[bits]
    assert torch.equal(found, expected) == (rows > FEW_ROWS[bits])


@pytest.mark.parametrize("width", [96, 64, 48])
def test_widths(width):
    """A group fits, or eight bits are used."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, width), torch.randn(2, width)
    quantized = QuantizedWeight(weight, 4)
    assert quantized.bits == (8 if width == 48 else 4)
    assert error(quantized(x), x @ weight.T) < CLOSE[quantized.bits]


def test_a_narrower_range_is_chosen_where_it_errs_less():
    """One far outlier in a group would spoil the others."""
    torch.manual_seed(0)
    weight = torch.randn(16, 32)
    assert QuantizedWeight(weight, 4)._codes(weight)[0].max() == 15
    x = torch.eye(32)[:8]
    whole = error(QuantizedWeight(weight, 4)(x), x @ weight.T)
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = (high - low) / 15
    naive = ((weight - low) / scale).round() * scale + low
    assert whole <= error(x @ naive.T, x @ weight.T) + 1e-3


def test_copy_shares_weights_and_leaves_the_model_alone():
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Sequential(nn.Linear(64, 32)))
    before = [type(m) for m in model.modules()]
    copied = quantized_copy(model)
    assert [type(m) for m in model.modules()] == before
    assert isinstance(copied[0], QuantizedLinear)
    assert isinstance(copied[2][0], QuantizedLinear)
    assert copied[0].linear.weight is model[0].weight
