"""A stand-in for SGLang's CUDA graph runner, and a model small enough to be captured by it.

As in SGLang 0.5.11 (`model_executor/cuda_graph_runner.py`) a graph reads fixed buffers, one graph
for each batch size of a list. A batch is padded to the next of them: a padded row has token 0,
slot 0 and the backend's fill value as its length. All graphs write their logits into one buffer,
and return views of it. A batch larger than the largest graph runs without one.
"""

from __future__ import annotations

from bisect import bisect_left
from types import SimpleNamespace

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from outrider.kernels.paged_attention.splits import split_start

DIM, KV_HEADS, GROUP, VOCAB = 8, 1, 2, 50


class Pool:
    """Keys and values of one layer."""

    def __init__(self, slots):
        self.k, self.v = torch.zeros(2, slots, KV_HEADS, DIM)

    def set_kv_buffer(self, layer, slots, k, v, k_scale=None, v_scale=None):
        self.k[slots], self.v[slots] = k, v

    def get_kv_buffer(self, layer_id):
        return self.k, self.v


class TinyModel:
    """One layer of attention: logits [N, V] of tokens [N], through an attention backend."""

    def __init__(self, backend, slots):
        made = torch.Generator().manual_seed(0)
        width = KV_HEADS * GROUP * DIM
        self.q = torch.randn(VOCAB, width, generator=made)
        self.k, self.v = torch.randn(2, VOCAB, KV_HEADS, DIM, generator=made)
        self.head = torch.randn(width, VOCAB, generator=made)
        self.backend, self.pool = backend, Pool(slots)
        backend.token_to_kv_pool = self.pool
        self.layer = SimpleNamespace(
            **{"tp_q_head_num": KV_HEADS * GROUP, "qk_head_dim": DIM, "layer_id": 0},
            **{"scaling": DIM**-0.5, "k_scale": None, "v_scale": None, "k_scale_float": None},
            **{"v_scale_float": None, "sliding_window_size": -1, "logit_cap": 0.0},
            **{"attn_type": AttentionType.DECODER, "is_cross_attention": False},
            **{"use_irope": False, "xai_temperature_len": -1},
        )

    def __call__(self, tokens, slots):
        batch = SimpleNamespace(out_cache_loc=slots)
        out = self.backend.forward_decode(
            self.q[tokens], self.k[tokens], self.v[tokens], self.layer, batch
        )
        return out @ self.head


class GraphRunner:
    """Replays closures over fixed buffers."""

    def __init__(self, model, sizes):
        self.model, self.backend, self.capture_bs = model, model.backend, sorted(sizes)
        most, fill = max(sizes), model.backend.get_cuda_graph_seq_len_fill_value()
        self.tokens, self.lines, self.slots = torch.zeros(3, most, dtype=torch.int64)
        self.lens = torch.full((most,), fill)
        self.lens_cpu, self.fill = self.lens.clone(), fill
        self.logits = torch.zeros(most, VOCAB)
        self.backend.init_cuda_graph_state(most, most)
        self.graphs = {size: self._capture(size) for size in reversed(self.capture_bs)}
        self.replayed = []

    def _capture(self, bs):
        self.backend.init_forward_metadata_capture_cuda_graph(
            bs, bs, self.lines[:bs], self.lens[:bs], None, ForwardMode.DECODE, None
        )
        layout = self.backend._layout

        def replay():  # reads nothing but what was there at capture
            self.backend._layout, self.backend._is_prefill = layout, False
            self.logits[:bs] = self.model(self.tokens[:bs], self.slots[:bs])

        return replay

    def forward(self, batch):
        """Run a decode batch. Returns logits, a view of what the next replay overwrites."""
        n = len(batch.input_ids)
        self.replayed.append(n <= self.capture_bs[-1])
        if not self.replayed[-1]:
            self.backend.init_forward_metadata(batch)
            return self.model(batch.input_ids, batch.out_cache_loc)
        bs = self.capture_bs[bisect_left(self.capture_bs, n)]
        if bs != n:
            self.lens.fill_(self.fill)
            self.lens_cpu.fill_(self.fill)
            self.slots.zero_()
        pairs = [(self.tokens, batch.input_ids), (self.lines, batch.req_pool_indices)]
        pairs += [(self.slots, batch.out_cache_loc), (self.lens, batch.seq_lens)]
        for mine, new in [*pairs, (self.lens_cpu, batch.seq_lens_cpu)]:
            mine[:n] = new
        self.backend.init_forward_metadata_replay_cuda_graph(
            bs, self.lines[:bs], self.lens[:bs], int(self.lens_cpu.sum()), None,
            ForwardMode.DECODE, batch.spec_info, seq_lens_cpu=self.lens_cpu[:bs],
        )  # fmt: skip
        self.graphs[bs]()
        return self.logits[:n]


def attend(q, k, v, layout, scale, window=None, softcap=None, out_scale=1.0):
    """What the kernels make of a layout, in float64: each row over its tiles' splits, in order."""
    keys = [[] for _ in q]
    for place, count, index, first, last, which in layout.tiles.tolist():
        table = (layout.tails if which else layout.slots).flatten()
        for row in layout.rows[place : place + count].tolist():
            start = split_start(first, layout.tile.split)
            end = min(int(layout.lens[row]), split_start(last, layout.tile.split))
            keys[row] += [(p, int(table[index + p])) for p in range(start, end)]
    out = torch.zeros_like(q)
    for row, found in enumerate(keys):
        assert [p for p, _ in sorted(found)] == list(range(int(layout.lens[row])))
        slots = [slot for _, slot in sorted(found)]
        mine, values = (x[slots].double().repeat_interleave(GROUP, 1) for x in (k, v))
        weights = (torch.einsum("hd,lhd->hl", q[row].double(), mine) * scale).softmax(-1)
        out[row] = torch.einsum("hl,lhd->hd", weights, values).to(q.dtype)
    return out
