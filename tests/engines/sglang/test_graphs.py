"""Under captured graphs: padding, trees, what a replay overwrites, and batches without a graph."""

from __future__ import annotations

from types import SimpleNamespace

import graphs
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from outrider.engines.sglang.attention import triton as attention_triton
from outrider.engines.sglang.batches import TreeRows
from outrider.engines.sglang.drafts.draft_model import DraftSequence, SglangDraftModel
from outrider.engines.sglang.plugin import installed_hooks

LINES, WIDTH = 4, 700
CACHED = [300, 40, 600, 1]
"""Tokens of each request before the step: with splits of 256, one, none and two full ones."""


@pytest.fixture
def backend(monkeypatch):
    version = installed_hooks().version
    monkeypatch.setattr(type(version), "attention_tp_size", lambda self: 1)
    monkeypatch.setattr(type(version), "arguments", lambda self, args: args)
    monkeypatch.setattr(attention_triton, "paged_attention", graphs.attend)
    config = SimpleNamespace(
        **{"is_encoder_decoder": False, "v_head_dim": graphs.DIM, "head_dim": graphs.DIM},
        **{"is_multimodal": False, "hf_text_config": None},
        num_attention_heads=graphs.KV_HEADS * graphs.GROUP,
        get_num_kv_heads=lambda tp: graphs.KV_HEADS,
    )
    slots = torch.randperm(LINES * WIDTH, generator=torch.Generator().manual_seed(1)) + 1
    return attention_triton.TritonAttention(
        SimpleNamespace(
            server_args=SimpleNamespace(enable_deterministic_inference=True),
            use_mla_backend=False,
            model=torch.nn.Module(),
            model_config=config,
            token_to_kv_pool=None,
            req_to_token_pool=SimpleNamespace(req_to_token=slots.view(LINES, WIDTH).int()),
        ),
        version,
    )


@pytest.fixture
def model(backend):
    """A model whose cache holds something for every slot."""
    model = graphs.TinyModel(backend, LINES * WIDTH + 1)
    made = torch.Generator().manual_seed(2)
    for cache in (model.pool.k, model.pool.v):
        cache.copy_(torch.randn(cache.shape, generator=made))
    return model


def verify(backend, requests, seed=3):
    """A verify batch: {line: parents of its rows, in the request}."""
    lines, lens, slots, parents = [], [], [], []
    for line, own in requests.items():
        first, depths = len(lines), []
        for row, parent in enumerate(own):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            lines.append(line)
            lens.append(CACHED[line] + depths[-1] + 1)
            slots.append(int(backend._req_to_token[line, CACHED[line] + row]))
            parents.append(parent if parent < 0 else first + parent)
    made = torch.Generator().manual_seed(seed)
    branches = any(own != list(range(-1, len(own) - 1)) for own in requests.values())
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        input_ids=torch.randint(graphs.VOCAB, (len(lines),), generator=made),
        req_pool_indices=torch.tensor(lines),
        seq_lens=torch.tensor(lens),
        seq_lens_cpu=torch.tensor(lens),
        out_cache_loc=torch.tensor(slots),
        spec_info=TreeRows(tuple(parents)) if branches else None,
    )


def paths(batch):
    """The rows on the way to each row, itself included."""
    parents = batch.spec_info.parents if batch.spec_info else None
    found = []
    for row, line in enumerate(batch.req_pool_indices.tolist()):
        same = row > 0 and int(batch.req_pool_indices[row - 1]) == line
        parent = parents[row] if parents else (row - 1 if same else -1)
        found.append([*found[parent], row] if parent >= 0 else [row])
    return found


def decoded(model, batch):
    """The logits of each row, from its own past alone: what plain decoding computes."""
    k, v = model.pool.k.clone(), model.pool.v.clone()
    k[batch.out_cache_loc], v[batch.out_cache_loc] = (
        table[batch.input_ids] for table in (model.k, model.v)
    )
    rows = []
    for row, path in enumerate(paths(batch)):
        line = int(batch.req_pool_indices[row])
        cached = model.backend._req_to_token[line, : CACHED[line]].long()
        slots = torch.cat([cached, batch.out_cache_loc[path]])
        q = model.q[batch.input_ids[row]].view(-1, graphs.DIM).double()
        keys, values = (x[slots].double().repeat_interleave(graphs.GROUP, 1) for x in (k, v))
        weights = (torch.einsum("hd,lhd->hl", q, keys) * graphs.DIM**-0.5).softmax(-1)
        rows.append(torch.einsum("hl,lhd->hd", weights, values).flatten().float() @ model.head)
    return torch.stack(rows)


CHAIN, TREE, BUSH = [-1, 0, 1, 2], [-1, 0, 0, 1, 1, 2], [-1, 0, 0, 0, 0]
STEPS = [
    {0: CHAIN, 1: [-1], 2: CHAIN},
    {0: TREE, 3: CHAIN},
    {2: BUSH, 1: TREE, 3: [-1]},
    {1: CHAIN},
    {2: TREE, 0: [-1, 0, 0]},
]


@pytest.mark.parametrize("sizes", [[16], [4, 8, 9, 12]], ids=["one graph", "several"])
def test_a_replay_computes_what_plain_decoding_would(model, sizes):
    """Chains and trees, one after the other, padded to the sizes of the graphs."""
    runner = graphs.GraphRunner(model, sizes)
    for seed, step in enumerate(STEPS):
        batch = verify(model.backend, step, seed)
        expected = decoded(model, batch)
        torch.testing.assert_close(runner.forward(batch), expected, atol=1e-4, rtol=1e-4)
    assert all(runner.replayed)


def test_more_rows_than_the_largest_graph_run_without_one(model):
    runner = graphs.GraphRunner(model, [4])
    for step, has_graph in ((STEPS[0], False), (STEPS[1], False), (STEPS[3], True)):
        batch = verify(model.backend, step)
        expected = decoded(model, batch)
        torch.testing.assert_close(runner.forward(batch), expected, atol=1e-4, rtol=1e-4)
        assert runner.replayed[-1] == has_graph


def test_trees_of_the_triton_backend_need_nothing_from_the_device(model, monkeypatch):
    """The layout of a step is made from what the host knows: no value is read back."""
    runner = graphs.GraphRunner(model, [12])
    batch = verify(model.backend, STEPS[1])
    for name in ("req_pool_indices", "seq_lens"):
        device = getattr(batch, name).as_subclass(OnDevice)
        setattr(batch, name, device)
    runner.lines, runner.lens = (x.as_subclass(OnDevice) for x in (runner.lines, runner.lens))
    runner.forward(batch)


class OnDevice(torch.Tensor):
    """A tensor whose values the host must not read."""

    def tolist(self):
        raise AssertionError("a device value was read")

    item = __int__ = __bool__ = tolist


def test_a_later_replay_does_not_change_the_draft_models_logits(model):
    """More rows than fit one pass: the passes' logits are views of one buffer."""
    runner = graphs.GraphRunner(model, [4])
    batch = verify(model.backend, {0: CHAIN, 1: CHAIN})
    draft = SglangDraftModel.__new__(SglangDraftModel)
    draft._max_rows, draft._fault, draft._lengths = 4, None, []
    lines, slots = batch.req_pool_indices.tolist(), batch.out_cache_loc

    def rows(tokens, of, positions):
        first = lines.index(of[0])
        some = SimpleNamespace(**vars(batch))
        for name in ("input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
            setattr(some, name, getattr(batch, name)[first : first + len(tokens)])
        return runner.forward(some)

    draft._run = lambda message, *given: rows(*given)
    expected = decoded(model, batch)[[0, 1, 2, 3]], decoded(model, batch)[4:]
    segments = [(DraftSequence(0, CACHED[0] + i), [int(batch.input_ids[i])]) for i in range(4)]
    segments += [(DraftSequence(1, CACHED[1] + i), [int(batch.input_ids[4 + i])]) for i in range(4)]
    found = draft.extend(segments)
    assert len(slots) == len(found)
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_a_prompt_in_a_piecewise_graph(model, monkeypatch):
    """SGLang pads the tokens of a prompt to the next captured size.

    Attention runs between the pieces, without a graph: the backend is told of the batch as it is,
    and is given its rows without the padded ones, beside a batch whose other fields are padded.
    """
    backend, count, padded = model.backend, 5, 8
    monkeypatch.setattr(attention_triton, "prefill_attention", graphs.attend)
    prefix, line = CACHED[0], backend._req_to_token[0]
    tokens = torch.arange(padded)
    real = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        input_ids=tokens[:count],
        req_pool_indices=torch.tensor([0]),
        extend_prefix_lens_cpu=[prefix],
        extend_seq_lens_cpu=[count],
        spec_info=None,
        out_cache_loc=line[prefix : prefix + count].long(),
    )
    static = SimpleNamespace(**{**vars(real), "input_ids": tokens})
    step = verify(backend, {0: [-1, 0, 1, 2, 3]})
    step.input_ids = real.input_ids
    expected = decoded(model, step)
    backend.init_forward_metadata(real)
    q, k, v = (table[tokens][:count] for table in (model.q, model.k, model.v))
    found = backend.forward(q, k, v, model.layer, static, True)
    torch.testing.assert_close(found @ model.head, expected, atol=1e-4, rtol=1e-4)
