"""8-bit weights for drafts: close, and never in the target."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.kernels.int8_linear import Int8Linear, int8_copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_close_to_the_original(rows, bias, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(128, 96, bias=bias).to(dtype)
    x = torch.randn(1, rows, 128).to(dtype)
    with torch.inference_mode():
        found, expected = Int8Linear(linear)(x), linear(x)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()
    if rows > 2:
        assert torch.equal(found, expected)


def test_copy_shares_weights_and_leaves_the_model_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Sequential(nn.Linear(8, 4)))
    before = [type(m) for m in model.modules()]
    copied = int8_copy(model)
    assert [type(m) for m in model.modules()] == before
    assert isinstance(copied[0], Int8Linear)
    assert isinstance(copied[2][0], Int8Linear)
    assert copied[0].linear.weight is model[0].weight
