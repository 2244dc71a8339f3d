"""Paged and prefill attention in Triton's interpreter: against float64, and bit for bit."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from outrider.kernels import interpreter
from outrider.kernels.paged_attention import Layout, Past, Tile, branches
from outrider.kernels.paged_attention.splits import (
    SAME,
    full_splits,
    num_splits,
    num_splits_on_device,
    split_start,
)
from outrider.kernels.paged_attention.trees import for_graph, tail_slots, tree_layout
from outrider.kernels.paged_attention.triton import paged_attention
from outrider.kernels.prefill_attention.triton import prefill_attention

TILE = Tile(rows=16, keys=16, split=32)
SLOTS = 320


class Case:
    """A cache with its slots in random order, and queries."""

    def __init__(self, kv_heads=1, group=4, dim=32, dtype=torch.bfloat16, rows=8, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.group, self.scale = group, dim**-0.5
        self.k, self.v = (
            torch.randn(SLOTS, kv_heads, dim, generator=g).to(dtype) for _ in range(2)
        )
        self.q = torch.randn(rows, kv_heads * group, dim, generator=g).to(
            torch.bfloat16 if dtype.itemsize == 1 else dtype
        )
        self.slots = torch.randperm(SLOTS, generator=g)

    def layout(self, *requests, tile=TILE):
        return Layout.of(requests, tile, self.group)

    def paged(self, layout, q=None, **options):
        return paged_attention(
            self.q if q is None else q, self.k, self.v, layout, self.scale, **options
        )

    def alone(self, row, slots, tile=TILE, **options):
        """The row as plain decoding computes it: one request, one row."""
        past = Past([0], [len(slots)], slots)
        return self.paged(self.layout([past], tile=tile), self.q[row : row + 1], **options)[0]

    def truth(self, row, slots, window=None, softcap=None):
        """The row in float64, and how far any correct arithmetic may be from it: see `bound`."""
        k, v = (x[slots].double().repeat_interleave(self.group, 1) for x in (self.k, self.v))
        q = self.q[row].double()
        s = torch.einsum("hd,lhd->hl", q, k) * self.scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        if window:
            s[:, : max(0, len(slots) - window)] = -math.inf
        p = s.softmax(-1)
        sizes = torch.einsum("hd,lhd->hl", q.abs(), k.abs()) * self.scale
        values = torch.einsum("hl,lhd->hd", p, v.abs())
        limit = bound(self.q.dtype, k.shape[2], len(slots), sizes.amax(1), softcap or 0.0)
        return torch.einsum("hl,lhd->hd", p, v), limit[:, None] * values


def bound(dtype, dim, keys, sizes, softcap):
    """How far attention may be from the truth, relative to the weighted mean of |values|.

    With u = 2^-24 for float32, and r for the type that weights and results are rounded to:
    a score is a sum of `dim` products, scaled and in units of log 2, less the largest one, so it is
    off by (dim + 8) u of the sum of its products' magnitudes (`sizes`), and a soft cap adds 16 u of
    the cap; exp2 adds 4 u to a weight. Every weight stands above and below the fraction: twice.
    Two sums of `keys` terms, faded once a block at 5 u: 2 * 2 keys u. Weights and the result: 2 r.
    One per cent more covers the products of these errors.
    """
    u, r = 2.0**-24, torch.finfo(dtype).eps / 2
    weight = ((dim + 8) * sizes + 16 * softcap + 4) * u
    return 1.01 * (2 * weight + 4 * keys * u + 2 * r)


def chain(case, row, prefix, count, start=0):
    """The past of `count` rows from `row` on, after `prefix` cached positions."""
    lens = range(prefix + 1, prefix + count + 1)
    return Past(range(row, row + count), lens, case.slots[start : start + prefix + count])


def assert_near(found, case, rows, **options):
    for row, slots in rows:
        exact, limit = case.truth(row, slots, **options)
        assert ((found[row].double() - exact).abs() <= limit).all()


HEADS = [(2, 4, 64), (1, 1, 64), (1, 6, 96), (2, 7, 128), (1, 8, 256)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_near_float64(interpreted, heads, dtype):
    case = Case(*heads, dtype=dtype)
    pasts = [[chain(case, 0, 61, 5)], [chain(case, 5, 0, 1, 100)], [chain(case, 6, 62, 2, 140)]]
    layout = case.layout(*pasts)
    rows = [(r, p.slots[:n]) for [p] in pasts for r, n in zip(p.rows, p.lens, strict=True)]
    assert_near(case.paged(layout), case, rows)
    assert_near(prefill_attention(case.q, case.k, case.v, layout, case.scale), case, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_twin_a_key_left_out_is_seen(dtype):
    """So the bounds, which hold for any order of sums, are not too wide to find a mistake."""
    case = Case(2, 7, 128, dtype=dtype)
    exact, limit = case.truth(0, case.slots[:62])
    short, _ = case.truth(0, case.slots[:61])
    heads = ((short - exact).abs() > limit).any(1)
    assert heads.float().mean() > 0.5  # some heads give that key no weight to speak of


@pytest.mark.parametrize("options", [{"window": 20}, {"window": 40}, {"softcap": 3.0}], ids=str)
def test_window_and_softcap(interpreted, options):
    case = Case()
    past = chain(case, 0, 90, 8)
    rows = [(i, past.slots[: 91 + i]) for i in range(8)]
    found = case.paged(case.layout([past]), **options)
    assert_near(found, case, rows, **options)
    folded = prefill_attention(case.q, case.k, case.v, case.layout([past]), case.scale, **options)
    assert torch.equal(found, folded)
    for row, slots in rows[::3]:
        assert torch.equal(found[row], case.alone(row, slots, **options))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_8_bit_cache(interpreted, dtype):
    case = Case(dtype=dtype)
    past = chain(case, 0, 60, 8)
    found = case.paged(case.layout([past]), out_scale=0.5)
    assert_near(2 * found, case, [(i, past.slots[: 61 + i]) for i in range(8)])


def test_pages(interpreted):
    """A table of pages of 16 gives the bits of a table of slots."""
    case = Case()
    page, length = 16, 75
    pages = torch.tensor([7, 3, 11, 0, 5], dtype=torch.int32)
    slots = torch.cat([p * page + torch.arange(page) for p in pages])[:length]
    past = Past(range(4), range(length - 3, length + 1), slots)
    layout = case.layout([past])
    paged = replace(layout, slots=pages, page=page)
    assert torch.equal(case.paged(layout, case.q[:4]), case.paged(paged, case.q[:4]))


@pytest.mark.parametrize("prefix", [0, 30, 31, 33, 63, 90])
@pytest.mark.parametrize("drafts", [0, 1, 3, 4, 7])
def test_a_verify_row_is_the_decode_row(interpreted, prefix, drafts):
    """For every number of drafts, beside any neighbours, wherever the splits fall."""
    case = Case(seed=prefix)
    past = chain(case, 0, prefix, drafts + 1)
    others = [chain(case, drafts + 1, 70, 7 - drafts, 150)] if drafts < 7 else []
    found = case.paged(case.layout([past], *([o] for o in others)))
    for row in (0, drafts):
        assert torch.equal(found[row], case.alone(row, past.slots[: prefix + row + 1]))


def test_neighbours_programs_and_slots_do_not_matter(interpreted):
    case = Case()
    past = chain(case, 0, 90, 4)
    found = case.paged(case.layout([past]), case.q[:4])
    for programs in (1, 2, 16):
        layout = case.layout([past], [chain(case, 4, 10, 4, 200)])
        assert torch.equal(case.paged(layout, programs=programs)[:4], found)
    moved = Case()
    order = torch.randperm(SLOTS)
    moved.k, moved.v = case.k[order], case.v[order]
    past = replace(past, slots=order.argsort()[past.slots])
    assert torch.equal(moved.paged(moved.layout([past]), moved.q[:4]), found)


TREES = {
    "star": [-1, 0, 0, 0],
    "binary": [-1, 0, 0, 1, 1, 2, 2],
    "two chains": [-1, 0, 1, 2, 0, 4, 5],
    "late fork": [-1, 0, 1, 2, 3, 3, 4, 5],
}


def tree(case, prefix, parents, row=0):
    """The branches of a tree whose nodes stand in slots after the prefix, in order."""
    own = case.slots[prefix : prefix + len(parents)]
    return [
        Past(
            [row + node for node in nodes],
            [prefix + path.index(node) + 1 for node in nodes],
            torch.cat([case.slots[:prefix], own[path]]),
            prefix,
        )
        for nodes, path in branches(parents)
    ]


@pytest.mark.parametrize("prefix", [0, 29, 64, 95])
@pytest.mark.parametrize("name", TREES)
def test_a_row_of_a_tree_is_the_decode_row_of_its_path(interpreted, name, prefix):
    parents = TREES[name]
    case = Case(rows=len(parents), seed=prefix)
    pasts = tree(case, prefix, parents)
    found = case.paged(case.layout(pasts))
    for past in pasts:
        for row, length in zip(past.rows, past.lens, strict=True):
            assert torch.equal(found[row], case.alone(row, past.slots[:length]))
    assert len(pasts) == sum(node not in parents for node in range(len(parents)))


def test_twin_keys_in_another_order_have_other_bits(interpreted):
    """So the tests above would notice a tree whose keys are read in the order of its slots."""
    case = Case()
    past = chain(case, 0, 70, 8)
    mixed = replace(past, slots=past.slots[[1, 0, 16, 40, *range(4, 16), 2, *range(17, 40), 3,
                                            *range(41, 78)]])  # fmt: skip
    found, other = (case.paged(case.layout([p]))[-1] for p in (past, mixed))
    assert not torch.equal(found, other)
    torch.testing.assert_close(found, other, rtol=0, atol=0.02)


def test_prefill_in_any_chunks_is_decode(interpreted):
    """At once, in chunks, over a cached prefix, token by token: one result, whatever the tile."""
    rows = 40
    case = Case(rows=rows)
    whole = chain(case, 0, 0, rows)

    def prefill(*cuts, tile=TILE):
        parts = []
        for start, end in pairwise(cuts):
            past = Past(range(end - start), range(start + 1, end + 1), case.slots[:end])
            layout = case.layout([past], tile=tile)
            parts.append(prefill_attention(case.q[start:end], case.k, case.v, layout, case.scale))
        return torch.cat(parts)

    found = prefill(0, rows)
    assert torch.equal(found, prefill(0, 7, 33, rows))
    assert torch.equal(found, prefill(0, rows, tile=replace(TILE, rows=64)))
    for row in (0, 31, 32, 39):
        assert torch.equal(found[row], case.alone(row, whole.slots[: row + 1]))


def test_twin_another_split_has_other_bits(interpreted):
    case = Case()
    past = chain(case, 0, 90, 1)
    found, other = (
        case.paged(case.layout([past], tile=replace(TILE, split=s)), case.q[:1]) for s in (32, 64)
    )
    assert not torch.equal(found, other)


def test_layout_made_on_the_device(interpreted):
    """Rows of one line beside each other share tiles; rows of length 0 are padding."""
    case = Case()
    table = torch.stack([case.slots[i : i + 100] for i in (0, 50, 120)]).to(torch.int32)
    lines = torch.tensor([2, 2, 2, 2, 2, 0, 0, 1])
    lens = torch.tensor([60, 61, 62, 63, 64, 33, 34, 0], dtype=torch.int32)
    layout = Layout.of_lines(lines, lens, table, TILE, case.group, max_len=100)
    assert layout.tiles[:, 1].tolist() == [4, 1, 2, 0, 0, 0, 0, 0]
    found = case.paged(layout)
    for row in range(7):
        slots = table[lines[row], : lens[row]].long()
        assert torch.equal(found[row], case.alone(row, slots))
    assert found[7].abs().max() == 0


def test_trees_in_a_captured_layout(interpreted):
    """One layout takes over trees and chains of up to eight rows, one after the other.

    Its buffers stay where they are, and rows that a step does not have are padding.
    """
    case = Case()
    table = torch.stack([case.slots[i : i + 100] for i in (0, 50, 120)]).to(torch.int32)
    lines, ones = torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.int64)
    tails = torch.full((tail_slots(8, 100, TILE),), -1, dtype=torch.int32)
    chains = Layout.of_lines(lines, ones, table, TILE, case.group, max_len=100)
    captured = for_graph(chains, tails)
    buffers = [captured.tiles, captured.rows, captured.lens, captured.parts, captured.tails]
    addresses = [buffer.data_ptr() for buffer in buffers]

    def check(parents, owners, prefixes):
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        lens = [prefixes[o] + depth + 1 for o, depth in zip(owners, depths, strict=True)]
        lens += [1] * (8 - len(lens))
        on = torch.tensor([*owners, *[0] * (8 - len(owners))])
        captured.copy_(tree_layout(parents, lens, on, table, TILE, case.group, 100))
        found = case.paged(captured)
        for row, owner in enumerate(owners):
            prefix, first, path = prefixes[owner], owners.index(owner), []
            node = row
            while node >= 0:
                path.insert(0, prefix + node - first)
                node = parents[node]
            slots = table[owner, [*range(prefix), *path]].long()
            assert torch.equal(found[row], case.alone(row, slots))
        for row in range(len(owners), 8):
            assert torch.equal(found[row], case.alone(row, table[0, :1].long()))

    check([-1, 0, 0, 1, 1, 2, 2], [2] * 7, {2: 70})
    check([-1, 0, 1, 0, -1, 4, 5, 4], [1, 1, 1, 1, 0, 0, 0, 0], {0: 31, 1: 64})
    check([-1, 0, 0, -1], [0, 0, 0, 2], {0: 5, 2: 90})  # no full split: no trunk
    check([-1, 0, 1, -1, 3], [1, 1, 1, 2, 2], {1: 33, 2: 40})  # chains
    lens = torch.tensor([60, 61, 62, 63, 64, 33, 34, 1])
    lines = torch.tensor([2, 2, 2, 2, 2, 0, 0, 1])
    captured.copy_(Layout.of_lines(lines, lens, table, TILE, case.group, max_len=100))
    found = case.paged(captured)
    for row in range(8):
        slots = table[lines[row], : lens[row]].long()
        assert torch.equal(found[row], case.alone(row, slots))
    assert addresses == [buffer.data_ptr() for buffer in buffers]


def test_layout_of_a_prefill_made_on_the_device(interpreted):
    case = Case(rows=20)
    table = torch.stack([case.slots[i : i + 60] for i in (0, 50, 120)]).to(torch.int32)
    layout = Layout.of_runs(torch.tensor([2, 0]), [37, 0], [13, 7], table, TILE, case.group)
    found = prefill_attention(case.q, case.k, case.v, layout, case.scale)
    for row, (line, length) in {0: (2, 38), 12: (2, 50), 13: (0, 1), 19: (0, 7)}.items():
        assert torch.equal(found[row], case.alone(row, table[line, :length].long()))


LONG = replace(TILE, split=16)
"""Splits of 16 keys up to position 128, then of 32."""


BORDERS = [
    # each prefix with or without a window is enough for every day
    pytest.param(prefix, options, marks=[pytest.mark.slow] if (i + j) % 2 else [])
    for i, prefix in enumerate([126, 127, 128, 155, 159, 160, 250])
    for j, options in enumerate([{}, {"window": 100}])
]


@pytest.mark.parametrize(("prefix", "options"), BORDERS, ids=str)
def test_bits_are_the_same_where_splits_get_longer(interpreted, prefix, options):
    """Decoded alone, verified as a chain, as a tree, and prefilled."""
    case = Case()
    past = chain(case, 0, prefix, 8)
    rows = [(i, past.slots[: prefix + 1 + i]) for i in range(8)]
    found = case.paged(case.layout([past], tile=LONG), **options)
    assert_near(found, case, rows, **options)
    layout = case.layout([past], tile=LONG)
    assert torch.equal(
        found, prefill_attention(case.q, case.k, case.v, layout, case.scale, **options)
    )
    for row, slots in rows[::3]:
        assert torch.equal(found[row], case.alone(row, slots, tile=LONG, **options))
    pasts = tree(case, prefix, TREES["binary"])
    branched = case.paged(case.layout(pasts, tile=LONG), case.q[:7], **options)
    for past in pasts:
        for row, length in zip(past.rows, past.lens, strict=True):
            alone = case.alone(row, past.slots[:length], tile=LONG, **options)
            assert torch.equal(branched[row], alone)


@pytest.mark.parametrize("max_len", [40, 64, 200, 100_000])
def test_bits_do_not_depend_on_the_longest_context(interpreted, max_len):
    """Two servers with different K or --context-length have req_to_token of different widths."""
    case = Case()
    table = case.slots[:40][None].to(torch.int32)
    lines, lens = torch.zeros(2, dtype=torch.int64), torch.tensor([39, 40])
    layout = Layout.of_lines(lines, lens, table, Tile.fit(case.group), case.group, max_len)
    found = case.paged(layout, case.q[:2])
    for row in range(2):
        alone = case.alone(row, case.slots[: lens[row]], tile=Tile.fit(case.group))
        assert torch.equal(found[row], alone)


@pytest.mark.parametrize("size", [16, 256])
def test_splits_depend_on_the_position_alone(size):
    """In Python, on the device and in the kernel, they begin at the same positions."""
    starts = [split_start(i, size) for i in range(300)]
    sizes = [end - start for start, end in pairwise(starts)]
    assert starts[0] == 0
    assert sizes == [size * (1 + i // SAME) for i in range(299)]
    near = sorted({max(0, s + d) for s in starts for d in (-1, 0, 1)})[:-1]
    lens = torch.tensor(near)
    counted = [bisect_left(starts, n) for n in near]
    assert [num_splits(n, size) for n in near] == counted
    assert num_splits_on_device(lens, size).tolist() == counted
    assert [full_splits(n, size) for n in near] == [bisect_right(starts, n) - 1 for n in near]


def test_short_contexts_are_shared_among_programs_and_long_ones_bounded():
    split = Tile.fit(8).split
    assert [num_splits(n, split) for n in (1024, 2048, 4096)] == [4, 8, 12]
    assert num_splits(131_072, split) == 87


@pytest.mark.parametrize(("rows", "group"), [(1, 8), (8, 8), (8, 1), (5, 7), (4, 4), (2, 6)])
def test_keys_are_read_once_for_each_kv_head(rows, group):
    """KV bytes of a step = 2 Hkv D size * sum of lengths, up to 8 rows of 8 heads."""
    case = Case(group=group, rows=rows + 1)
    pasts = [chain(case, 0, 70, rows), chain(case, rows, 33, 1, 120)]
    layout = case.layout(*([p] for p in pasts), tile=replace(Tile.fit(group), keys=16, split=32))
    least = 70 + rows + 34
    assert layout.tokens_read() == least
    with interpreter.checked() as traffic:
        case.paged(layout)
    assert traffic.read(case.k) == traffic.read(case.v) == least * case.k[0].numel() * 2


def test_a_tree_reads_its_last_splits_once_for_each_leaf():
    case = Case(rows=7)
    pasts = tree(case, 70, TREES["binary"])
    assert case.layout(pasts, tile=replace(TILE, rows=64)).tokens_read() == 64 + 4 * (6 + 3)


def test_twin_a_small_tile_reads_keys_again():
    case = Case(group=8)
    layout = case.layout([chain(case, 0, 70, 8)])
    assert layout.tokens_read() == 4 * 76 - 3 * 2 + 2  # reaches 72, 74, 76 and 78


def test_seeded_bug_a_slot_outside_of_the_cache(interpreted):
    case = Case()
    layout = case.layout([chain(case, 0, 40, 8)])
    layout.slots[17] = SLOTS
    with pytest.raises(Exception, match="OutOfBounds"):
        case.paged(layout)


def test_seeded_bug_rows_that_share_scratch(interpreted):
    case = Case()
    layout = case.layout([chain(case, 0, 40, 4)], [chain(case, 4, 40, 4, 100)])
    with pytest.raises(interpreter.Race):
        case.paged(replace(layout, parts=torch.zeros_like(layout.parts)))


def test_seeded_bug_a_split_that_nobody_computes(interpreted):
    """The combine step would read scratch that was never written: it is poisoned."""
    case = Case()
    layout = case.layout([chain(case, 0, 90, 8)])
    layout.tiles[:, 4] = 2
    assert case.paged(layout).isnan().any()


def test_seeded_bug_a_mask_off_by_one(interpreted):
    case = Case()
    past = chain(case, 0, 40, 8)
    wrong = replace(past, lens=[n - 1 for n in past.lens])
    with pytest.raises(AssertionError):
        assert_near(case.paged(case.layout([wrong])), case, [(3, past.slots[:44])])
