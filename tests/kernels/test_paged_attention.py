"""The paged reference against attention written out, and its rows bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.kernels.paged_attention import SPLIT, Past, paged_attention, tile_rows
from outrider.kernels.prefill_attention import causal_attention

SLOTS = 400
SHAPES = [(4, 4, 8), (8, 2, 16), (6, 1, 64), (12, 2, 128)]


def cache(kv_heads, dim, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(SLOTS, kv_heads, dim, generator=g).to(dtype) for _ in range(2))
    k[0] = v[0] = 0
    slots = torch.randperm(SLOTS - 1, generator=g) + 1  # pages in any order
    return k, v, slots, g


def naive(q, k, v, scale, window=None, softcap=None):
    """Attention of the last row, in float64. q: [Hq, D]; k, v: [L, Hkv, D]."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,lhd->hl", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if window:
        scores[:, : max(0, len(k) - window)] = -math.inf
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 5.0}], ids=str)
def test_against_attention_written_out(heads, dtype, options):
    hq, hkv, d = heads
    k, v, slots, g = cache(hkv, d, dtype)
    q = torch.randn(7, hq, d, generator=g).to(dtype)
    lens = [1, 63, 64, 65, 66, 130, 131]
    pasts = [
        Past([0], [1], slots[:1]),
        Past([1, 2, 3, 4], lens[1:5], slots[10:76]),
        Past([5, 6], lens[5:], slots[100:231]),
    ]
    found = paged_attention(q, k, v, tile_rows(pasts), d**-0.5, **options)
    for row, (past, length) in enumerate(
        zip([pasts[0]] + [pasts[1]] * 4 + [pasts[2]] * 2, lens, strict=True)
    ):
        own = past.slots[:length]
        expected = naive(q[row], k[own], v[own], d**-0.5, **options).to(dtype)
        torch.testing.assert_close(found[row], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("prefix", [3, SPLIT - 3, SPLIT, 2 * SPLIT + 5])
def test_verify_row_has_the_bits_of_a_decode_row(prefix, heads, dtype):
    """Alone, beside drafts, in a batch with longer neighbours, in another tile, in a tree."""
    hq, hkv, d = heads
    k, v, slots, g = cache(hkv, d, dtype)
    rows = 20
    q = torch.randn(rows + 5, hq, d, generator=g).to(dtype)
    lens = [prefix + i + 1 for i in range(rows)]

    def attend(few, pasts):
        return paged_attention(few, k, v, tile_rows(pasts, 16), d**-0.5)

    decode = torch.cat(
        [attend(q[i : i + 1], [Past([0], [n], slots[:n])]) for i, n in enumerate(lens)]
    )
    whole = Past(range(rows), lens, slots[: lens[-1]])
    assert torch.equal(decode, attend(q[:rows], [whole]))
    neighbour = Past(range(rows, rows + 5), [210] * 5, slots[:210])
    assert torch.equal(decode, attend(q, [whole, neighbour])[:rows])
    shifted = Past(range(5, rows + 5), lens, slots[: lens[-1]])
    first = Past(range(5), [9] * 5, slots[:9])
    assert torch.equal(decode, attend(torch.cat([q[rows:], q[:rows]]), [first, shifted])[5:])
    # each row alone with its own path: what a row of a tree does
    paths = [Past([i], [n], slots[:n]) for i, n in enumerate(lens)]
    assert torch.equal(decode, attend(q[:rows], paths))


def test_twin_stock_attention_depends_on_the_rows_beside():
    """The test above tests something: torch's own attention does not pass it."""
    heads, d, rows, prefix = 8, 64, 20, 120
    k, v, slots, g = cache(heads, d)
    q = torch.randn(rows, heads, d, generator=g)
    own = slots[: prefix + rows]
    k, v = (x[own].transpose(0, 1)[None] for x in (k, v))
    visible = torch.arange(prefix + rows) <= prefix + torch.arange(rows)[:, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    together = sdpa(q.transpose(0, 1)[None], k, v, attn_mask=visible)
    for i in range(rows):
        n = prefix + i + 1
        alone = sdpa(q[i][None, :, None], k[:, :, :n], v[:, :, :n])
        torch.testing.assert_close(alone[0, :, 0], together[0, :, i])
        if not torch.equal(alone[0, :, 0], together[0, :, i]):
            return
    pytest.fail("stock attention is row invariant here: this twin proves nothing any more")


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 5.0}], ids=str)
def test_prefill(options):
    hq, hkv, d, length = 8, 2, 16, 33
    k, v, slots, g = cache(hkv, d)
    q = torch.randn(length, hq, d, generator=g)
    own = slots[:length]
    found = causal_attention(q, k[own], v[own], d**-0.5, **options)
    for i in range(length):
        expected = naive(q[i], k[own[: i + 1]], v[own[: i + 1]], d**-0.5, **options)
        torch.testing.assert_close(found[i], expected.float())
