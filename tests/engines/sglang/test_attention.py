"""The backend's plain torch attention: requests put together, chains, trees and prompts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType

from outrider.core import Unsupported
from outrider.engines.sglang.attention.backend import (
    OutriderAttention,
    _batches,
    _Run,
    _sdpa,
    causal_types,
)
from outrider.engines.sglang.plugin import installed_hooks
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


class Sinks(torch.nn.Module):
    sinks = None


def runner(model=None, is_mla=False, **config):
    known = {"is_encoder_decoder": False, "is_multimodal": False, "hf_text_config": None}
    return SimpleNamespace(
        server_args=SimpleNamespace(enable_deterministic_inference=False),
        use_mla_backend=is_mla,
        model=model or torch.nn.Module(),
        model_config=SimpleNamespace(**{**known, **config}),
        token_to_kv_pool=None,
        req_to_token_pool=SimpleNamespace(req_to_token=None),
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"model": torch.nn.Sequential(Sinks())}, "attention sinks"),
        ({"is_mla": True}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({}, None),
    ],
)
def test_what_it_does_not_compute_is_refused(asked, said, monkeypatch):
    version = installed_hooks().version
    monkeypatch.setattr(type(version), "arguments", lambda self, args: args)
    if said is None:
        OutriderAttention(runner(**asked), version)
        return
    with pytest.raises(Unsupported, match=said):
        OutriderAttention(runner(**asked), version)


@pytest.mark.parametrize(
    ("config", "may"),
    [({}, True), ({"is_multimodal": True}, False),
     ({"hf_text_config": SimpleNamespace(use_bidirectional_attention=True)}, False)],
)  # fmt: skip
def test_layers_that_may_look_ahead_are_refused_where_they_do(config, may):
    found = causal_types(runner(**config).model_config)
    assert AttentionType.DECODER in found
    assert (AttentionType.DECODER_BIDIRECTIONAL in found) == may
