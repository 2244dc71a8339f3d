"""Who is measured: our kernels, SGLang's decode kernel where it is installed, and plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.paged_attention.layout import Layout, Past, Tile
from outrider.selftest.timing import Bench, Contest, Grid, Work

__all__ = ["HOST", "OURS", "TORCH", "Arena"]

OURS, HOST, TORCH = "outrider", "sglang", "torch"
FILTERED = "outrider, top-k and top-p"


class Arena:
    """Sets up the contenders for a shape. One cache serves all numbers of rows."""

    def __init__(self, bench: Bench, grid: Grid, note: Callable[[str], None]) -> None:
        self._bench, self._grid, self._note = bench, grid, note
        self._cache: tuple[tuple[int, int], Tensor, Tensor, Tensor] | None = None

    def contest(self, operation: str, shape: Mapping[str, int]) -> Contest | None:
        """Return the contenders, or None if there is no memory for the shape."""
        make = self._attention if operation == "paged_attention" else self._sampling
        try:
            return make(shape)
        except torch.cuda.OutOfMemoryError:
            self._note(f"skipped, out of memory: {operation} {_say(shape)}")
            return None

    def _fits(self, need: int, what: str) -> bool:
        free = self._bench.free_bytes()
        # what torch holds without using it is free as well
        if self._bench.device.type == "cuda":
            device = self._bench.device
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if need > 0.9 * free:
            self._note(f"skipped: {what} needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
            return False
        return True

    def _attention(self, shape: Mapping[str, int]) -> Contest | None:
        from outrider.kernels.paged_attention import triton

        heads, device = self._grid.heads, self._bench.device
        batch, context, rows = shape["batch"], shape["context"], shape["rows"]
        caches = self._caches(batch, context)
        if caches is None:
            return None
        k, v, table = caches
        query_heads = heads.kv * heads.group
        q = torch.randn(batch * rows, query_heads, heads.dim, dtype=k.dtype, device=device)
        lens = range(context - rows + 1, context + 1)
        pasts = [[Past(range(b * rows, (b + 1) * rows), lens, table[b])] for b in range(batch)]
        layout = Layout.of(pasts, Tile.fit(heads.group), heads.group, device)
        scale = heads.dim**-0.5
        contenders: dict[str, Work] = {OURS: lambda: triton.paged_attention(q, k, v, layout, scale)}
        host = self._host(q, k, v, table, rows, scale)
        if host is not None:
            contenders[HOST] = host
        gathered = 2 * table.numel() * k[0].numel() * k.element_size()
        if self._fits(2 * gathered, f"torch at {_say(shape)}"):
            contenders[TORCH] = _torch_attention(q, k, v, table, rows, scale)
        token_bytes = 2 * k[0].numel() * k.element_size()
        needed = layout.tokens_read() * token_bytes
        return Contest("paged_attention", shape, needed, self._agreeing(contenders, shape))

    def _caches(self, batch: int, context: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return keys, values, and the slots of each request: [B, L], in random order."""
        if self._cache is not None and self._cache[0] == (batch, context):
            return self._cache[1:]
        self._cache = None
        heads, device, slots = self._grid.heads, self._bench.device, batch * context
        need = 2 * slots * heads.kv * heads.dim * 2
        if not self._fits(need, f"batch {batch} x context {context}"):
            return None
        k, v = (
            torch.randn(slots, heads.kv, heads.dim, dtype=torch.bfloat16, device=device)
            for _ in "kv"
        )
        table = torch.randperm(slots, device=device).view(batch, context)
        self._cache = (batch, context), k, v, table
        return k, v, table

    def _host(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, rows: int, scale: float
    ) -> Work | None:
        """Return SGLang's decode; it has one row a request, so K + 1 rows are K + 1 requests."""
        try:
            from sglang.srt.layers.attention.triton_ops import decode_attention
        except Exception as error:  # a host that is half installed fails in many ways
            self._note(f"without SGLang's kernel: {type(error).__name__}: {error}")
            return None
        batch, context = table.shape
        ends = range(context - rows + 1, context + 1)
        lens = torch.tensor([*ends] * batch)
        slots = torch.cat([line[:end] for line in table for end in ends])
        starts = F.pad(lens.cumsum(0), (1, 0)).to(torch.int32).to(q.device)
        # SGLang's defaults: at most 8 splits, on AMD 16
        most = 16 if torch.version.hip else 8
        splits = host_splits(len(q), context, q.shape[1], k.shape[1], most, self._bench.processors)
        num_splits = torch.full((len(q),), splits, dtype=torch.int32, device=q.device)
        logits = torch.empty(*q.shape[:2], most, q.shape[2], device=q.device)
        lse, out = torch.empty(*q.shape[:2], most, device=q.device), torch.empty_like(q)

        def run() -> Tensor:
            decode_attention.decode_attention_fwd(
                q, k, v, out, starts, slots, logits, lse, num_splits, most, scale, 1.0, 1.0
            )
            return out

        return run

    def _agreeing(
        self, contenders: Mapping[str, Work], shape: Mapping[str, int]
    ) -> dict[str, Work]:
        """Return those that compute what we do: a time of anything else would compare nothing."""
        kept, ours = {}, contenders[OURS]()
        for name, work in contenders.items():
            try:
                torch.testing.assert_close(work(), ours, rtol=0.05, atol=0.02)
                kept[name] = work
            except torch.cuda.OutOfMemoryError:
                self._note(f"skipped, out of memory: {name} at {_say(shape)}")
            except Exception as error:
                first = str(error).strip().splitlines()[0]
                self._note(f"not measured: {name} at {_say(shape)}: {first}")
        return kept

    def _sampling(self, shape: Mapping[str, int]) -> Contest | None:
        from outrider.kernels.sample_match import triton

        count, vocab, device = shape["rows"], shape["vocab"], self._bench.device
        if not self._fits(3 * 4 * count * vocab, f"sample_match {_say(shape)}"):
            return None
        logits = torch.randn(count, vocab, device=device) * 3
        ones, zeros = torch.ones(count, device=device), torch.zeros(count, device=device)
        whole = torch.arange(count, device=device)
        plain = (ones, whole * 0, ones, zeros, whole, whole)
        filtered = (ones, whole * 0 + 50, ones * 0.95, zeros, whole, whole)
        contenders: dict[str, Work] = {
            OURS: lambda: triton.sample(logits, *plain),
            FILTERED: lambda: triton.sample(logits, *filtered),
            TORCH: lambda: logits.softmax(-1).argmax(-1),
        }
        return Contest("sample_match", shape, logits.nbytes, contenders)


def host_splits(
    count: int, length: int, heads: int, kv_heads: int, most: int, processors: int
) -> int:
    """Return how many splits SGLang 0.5.11 gives requests of one length: its own schedule."""
    blocks = count * math.ceil(heads / min(16, heads // kv_heads))
    wanted = int(processors * max(math.log2(length / 64), 1.0))
    splits = min(math.ceil(wanted / blocks), most)
    return max(1, math.ceil(length / math.ceil(length / splits)))


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, rows: int, scale: float
) -> Work:
    """Return attention over keys gathered from the cache; the gathering is part of the work."""
    batch, context = table.shape
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    # heads of a group are rows of one product: no key is repeated for them
    grouped = q.view(batch, rows, kv_heads, group, -1).permute(0, 2, 1, 3, 4)
    queries = grouped.reshape(batch, kv_heads, rows * group, -1)
    mask = None
    if rows > 1:
        ends = torch.arange(context - rows, context, device=q.device).repeat_interleave(group)
        mask = torch.arange(context, device=q.device)[None, :] <= ends[:, None]

    def run() -> Tensor:
        keys, values = (x[table].transpose(1, 2) for x in (k, v))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        out = out.view(batch, kv_heads, rows, group, -1).permute(0, 2, 1, 3, 4)
        return out.reshape(q.shape)

    return run


def _say(shape: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in shape.items())
