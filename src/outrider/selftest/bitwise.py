"""A row against itself in other company: decoded, verified, moved, prefilled. Bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from outrider.kernels.paged_attention.layout import Past, Tile, branches
from outrider.selftest.attention import LLAMA_8B, Case, Heads, rows_of
from outrider.selftest.check import Check, Mismatch, Setting, equal

__all__ = ["attention_checks", "layer_checks"]

TREES = {
    "star": [-1, 0, 0, 0],
    "binary": [-1, 0, 0, 1, 1, 2, 2],
    "late fork": [-1, 0, 1, 2, 3, 3, 4, 5],
}
MAX_DRAFTS = 7


def attention_checks(setting: Setting) -> Iterator[Check]:
    """Yield the comparisons of attention: decoded, verified in company, moved, prefilled."""
    models = [Heads(1, 4, 32)] if setting.interpreted else [LLAMA_8B, Heads(8, 8, 128)]
    for heads in models[:1] if setting.quick else models:
        case = Case(setting, heads, rows=MAX_DRAFTS + 1)
        for prefix in case.prefixes[:2] if setting.quick else case.prefixes:
            name = f"paged_attention: {heads}, after {prefix}"
            yield Check(f"{name}: verify = decode, K = 0..7", "bitwise",
                        partial(_chains, case, prefix))  # fmt: skip
            for tree in list(TREES)[1:2] if setting.quick else TREES:
                yield Check(f"{name}: {tree} tree = decode", "bitwise",
                            partial(_tree, case, prefix, TREES[tree]))  # fmt: skip
        yield Check(f"paged_attention: {heads}: neighbours and programs", "bitwise",
                    partial(_company, case))  # fmt: skip
        yield Check(f"paged_attention: {heads}: moved slots", "bitwise", partial(_moved, case))
        if not setting.interpreted:
            yield Check(f"paged_attention: {heads}: in a captured graph", "bitwise",
                        partial(_captured, case))  # fmt: skip
        long = Case(setting, heads, rows=40 if setting.interpreted else 300)
        yield from _prefill_checks(setting, long)


def _chains(case: Case, prefix: int) -> str:
    slots = case.chain(0, prefix, MAX_DRAFTS + 1).slots
    alone = torch.stack([case.alone(row, slots[: prefix + row + 1]) for row in range(8)])
    compared = 0
    for drafts in range(MAX_DRAFTS + 1):
        past, others = case.chain(0, prefix, drafts + 1), MAX_DRAFTS - drafts
        # the rows left over are a neighbour's, so that every K is verified in company
        beside = [[case.chain(drafts + 1, case.prefixes[0], others, 1)]] if others else []
        found = case.paged(case.layout([past], *beside))[: drafts + 1]
        equal(found, alone[: drafts + 1], f"K = {drafts}")
        compared += drafts + 1
    return f"{compared} rows, bit for bit"


def _tree(case: Case, prefix: int, parents: Sequence[int]) -> str:
    trunk, own = case.slots[:prefix], case.slots[prefix : prefix + len(parents)]
    pasts = []
    for nodes, path in branches(parents):
        lens = [prefix + path.index(node) + 1 for node in nodes]
        pasts.append(Past(nodes, lens, torch.cat([trunk, own[path]]), prefix))
    found = case.paged(case.layout(pasts), case.q[: len(parents)])
    for row, slots in rows_of(pasts):
        equal(found[row], case.alone(row, slots), f"node {row}")
    return f"{len(parents)} nodes, bit for bit"


def _company(case: Case) -> str:
    prefix = case.prefixes[2]
    past = case.chain(0, prefix, 4)
    found = case.paged(case.layout([past]), case.q[:4])
    wide = case.layout([case.chain(4, case.prefixes[1], 4, 1)], [past])
    for programs in (None, 1, 2, 16):
        equal(case.paged(wide, programs=programs)[:4], found, f"{programs or 'default'} programs")
    return "4 rows beside 4 others, in 4 grids, bit for bit"


def _moved(case: Case) -> str:
    past = case.chain(0, case.prefixes[2], 4)
    found = case.paged(case.layout([past]), case.q[:4])
    order = torch.randperm(len(case.k), generator=torch.Generator().manual_seed(1))
    order = order.to(case.k.device)
    k, v = case.k, case.v
    case.k, case.v = k[order], v[order]
    try:
        moved = replace(past, slots=order.argsort()[past.slots])
        equal(case.paged(case.layout([moved]), case.q[:4]), found, "moved")
    finally:
        case.k, case.v = k, v
    return "4 rows, every key and value in another slot, bit for bit"


def _captured(case: Case) -> str:
    layout = case.layout([case.chain(0, case.prefixes[2], len(case.q))])
    expected = case.paged(layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.paged(layout)
    graph.replay()
    torch.cuda.synchronize()
    equal(found, expected, "replayed")
    return f"{len(case.q)} rows, bit for bit"


def _prefill_checks(setting: Setting, case: Case) -> Iterator[Check]:
    name = f"prefill_attention: {case.heads}"
    large = case.tile.for_prefill(setting.arch, case.heads.dim, same_bits=False)
    for title, tile, promised in (
        ("decode's tile", case.tile, True),
        # on NVIDIA another tile is another matrix instruction, with another order of sums
        ("the large tile", large, setting.is_amd),
    ):
        yield Check(f"{name}, {title}: whole = chunked", "bitwise",
                    partial(_chunked, case, tile))  # fmt: skip
        yield Check(f"{name}, {title}: whole = decoded", "bitwise",
                    partial(_decoded, case, tile), promised)  # fmt: skip


def _prefill(case: Case, tile: Tile, cuts: Sequence[int]) -> Tensor:
    parts = []
    for start, end in pairwise(cuts):
        past = Past(range(end - start), range(start + 1, end + 1), case.slots[:end])
        parts.append(case.prefill(case.layout([past], tile=tile), case.q[start:end]))
    return torch.cat(parts)


def _chunked(case: Case, tile: Tile) -> str:
    rows = len(case.q)
    cuts = [0, 7, rows // 2 + 3, rows - 1, rows]
    equal(_prefill(case, tile, cuts), _prefill(case, tile, [0, rows]), f"cut at {cuts[1:-1]}")
    return f"{rows} rows at once and in 4 chunks, bit for bit"


def _decoded(case: Case, tile: Tile) -> str:
    rows = len(case.q)
    found = _prefill(case, tile, [0, rows])
    chosen = sorted({0, 1, rows // 4, case.tile.split - 1, case.tile.split, rows - 1})
    if chosen[-1] >= rows:
        raise Mismatch(f"{rows} rows do not reach the second split")
    for row in chosen:
        equal(found[row], case.alone(row, case.slots[: row + 1]), f"row {row}")
    return f"{len(chosen)} of {rows} rows, bit for bit"


def layer_checks(setting: Setting) -> Iterator[Check]:
    """Yield the comparisons of linear layers and norms: rows alone, and among others."""
    counts = (1, 2, 8, 63, 70) if setting.interpreted else (1, 2, 8, 63, 64, 65, 130, 256)
    k, n = (96, 40) if setting.interpreted else (4096, 1024)
    yield Check(f"row_invariant: linear {k} -> {n}, M = {', '.join(map(str, counts))}", "bitwise",
                partial(_linear, setting, counts, k, n))  # fmt: skip
    yield Check(f"row_invariant: rms_norm and row_mean of {k}", "bitwise",
                partial(_norms, setting, k))  # fmt: skip


def _linear(setting: Setting, counts: Sequence[int], k: int, n: int) -> str:
    from outrider.kernels.row_invariant import triton

    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(rows, k, generator=generator).to(torch.bfloat16).to(setting.device)
        for rows in (counts[-1], n)
    )
    whole = triton.linear(x, weight)
    for count in counts:
        # the last rows, not the first: they stand at another place of another tile
        equal(triton.linear(x[-count:], weight), whole[-count:], f"M = {count}")
    return f"{sum(counts)} rows, bit for bit"


def _norms(setting: Setting, dim: int) -> str:
    from outrider.kernels.row_invariant import triton

    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, dim, generator=generator) for rows in (9, 1))
    x, weight = x.to(torch.bfloat16).to(setting.device), weight[0].to(setting.device)
    norm, mean = triton.rms_norm(x, weight, 1e-5), triton.row_mean(x)
    for rows in (slice(0, 1), slice(3, 5), slice(8, 9)):
        equal(triton.rms_norm(x[rows], weight, 1e-5), norm[rows], f"rms_norm of {rows}")
        equal(triton.row_mean(x[rows]), mean[rows], f"row_mean of {rows}")
    return "4 of 9 rows, bit for bit"
