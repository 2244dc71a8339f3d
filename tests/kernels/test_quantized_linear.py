"""Weights of few bits for drafts: close, and never in the target."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider import Unsupported
from outrider.kernels.quantized_linear import (
    FEW_ROWS,
    QuantizedLinear,
    QuantizedWeight,
    _warn_of_8_bits,
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


@pytest.mark.parametrize(
    ("outputs", "inputs", "bits"), [(64, 96, 4), (16, 64, 4), (64, 48, 8), (40, 64, 8), (1, 32, 8)]
)
def test_a_shape_that_4_bits_do_not_fit_is_kept_in_8_and_said(outputs, inputs, bits, caplog):
    torch.manual_seed(0)
    _warn_of_8_bits.cache_clear()
    weight, x = torch.randn(outputs, inputs), torch.randn(2, inputs)
    quantized = QuantizedWeight(weight, 4)
    assert quantized.bits == bits
    assert error(quantized(x), x @ weight.T) < CLOSE[bits]
    assert (f"a weight of {outputs} x {inputs} is kept in 8 bits" in caplog.text) == (bits == 8)


@pytest.mark.parametrize("bits", [3, 5, 16, 0, -4, "4", None, True])
def test_other_bits_are_refused(bits):
    with pytest.raises(Unsupported, match=f"bits={bits!r}; choose one of 4, 8"):
        quantized_copy(nn.Linear(64, 64), bits)


def test_what_cannot_be_quantized_is_refused():
    with pytest.raises(Unsupported, match="float64"):
        quantized_copy(nn.Sequential(nn.Linear(64, 64).double()), 8)
    with pytest.raises(Unsupported, match=r"without nn\.Linear"):
        quantized_copy(nn.Sequential(nn.Embedding(4, 4)), 8)


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
