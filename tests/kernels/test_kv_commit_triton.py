"""Rows move as if one after the other, in every cache."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from outrider.kernels.kv_commit import Caches, kv_commit, reference
from outrider.kernels.kv_commit import triton as kernel

S = 40
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.float64]


def caches(count=4, shape=(2, 64), dtype=torch.bfloat16, gap=0, shift=0):
    """Caches with rows of random bytes, laid out in one piece of memory."""
    size = int(torch.tensor(shape).prod()) * dtype.itemsize
    step = size + gap
    memory = torch.randint(0, 256, (shift + count * S * step + 16,), dtype=torch.uint8)
    found = []
    for c in range(count):
        rows = memory[shift + c * S * step :][: S * step].view(S, step)[:, :size]
        found.append(rows.view(dtype).unflatten(1, shape))
    return memory, found


def moves(*requests):
    """[B, N] sources and destinations, each request's padded with -1."""
    width = max(len(r) for r in requests)
    padded = [[*r, *[(-1, -1)] * (width - len(r))] for r in requests]
    table = torch.tensor(padded).view(len(requests), width, 2)
    return table[..., 0].contiguous(), table[..., 1].contiguous()


MOVES = moves(
    [(5, 4), (6, 5), (9, 6)],  # a row lands where an earlier one came from
    [(10, 10), (12, 11)],  # the first is in its place
    [],
    [(30, 20), (31, 21), (32, 22), (33, 23), (39, 24)],
)


def launch(table, src, dst):
    kernel.kv_commit(table.base, table.offsets, table.width, table.stride, table.align, src, dst)


def check(memory, tensors, src, dst):
    """Every byte of the memory, gaps included, is as the reference leaves it."""
    before = memory.clone()
    reference.kv_commit(tensors, src, dst)
    expected = memory.clone()
    memory.copy_(before)
    launch(Caches.of(tensors), src, dst)
    assert torch.equal(memory, expected)
    moves = (src >= 0) & (dst >= 0) & (src != dst)
    assert torch.equal(memory, before) == (not moves.any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (2, 64), (8, 320)], ids=str)
def test_bytes_are_as_the_reference_leaves_them(shape, dtype, interpreted):
    check(*caches(shape=shape, dtype=dtype), *MOVES)


@pytest.mark.parametrize(("gap", "shift"), [(16, 0), (4, 0), (0, 4), (2, 2)])
def test_rows_apart_and_caches_that_begin_anywhere(gap, shift, interpreted):
    memory, tensors = caches(gap=gap, shift=shift)
    aligned = memory.data_ptr() % 16 == 0 and gap % 16 == shift % 16 == 0
    assert Caches.of(tensors).align == (4 if aligned else 1)
    check(memory, tensors, *MOVES)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_of_either_width_and_one_cache(dtype, interpreted):
    check(*caches(count=1), *(slots.to(dtype) for slots in MOVES))


def test_nothing_to_move(interpreted):
    memory, tensors = caches()
    nothing = (moves([(3, 3)], []), moves([(-1, -1), (-1, 7), (7, -1)]), moves([], []))
    for src, dst in nothing:
        check(memory, tensors, src, dst)
    check(memory, tensors, *(slots[:0] for slots in MOVES))


def test_accepted_paths_are_compacted(interpreted):
    """As a verify step asks: nodes 0, 2, 5 of 8 to places 0, 1, 2."""
    memory, tensors = caches()
    rows = [cache.clone() for cache in tensors]
    launch(Caches.of(tensors), *moves([(8, 8), (10, 9), (13, 10)], [(16, 16), (21, 17)]))
    for cache, old in zip(tensors, rows, strict=True):
        assert torch.equal(cache[8:11].view(torch.uint8), old[[8, 10, 13]].view(torch.uint8))
        assert torch.equal(cache[16:18].view(torch.uint8), old[[16, 21]].view(torch.uint8))


def test_on_cpu_and_arguments():
    memory, tensors = caches(dtype=torch.float32)
    expected = tensors[0][5].clone()
    kv_commit(Caches.of(tensors), *MOVES)
    assert torch.equal(tensors[0][4].view(torch.uint8), expected.view(torch.uint8))
    table = Caches.of(tensors)
    with pytest.raises(ValueError, match=r"\[B, N\]"):
        kv_commit(table, MOVES[0][0], MOVES[1][0])
    with pytest.raises(TypeError, match="integers"):
        kv_commit(table, MOVES[0].float(), MOVES[1])
    with pytest.raises(ValueError, match="one Caches for each"):
        Caches.of([tensors[0], torch.zeros(S, 3)])


@triton.jit
def _backwards(base, offsets, src, dst, N, W, stride, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    # the last row first: it overwrites what an earlier row was to bring away
    o_w = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    p_cache = base + tl.load(offsets + tl.program_id(1))
    for i in range(N):
        i_src = tl.load(src + tl.program_id(0) * N + N - 1 - i)
        i_dst = tl.load(dst + tl.program_id(0) * N + N - 1 - i)
        if i_src >= 0:
            b_row = tl.load(p_cache + i_src * stride + o_w, mask=o_w < W)
            tl.store(p_cache + i_dst * stride + o_w, b_row, mask=o_w < W)


def test_twin_another_order_is_caught(interpreted, monkeypatch):
    monkeypatch.setattr(kernel, "commit_kernel", _backwards)
    with pytest.raises(AssertionError):
        check(*caches(), *MOVES)


def test_twin_requests_that_share_a_slot_race(interpreted):
    from outrider.kernels.interpreter import Race

    _, tensors = caches()
    with pytest.raises(Race):
        launch(Caches.of(tensors), *moves([(5, 4)], [(4, 3)]))
