"""The backend's plain torch attention: requests put together, chains, trees and prompts."""

from __future__ import annotations

import pytest
import torch

from outrider.hosts.sglang.attention import _batches, _Run, _sdpa
from outrider.kernels.paged_attention import Past, tree_pasts

HEADS, KV_HEADS, DIM = 6, 2, 16
REQUESTS = [  # (cached tokens, parent of each draft)
    (50, [0, 1, 2]),
    (60, [0, 0, 1, 2, 0]),
    (500, []),
    (20, list(range(60))),  # a prompt
    (400, [0, 1, 1]),
    (0, [0, 0]),
]


@pytest.fixture(scope="module")
def world():
    """Queries, caches, and the pasts of all requests, each row in one of them."""
    made = torch.Generator().manual_seed(0)
    slots, requests, row, start = torch.randperm(2999, generator=made) + 1, [], 0, 0
    for prefix, drafts in REQUESTS:
        parents = [-1, *drafts]
        cached, own = slots[start : start + prefix], slots[start + prefix :]
        requests.append(tree_pasts(parents, cached, own, row))
        row, start = row + len(parents), start + prefix + len(parents)
    k, v = torch.randn(2, 3000, KV_HEADS, DIM, generator=made)
    return torch.randn(row, HEADS, DIM, generator=made), k, v, requests


def expected(q, k, v, past, row, length):
    """One row alone: its own path, nothing put together."""
    keys, values = (x[past.slots[:length]].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    weights = (torch.einsum("hd,lhd->hl", q[row], keys) * 0.25).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, values)


def furthest(world, found):
    q, k, v, requests = world
    return max(
        float((found[row] - expected(q, k, v, past, row, length)).abs().max())
        for pasts in requests
        for past in pasts
        for row, length in zip(past.rows, past.lens, strict=True)
    )


def test_each_row_sees_its_own_path(world):
    q, k, v, requests = world
    batches = _batches([_Run.of(pasts) for pasts in requests])
    assert 1 < len(batches) < len(requests)
    assert furthest(world, _sdpa(q, k, v, batches, 0.25)) < 1e-5


def test_a_tree_taken_for_a_chain_is_noticed(world):
    q, k, v, requests = world
    chains = [
        [Past(sorted(r for p in pasts for r in p.rows), sorted(n for p in pasts for n in p.lens),
              pasts[0].slots[: pasts[0].prefix + sum(len(p.rows) for p in pasts)])]
        if len(pasts) > 1 and len(pasts[0].slots) >= max(n for p in pasts for n in p.lens)
        else pasts
        for pasts in requests
    ]  # fmt: skip
    batches = _batches([_Run.of(pasts) for pasts in chains])
    assert furthest(world, _sdpa(q, k, v, batches, 0.25)) > 1e-2
