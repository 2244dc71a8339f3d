"""Attention of heads over keys and values in slots: in plain torch, or by the Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outrider.core import Ints
from outrider.core.lazy import lazy
from outrider.drafters.heads.layers import causal
from outrider.kernels import arch, use_triton
from outrider.kernels.paged_attention import Layout, Tile, paged_attention
from outrider.kernels.prefill_attention import prefill_attention
from outrider.serving.device import to_device


@dataclass(eq=False)
class PoolPass:
    """A pass over rows whose keys and values are in slots: see `Attend`.

    pool: [layers, 2, slots, kv heads, D]
    slots: [N] where those of the rows go
    lines, lens: [N] a row sees the first so many slots of its line of the table
    table: [R, L] slots by line
    counts: rows of each sequence, on the host; they stand beside each other and share a line
    ends: how many slots the last row of each sequence sees, on the host
    is_prompt: whether rows are many and causal: each sees one slot more than the one before it
    """

    pool: Tensor
    slots: Tensor
    lines: Tensor
    lens: Tensor
    table: Tensor
    counts: Ints
    ends: Ints
    is_prompt: bool = False

    @lazy
    def _firsts(self) -> Ints:
        """The first row of each sequence."""
        firsts: Ints = np.cumsum(self.counts) - self.counts
        return firsts

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep the rows' keys and values, and let each row look at what it sees."""
        keys, values = self.pool[layer]
        keys[self.slots], values[self.slots] = k, v
        if use_triton(q.device):
            return self._kernel(q, keys, values)
        if self.is_prompt:
            return self._one_by_one(q, keys, values)
        return self._side_by_side(q, keys, values)

    def _kernel(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        group, scale = q.shape[1] // keys.shape[1], q.shape[-1] ** -0.5
        tile, longest = Tile.fit(group), int(self.ends.max())
        if not self.is_prompt:
            rows = Layout.of_lines(self.lines, self.lens, self.table, tile, group, longest)
            return paged_attention(q, keys, values, rows, scale)
        tile = tile.for_prefill(arch(q.device), q.shape[-1], same_bits=False)
        lines = self.lines[to_device(self._firsts, q.device)]
        prefixes = (self.ends - self.counts).tolist()
        runs = Layout.of_runs(lines, prefixes, self.counts.tolist(), self.table, tile, group)
        return prefill_attention(q, keys, values, runs, scale)

    def _one_by_one(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from the rows of each sequence in turn: they are many."""
        found, lines = [], self.lines[self._firsts].tolist()
        for line, end, mine in zip(lines, self.ends, q.split(self.counts.tolist()), strict=True):
            slots = self.table[line, :end].long()
            found.append(causal(mine, keys[slots], values[slots]))
        return torch.cat(found)

    def _side_by_side(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from all rows at once, padded to the most rows and keys of a sequence."""
        size, most, longest = len(self._firsts), int(self.counts.max()), int(self.ends.max())
        owner = torch.from_numpy(np.repeat(np.arange(size), self.counts))
        place = torch.arange(len(q)) - torch.from_numpy(self._firsts)[owner]
        slots = self.table[self.lines[self._firsts], :longest].long()
        lens = torch.ones(size, most, dtype=torch.int64)  # padding sees something: no NaN
        lens[owner, place] = self.lens
        queries = q.new_zeros(size, most, *q.shape[1:])
        queries[owner, place] = q
        found = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys[slots].transpose(1, 2),
            values[slots].transpose(1, 2),
            attn_mask=(torch.arange(longest) < lens[..., None])[:, None],
            enable_gqa=True,
        )
        return found.transpose(1, 2)[owner, place]
