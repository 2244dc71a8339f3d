"""The checked interpreter: computes as hardware does, and sees each class of mistake."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from outrider.kernels import interpreter


@triton.jit
def product(x, y, out, M: tl.constexpr, K: tl.constexpr):
    o_m, o_k = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(x + o_m[:, None] * K + o_k[None, :])
    b = tl.load(y + o_k[:, None] * M + o_m[None, :])
    tl.store(out + o_m[:, None] * M + o_m[None, :], tl.dot(a, b))


@triton.jit
def convert(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.load(x + o).to(out.dtype.element_ty))


@triton.jit
def add(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    b = tl.load(x + o)
    tl.store(out + o, b + b)


@triton.jit
def shift(x, by, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(x + o + by, tl.load(x + o))


@triton.jit
def write_same(x):
    tl.store(x, tl.program_id(0))


@triton.jit
def read_next(x, out):
    i = tl.program_id(0)
    tl.store(out + i, tl.load(x + i))
    tl.store(x + i + 1, i)


@triton.jit
def own_cell(x):
    i = tl.program_id(0)
    tl.store(x + i, tl.load(x + i) + i)


def matrices(dtype, k=32):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(s, generator=g).to(dtype) for s in ((16, k), (k, 16)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_those_of_matrix_cores(dtype):
    x, y = matrices(dtype)
    out = torch.zeros(16, 16)
    with interpreter.checked():
        product[(1,)](x, y, out, M=16, K=32)
    torch.testing.assert_close(out.double(), x.double() @ y.double(), rtol=1e-6, atol=1e-5)


def test_twin_the_stock_interpreter_multiplies_bit_patterns():
    x, y = matrices(torch.bfloat16)
    out = torch.zeros(16, 16)
    product[(1,)](x, y, out, M=16, K=32)
    assert (out.double() - x.double() @ y.double()).abs().max() > 1


def test_sums_depend_on_their_order_in_steps_of_a_matrix_instruction():
    """So tests of bits can fail: the same products in other steps round otherwise."""
    x, y = matrices(torch.float32, k=64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    found, mixed = torch.zeros(16, 16), torch.zeros(16, 16)
    with interpreter.checked():
        product[(1,)](x, y, found, M=16, K=64)
        product[(1,)](x[:, order].contiguous(), y[order].contiguous(), mixed, M=16, K=64)
    assert not torch.equal(found, mixed)


def test_bfloat16_rounds_to_nearest_even():
    x = torch.tensor([1.0 + 2**-9, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -3.1415927, 1e30, float("nan")])
    x = torch.cat([x, torch.tensor([float("inf"), 0.0])])
    out = torch.zeros(8, dtype=torch.bfloat16)
    with interpreter.checked():
        convert[(1,)](x, out, N=8)
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out.nan_to_num(), x.bfloat16().nan_to_num())


def test_bfloat16_arithmetic_is_refused():
    x, out = torch.ones(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    with interpreter.checked(), pytest.raises(Exception, match="cast to float32 first"):
        add[(1,)](x, out, N=8)


@pytest.mark.parametrize("by", [-1, 1])
def test_accesses_outside_of_a_tensor_are_seen(by):
    x = torch.zeros(8)
    with interpreter.checked(), pytest.raises(Exception, match="OutOfBounds"):
        shift[(1,)](x, by, N=8)


def test_a_view_ends_where_its_storage_ends():
    x = torch.zeros(8)
    with interpreter.checked():
        shift[(1,)](x[2:], 2, N=4)
        with pytest.raises(Exception, match="OutOfBounds"):
            shift[(1,)](x[2:], 3, N=4)


def test_two_programs_that_write_one_address_race():
    with interpreter.checked(), pytest.raises(interpreter.Race, match="more than one program"):
        write_same[(2,)](torch.zeros(4))


def test_a_program_that_reads_what_another_writes_races():
    with interpreter.checked(), pytest.raises(interpreter.Race, match="another program writes"):
        read_next[(3,)](torch.zeros(8), torch.zeros(8))


def test_a_program_may_read_what_it_writes():
    x = torch.zeros(4)
    with interpreter.checked():
        own_cell[(4,)](x)
    assert x.tolist() == [0, 1, 2, 3]


def test_programs_run_in_the_order_asked_for():
    """Every program runs once, in an order that a seed decides."""
    orders = []
    for seed in (None, 1, 2):
        x = torch.zeros(6)
        with interpreter.checked(shuffle=seed):
            own_cell[(6,)](x)
            orders.append(interpreter.stock.interpreter_builder.programs.tolist())
        assert x.tolist() == list(range(6))
    assert orders[0] == list(range(6))
    assert orders[1] != orders[0] != orders[2] != orders[1]


def test_bytes_are_counted():
    x, y = matrices(torch.bfloat16)
    out = torch.zeros(16, 16)
    with interpreter.checked() as traffic:
        product[(1,)](x, y, out, M=16, K=32)
        product[(1,)](x, y, out, M=16, K=32)
    assert traffic.read(x) == traffic.read(y) == 2 * 16 * 32 * 2
    assert traffic.read(out) == 0
