"""Rows with the same bits, however many there are; and the ops that need help for it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from outrider.kernels.row_invariant import RowInvariant, elementwise

COUNTS = (1, 2, 3, 5, 8, 15, 16, 17, 33)
LAYERS = [(64, 172), (172, 64), (288, 768), (896, 4864), (1536, 256)]


def rows(width, dtype, scale=1.0):
    return (torch.randn(40, width, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)


def differing(function, x):
    """Return the (count, offset) of row blocks that differ from the rows computed alone."""
    alone = torch.cat([function(x[None, i : i + 1])[0] for i in range(len(x))])
    return [
        (count, offset)
        for count in COUNTS
        for offset in (0, 1, 7)
        if not torch.equal(function(x[None, offset : offset + count])[0], alone[offset:][:count])
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_linear(layer, dtype):
    x, weight = rows(layer[0], dtype), rows(layer[0], dtype).repeat(200, 1)[: layer[1]]
    bias = rows(layer[1], dtype)[0]
    with RowInvariant():
        assert differing(lambda block: F.linear(block, weight), x) == []
        assert differing(lambda block: F.linear(block, weight, bias), x) == []
        assert differing(lambda block: torch.matmul(block[0], weight.t())[None], x) == []
        assert differing(lambda block: (block[0] @ weight.t())[None], x) == []
        packed = weight.t().contiguous()
        assert differing(lambda block: torch.addmm(bias, block[0], packed)[None], x) == []


@pytest.mark.parametrize("beta", [0, 1, 0.5])
def test_rows_added_to_a_product(beta):
    """`addmm` and `addmm_`, as LoRA uses them."""
    x, weight = rows(1536, torch.float32), rows(1536, torch.float32).t().contiguous()

    def add(block):
        base = block[0][:, :40].contiguous()
        found = torch.addmm(base, block[0], weight, beta=beta, alpha=3.0)
        assert torch.equal(found, base.clone().addmm_(block[0], weight, beta=beta, alpha=3.0))
        return found[None]

    with RowInvariant():
        assert differing(add, x) == []
        found = add(x[None])
    torch.testing.assert_close(found[0], beta * x[:, :40] + 3.0 * x @ weight, rtol=1e-4, atol=1e-3)


def test_twin_plain_linear_depends_on_the_number_of_rows():
    x, weight = rows(1536, torch.float32), rows(1536, torch.float32)
    assert differing(lambda block: F.linear(block, weight), x)


FUNCTIONS = [F.silu, F.gelu, torch.tanh, torch.cos, torch.sigmoid, torch.exp]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 43, 172, 768, 8960])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_of_elements(function, width, dtype):
    x = rows(width, dtype, 3.0)
    with RowInvariant():
        assert differing(function, x) == []
    torch.testing.assert_close(elementwise(function, x), function(x))


def test_twin_plain_silu_depends_on_where_a_row_ends():
    assert differing(F.silu, rows(172, torch.float32, 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 172, 288, 1536])
def test_what_needs_no_help(width, dtype):
    """Norms and softmax reduce row by row already: checked, not changed."""
    x = rows(width, dtype, 3.0)
    assert differing(lambda b: F.layer_norm(b, (width,)), x) == []
    assert differing(lambda b: F.rms_norm(b.float(), (width,)), x) == []
    rms = lambda b: b.float() * torch.rsqrt(b.float().pow(2).mean(-1, keepdim=True) + 1e-6)  # noqa: E731
    assert differing(rms, x) == []
    assert differing(lambda b: b.float().softmax(-1), x) == []
    assert differing(lambda b: b.float().log_softmax(-1), x) == []
    ordered = lambda b: torch.sort(b.float(), dim=-1, descending=True, stable=True)[0].cumsum(-1)  # noqa: E731
    assert differing(ordered, x) == []


def test_left_alone_outside():
    x, weight = rows(64, torch.float32), rows(64, torch.float32)
    before = F.linear(x, weight)
    with RowInvariant():
        pass
    assert torch.equal(F.linear(x, weight), before)
