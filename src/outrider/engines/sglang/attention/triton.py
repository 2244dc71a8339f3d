"""The attention backend `outrider` as Triton kernels: for GPUs, and for the interpreter.

Rows of one request stand beside each other in a verify batch and share its keys, which are read
once for all of them. What decides the order of a row's sums (the tile, the split) depends on the
model alone, not on K or on the longest context: a server without speculation has the same bits.

In a captured graph all shapes depend on the number of rows. SGLang captures one graph for each
batch size in its list and pads a batch to the next: a padded row attends to one slot. A graph takes
chains and trees of as many rows: which rows share which keys is data.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from outrider.core import Unsupported
from outrider.engines.sglang.attention.backend import OutriderAttention
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.kernels import arch
from outrider.kernels.paged_attention import Layout, Tile, paged_attention
from outrider.kernels.paged_attention.trees import for_graph, tail_slots, tree_layout
from outrider.kernels.prefill_attention import prefill_attention

logger = logging.getLogger(__name__)


class TritonAttention(OutriderAttention):
    """Decode, verify and prefill over SGLang's paged cache."""

    def __init__(self, runner: Any, version: SglangVersion) -> None:
        super().__init__(runner, version)
        config, tp_size = runner.model_config, version.attention_tp_size()
        if config.v_head_dim != config.head_dim:
            raise Unsupported(
                f"values of {config.v_head_dim} beside keys of {config.head_dim} dimensions",
                fix="choose another --attention-backend",
            )
        self._group = config.num_attention_heads // tp_size // config.get_num_kv_heads(tp_size)
        self._max_len = self._req_to_token.shape[1]
        self._tile = Tile.fit(self._group)
        self._prefill_tile = self._tile.for_prefill(
            arch(self._req_to_token.device), config.head_dim, same_bits=self._deterministic
        )
        logger.info(
            "TritonAttention: tiles of %d rows, splits from %d keys on; prefill: tiles of %d rows",
            *(self._tile.rows, self._tile.split, self._prefill_tile.rows),
        )
        self._layout: Layout | None = None
        self._is_prefill = False
        self._captured: dict[int, Layout] = {}
        self._tails = self._req_to_token.new_zeros(0)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Find which rows share which keys, once for all layers, without asking the device."""
        pool_indices = forward_batch.req_pool_indices
        self._is_prefill = not forward_batch.forward_mode.is_decode()
        if self._is_prefill:
            self._layout = Layout.of_runs(
                pool_indices,
                forward_batch.extend_prefix_lens_cpu,
                forward_batch.extend_seq_lens_cpu,
                self._req_to_token,
                self._prefill_tile,
                self._group,
            )
        else:
            # memory for partial results as the longest row needs it: the host knows the lengths
            known = forward_batch.seq_lens_cpu
            longest = self._max_len if known is None else int(known.max())
            trees = forward_batch.spec_info
            self._layout = self._rows(pool_indices, forward_batch.seq_lens, longest, trees, known)

    def _rows(
        self,
        pool_indices: Tensor,
        lens: Tensor,
        longest: int,
        trees: Any = None,
        lens_cpu: Tensor | None = None,
    ) -> Layout:
        """Lay out the rows of a decode batch. trees: its `TreeRows`, if drafts branch."""
        shape = self._req_to_token, self._tile, self._group, longest
        if trees is None:
            return Layout.of_lines(pool_indices, lens, *shape)
        known = lens.tolist() if lens_cpu is None else lens_cpu.tolist()
        return tree_layout(trees.parents, known, pool_indices, *shape)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        assert self._layout is not None
        attend = prefill_attention if self._is_prefill else paged_attention
        k_scale, v_scale = layer.k_scale_float or 1.0, layer.v_scale_float or 1.0
        window, softcap = self._limits(layer)
        scale = layer.scaling * k_scale
        return attend(q, k, v, self._layout, scale, window, softcap, out_scale=v_scale)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for trees. Each captured batch size has a layout of its own."""
        room = tail_slots(max_num_tokens, self._max_len, self._tile)
        self._tails = self._req_to_token.new_zeros(room)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """Make the layout that a graph for so many rows will read."""
        if not forward_mode.is_decode():
            raise Unsupported(f"a graph for {forward_mode}", fix="use --disable-cuda-graph")
        self._is_prefill = False
        rows = self._rows(req_pool_indices, seq_lens, self._max_len)
        self._layout = self._captured[bs] = for_graph(rows, self._tails)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_sum: int,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Tensor | None,
    ) -> None:
        """Write this step's rows into the layout that the graph reads."""
        pool_indices, lens = req_pool_indices[:bs], seq_lens[:bs]
        lens_cpu = None if seq_lens_cpu is None else seq_lens_cpu[:bs]
        rows = self._rows(pool_indices, lens, self._max_len, spec_info, lens_cpu)
        self._captured[bs].copy_(rows)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Do what SGLang 0.5.11 asks for by two names: see the two methods above."""
        batch = forward_batch
        bs, pool_indices, lens = batch.batch_size, batch.req_pool_indices, batch.seq_lens
        mode, trees = batch.forward_mode, batch.spec_info
        if in_capture:
            self.init_forward_metadata_capture_cuda_graph(
                bs, bs, pool_indices, lens, None, mode, trees
            )
        else:
            known = batch.seq_lens_cpu
            total = batch.seq_lens_sum
            self.init_forward_metadata_replay_cuda_graph(
                bs, pool_indices, lens, total, None, mode, trees, known
            )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padded row."""
        return 1

    def support_triton(self) -> bool:
        """Let the host use Triton around us where it has a GPU for it."""
        return torch.cuda.is_available()
