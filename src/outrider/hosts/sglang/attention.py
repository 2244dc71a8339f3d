"""The attention backend `outrider`: on CPU, plain torch; its Triton twin is beside it.

Rows of one request that stand beside each other share its keys: a verify pass reads the cache once
for each request. With `--enable-deterministic-inference` a row's result depends on nothing but its
own past: prefill in any chunks, decode and verify give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

from outrider.core import Unsupported
from outrider.kernels import use_triton
from outrider.kernels.paged_attention import Past, Tiles, paged_attention, tile_rows
from outrider.kernels.row_invariant import ROWS


def attention_backend(runner: Any) -> AttentionBackend:
    """Return the backend for a model runner's device."""
    if use_triton(torch.device(runner.device)):
        from outrider.hosts.sglang.attention_triton import TritonAttention

        return TritonAttention(runner)
    return OutriderAttention(runner)


class OutriderAttention(AttentionBackend):
    """Decode, verify and prefill over SGLang's paged cache."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        args = runner.server_args
        kinds = {
            "MLA": runner.use_mla_backend,
            "encoder-decoder models": runner.model_config.is_encoder_decoder,
        }
        for kind, is_so in kinds.items():
            if is_so:
                raise Unsupported(
                    f"the attention backend 'outrider' for {kind}",
                    fix="choose another --attention-backend",
                )
        self._deterministic = args.enable_deterministic_inference
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._pasts: list[Past] = []
        self._tiles: Tiles | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Find which rows share which keys, once for all layers."""
        lines = forward_batch.req_pool_indices.tolist()
        if forward_batch.forward_mode.is_decode():
            self._pasts = self._decode_pasts(lines, forward_batch.seq_lens.tolist())
        else:
            prefixes, counts = (
                forward_batch.extend_prefix_lens_cpu,
                forward_batch.extend_seq_lens_cpu,
            )
            self._pasts, start = [], 0
            for line, prefix, count in zip(lines, prefixes, counts, strict=True):
                if count:
                    lens = range(prefix + 1, prefix + count + 1)
                    self._pasts.append(self._past(line, range(start, start + count), lens))
                start += count
        self._tiles = tile_rows(self._pasts, ROWS) if self._deterministic else None

    def _decode_pasts(self, lines: Sequence[int], lens: Sequence[int]) -> list[Past]:
        pasts = []
        for line, group in groupby(range(len(lines)), key=lambda row: lines[row]):
            rows = list(group)
            pasts.append(self._past(line, rows, [lens[row] for row in rows]))
        return pasts

    def _past(self, line: int, rows: Sequence[int], lens: Sequence[int]) -> Past:
        return Past(rows, lens, self._req_to_token[line, : max(lens)].long())

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Attend from each row to its past. q: [N, Hq * D] -> [N, Hq * Dv]."""
        if layer.attn_type != AttentionType.DECODER or layer.is_cross_attention:
            raise Unsupported(f"attention of type {layer.attn_type}", fix="use a decoder model")
        if layer.use_irope or layer.xai_temperature_len > 0:
            raise Unsupported(
                "scores that change with the position (Llama 4, Grok)",
                fix="choose another --attention-backend",
            )
        pool = batch.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k_cache, v_cache = pool.get_kv_buffer(layer.layer_id)
        with torch._C.DisableTorchFunction():
            out = self._attend(q, k_cache, v_cache, layer)
        return out.reshape(len(out), -1)

    forward_extend = forward_decode

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        """Attend from each row to its past in the cache. q: [N, Hq, D] -> [N, Hq, Dv]."""
        window, cap = self._limits(layer)
        if self._tiles is None and window is None and cap is None:
            return _sdpa(q, k, v, self._pasts, layer.scaling)
        tiles = self._tiles or tile_rows(self._pasts)
        return paged_attention(q, k, v, tiles, layer.scaling, window, cap)

    @staticmethod
    def _limits(layer: Any) -> tuple[int | None, float | None]:
        """Return how many positions a row sees, itself included, and the cap of its scores."""
        window = layer.sliding_window_size
        return None if window is None or window < 0 else window + 1, layer.logit_cap or None

    def support_triton(self) -> bool:
        """Say no: let the host use plain torch around us."""
        return False


def _sdpa(q: Tensor, k: Tensor, v: Tensor, pasts: Sequence[Past], scale: float) -> Tensor:
    """Attend with torch's own kernel, request by request."""
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for past in pasts:
        rows = slice(past.rows[0], past.rows[-1] + 1)
        keys, values = (cache[past.slots].to(q.dtype).transpose(0, 1)[None] for cache in (k, v))
        queries = q[rows].transpose(0, 1)[None]
        mask = None
        if past.lens[0] < past.lens[-1]:
            lens = torch.tensor(past.lens)
            mask = torch.arange(past.lens[-1]) < lens[:, None]
        found = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[rows] = found[0].transpose(0, 1)
    return out
