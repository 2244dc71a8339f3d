"""The attention backend `outrider`: on CPU, plain torch; its Triton twin is beside it.

Rows of one request that stand beside each other share its keys: a verify pass reads the cache once
for each request, also where its drafts branch. With `--enable-deterministic-inference` a row's
result depends on nothing but its own past: prefill in any chunks, decode and verify, chain or tree,
give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

from outrider.core import Unsupported
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.kernels.paged_attention import Past, Tiles, paged_attention, tile_rows, tree_pasts
from outrider.kernels.row_invariant import ROWS

FEW_ROWS = 32
"""Requests with at most so many rows are put together; one with more is a prompt."""


def causal_types(config: Any) -> tuple[AttentionType, ...]:
    """Return the types of layers in which a row sees its past, and nothing else.

    SGLang 0.5.11 calls all layers of Gemma 3 bidirectional: images are, and EmbeddingGemma's text.
    """
    may_look_ahead = getattr(config.hf_text_config, "use_bidirectional_attention", False)
    if config.is_multimodal or may_look_ahead:
        return (AttentionType.DECODER,)
    return AttentionType.DECODER, AttentionType.DECODER_BIDIRECTIONAL


class OutriderAttention(AttentionBackend):
    """Decode, verify and prefill over SGLang's paged cache."""

    def __init__(self, runner: Any, version: SglangVersion) -> None:
        super().__init__()
        args = version.arguments(runner.server_args)
        self._deterministic = args.enable_deterministic_inference
        kinds = {
            "MLA": runner.use_mla_backend,
            "encoder-decoder models": runner.model_config.is_encoder_decoder,
            "attention sinks": any(hasattr(module, "sinks") for module in runner.model.modules()),
        }
        for kind, is_so in kinds.items():
            if is_so:
                raise Unsupported(
                    f"the attention backend 'outrider' for {kind}",
                    fix="choose another --attention-backend",
                )
        self._causal = causal_types(runner.model_config)
        # in 0.5.23 models look for these two here
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._pasts: list[Past] = []
        self._batches: list[_Batch] = []
        self._tiles: Tiles | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Find which rows share which keys, once for all layers."""
        if forward_batch.forward_mode.is_decode():
            requests = self._decode_pasts(forward_batch)
        else:
            requests = self._prefill_pasts(forward_batch)
        self._pasts = [past for pasts in requests for past in pasts]
        self._tiles = tile_rows(self._pasts, ROWS) if self._deterministic else None
        self._batches = []
        if self._tiles is None:
            self._batches = _batches([_Run.of(pasts) for pasts in requests])

    def _prefill_pasts(self, forward_batch: Any) -> list[list[Past]]:
        """Return the past of each request's new tokens."""
        pool_indices = forward_batch.req_pool_indices.tolist()
        prefixes, counts = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        requests, start = [], 0
        for pool_index, prefix, count in zip(pool_indices, prefixes, counts, strict=True):
            if count:
                lens = range(prefix + 1, prefix + count + 1)
                requests.append([self._past(pool_index, range(start, start + count), lens)])
            start += count
        return requests

    def _decode_pasts(self, forward_batch: Any) -> list[list[Past]]:
        """Return the pasts of each request: one for a chain, one for each branch of a tree."""
        pool_indices = forward_batch.req_pool_indices.tolist()
        lens = forward_batch.seq_lens.tolist()
        trees, slots = forward_batch.spec_info, forward_batch.out_cache_loc
        requests = []
        for pool_index, group in groupby(range(len(pool_indices)), key=pool_indices.__getitem__):
            rows = list(group)
            if trees is None:
                requests.append([self._past(pool_index, rows, [lens[row] for row in rows])])
                continue
            first, prefix = rows[0], lens[rows[0]] - 1
            cached = self._req_to_token[pool_index, :prefix].long()
            own = slots[first : rows[-1] + 1]
            parents = [trees.parents[row] - first for row in rows[1:]]
            requests.append(tree_pasts([-1, *parents], cached, own, first))
        return requests

    def _past(self, pool_index: int, rows: Sequence[int], lens: Sequence[int]) -> Past:
        return Past(rows, lens, self._req_to_token[pool_index, : max(lens)].long())

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> Tensor:
        """Attend from each row to its past. q: [N, Hq * D] -> [N, Hq * Dv]."""
        if layer.attn_type not in self._causal or layer.is_cross_attention:
            raise Unsupported(f"attention of type {layer.attn_type}", fix="use a decoder model")
        if layer.use_irope or layer.xai_temperature_len > 0:
            raise Unsupported(
                "scores that change with the position (Llama 4, Grok)",
                fix="choose another --attention-backend",
            )
        pool = self.token_to_kv_pool
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
            return _sdpa(q, k, v, self._batches, layer.scaling)
        tiles = self._tiles or tile_rows(self._pasts)
        return paged_attention(q, k, v, tiles, layer.scaling, window, cap)

    @staticmethod
    def _limits(layer: Any) -> tuple[int | None, float | None]:
        """Return how many positions a row sees, itself included, and the cap of its scores."""
        window = layer.sliding_window_size
        return None if window is None or window < 0 else window + 1, layer.logit_cap or None

    def shared_read_ends(self, forward_mode: Any) -> Any:
        """Say, in SGLang 0.5.23, that every layer looks into the host's table of slots."""
        from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

        return SharedReadEnds.POST_REPLAY

    def support_triton(self) -> bool:
        """Say no: let the host use plain torch around us."""
        return False


@dataclass(frozen=True)
class _Run:
    """The rows of one request, which stand beside each other, and what they see.

    slots: [L] of the keys that any of them sees
    mask:  [rows, L] which of them each row sees
    """

    first: int
    slots: Tensor
    mask: Tensor

    @staticmethod
    def of(pasts: Sequence[Past]) -> _Run:
        """Put the branches of one request together: the keys that they share stand once."""
        first, count = min(past.rows[0] for past in pasts), sum(len(past.rows) for past in pasts)
        if len(pasts) == 1:
            (past,) = pasts
            ends = torch.tensor(past.lens)[:, None]
            return _Run(first, past.slots, torch.arange(max(past.lens)) < ends)
        prefix = pasts[0].prefix
        mask = torch.zeros(count, prefix + count, dtype=torch.bool)
        mask[:, :prefix] = True
        own: dict[int, int] = {}  # slot of a row -> where it stands behind the prefix
        for past in pasts:
            tail = past.slots[prefix:].tolist()
            places = [own.setdefault(slot, len(own)) for slot in tail]
            for row, length in zip(past.rows, past.lens, strict=True):
                mask[row - first, [prefix + place for place in places[: length - prefix]]] = True
        slots = torch.cat([pasts[0].slots[:prefix], torch.tensor(list(own))])
        return _Run(first, slots, mask)


class _Batch:
    """Requests of about the same length, padded to be one call of torch's attention.

    G requests, R rows of each, L keys of each
    """

    def __init__(self, runs: Sequence[_Run]) -> None:
        self.size = len(runs)
        most = max(len(run.mask) for run in runs)
        longest = max(len(run.slots) for run in runs)
        slots = torch.zeros(self.size, longest, dtype=torch.int64)
        rows = torch.zeros(self.size, most, dtype=torch.int64)
        mask = torch.zeros(self.size, most, longest, dtype=torch.bool)
        mask[:, :, 0] = True  # a row that is padding sees something, or it would not be a number
        places = []
        for i, run in enumerate(runs):
            count, length = run.mask.shape
            slots[i, :length] = run.slots
            rows[i, :count] = torch.arange(run.first, run.first + count)
            mask[i, :count, :length] = run.mask
            places.append(torch.arange(i * most, i * most + count))
        self.slots, self.rows = slots.flatten(), rows.flatten()
        self.mask = None if bool(mask.all()) else mask
        self.places = torch.cat(places)  # of the rows that are not padding
        self._masks: dict[tuple[int, torch.dtype], Tensor | None] = {}

    def mask_for(self, group: int, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to the scores of `group` heads that are rows of one product."""
        if (group, dtype) not in self._masks:
            found = None
            if self.mask is not None:
                found = torch.zeros(self.mask.shape, dtype=dtype)
                found = found.masked_fill_(~self.mask, -torch.inf).repeat(1, group, 1)[:, None]
            self._masks[group, dtype] = found
        return self._masks[group, dtype]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend from each row to its past. q: [N, Hq, D] -> [rows, Hq, Dv]."""
        heads, kv_heads = q.shape[1], k.shape[1]
        group = heads // kv_heads
        keys, values = (
            cache.index_select(0, self.slots)
            .to(q.dtype)
            .view(self.size, -1, kv_heads, cache.shape[-1])
            .transpose(1, 2)
            for cache in (k, v)
        )
        # query heads of one kv head are rows of the same product, as long as they are few
        fold = group if len(self.rows) <= FEW_ROWS * self.size else 1
        queries = q.index_select(0, self.rows).view(self.size, -1, heads // fold, fold, q.shape[-1])
        queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)
        found: Tensor = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=self.mask_for(fold, q.dtype),
            scale=scale,
            enable_gqa=fold != group,
        )
        rows = found.view(*found.shape[:2], fold, -1, v.shape[-1]).permute(0, 3, 1, 2, 4)
        return rows.reshape(-1, heads, v.shape[-1]).index_select(0, self.places)


def _batches(runs: Sequence[_Run]) -> list[_Batch]:
    """Put runs together that lose little by being padded to the longest."""
    found: list[list[_Run]] = []
    for run in sorted(runs, key=lambda run: len(run.slots)):
        is_prompt = len(run.mask) > FEW_ROWS
        if found and not is_prompt and 4 * len(run.slots) <= 5 * len(found[-1][0].slots) + 256:
            found[-1].append(run)
        else:
            found.append([run])
    return [_Batch(some) for some in found]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, batches: Sequence[_Batch], scale: float) -> Tensor:
    """Attend with torch's own kernel."""
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for batch in batches:
        out[batch.rows[batch.places]] = batch.attend(q, k, v, scale)
    return out
