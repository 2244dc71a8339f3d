"""Linear layers and norms in Triton's interpreter: near float64, and rows bit for bit."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.row_invariant import triton as kernels


def inputs(m, k, n, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(s, generator=g).to(dtype) for s in ((m, k), (n, k), (n,)))


@pytest.mark.parametrize("shape", [(1, 64, 64), (3, 100, 7), (65, 130, 70), (0, 8, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_linear_near_float64(interpreted, shape, dtype):
    x, weight, bias = inputs(*shape, dtype)
    exact = x.double() @ weight.double().T + bias.double()
    found = kernels.linear(x, weight, bias).double()
    torch.testing.assert_close(found, exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_rows_of_linear_do_not_depend_on_the_number_of_rows(interpreted):
    x, weight, _ = inputs(70, 96, 40)
    whole = kernels.linear(x, weight)
    for rows in (slice(0, 1), slice(5, 9), slice(63, 70)):
        assert torch.equal(kernels.linear(x[rows], weight), whole[rows])
    strided = torch.cat([x, x], dim=1)[:, :96]
    assert torch.equal(kernels.linear(strided, weight), whole)
    assert torch.equal(kernels.linear(x, weight.T.contiguous().T), whole)
    batch = kernels.linear(x.view(7, 10, 96), weight)
    assert torch.equal(batch, whole.view(7, 10, 40))


@pytest.mark.parametrize("dim", [7, 64, 172, 1000])
def test_norms(interpreted, dim):
    x, weight, _ = inputs(5, dim, 1, torch.float32)
    weight = weight[0]
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    found = kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found.double(), exact * weight.double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(kernels.rms_norm(x[2:3], weight, 1e-5), found[2:3])
    torch.testing.assert_close(kernels.row_mean(x), x.mean(-1, keepdim=True))
    assert torch.equal(kernels.row_mean(x.T.contiguous().T), kernels.row_mean(x))


def test_twin_a_sum_split_along_k_has_other_bits(interpreted):
    """What a library does when it splits K by the number of rows."""
    x, weight, _ = inputs(2, 128, 64, torch.float32)
    halves = [kernels.linear(x[:, half], weight[:, half]) for half in (slice(64), slice(64, 128))]
    whole = kernels.linear(x, weight)
    assert not torch.equal(halves[0] + halves[1], whole)
    torch.testing.assert_close(halves[0] + halves[1], whole)
