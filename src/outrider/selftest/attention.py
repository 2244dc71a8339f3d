"""Paged and prefill attention against float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.paged_attention.layout import Layout, Past, Tile
from outrider.selftest.check import Check, Setting, near

__all__ = ["LLAMA_8B", "Case", "Heads", "near_checks", "rows_of"]


@dataclass(frozen=True)
class Heads:
    """The heads of a model: query heads are kv heads times group."""

    kv: int
    group: int
    dim: int

    def __str__(self) -> str:
        return f"{self.kv * self.group}/{self.kv} heads of {self.dim}"


LLAMA_8B = Heads(8, 4, 128)
ON_GPU = [LLAMA_8B, Heads(8, 8, 128), Heads(4, 7, 128), Heads(4, 2, 256), Heads(2, 6, 96),
          Heads(4, 1, 64)]  # fmt: skip
INTERPRETED = [Heads(2, 4, 64), Heads(1, 8, 32), Heads(1, 6, 96), Heads(1, 1, 64), Heads(2, 7, 128)]


class Case:
    """A cache whose slots are in random order, and queries."""

    def __init__(
        self,
        setting: Setting,
        heads: Heads,
        rows: int = 8,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        device, self.setting, self.heads = setting.device, setting, heads
        # prefixes end inside a block of keys, at the end of one, and behind the end of a split
        self.prefixes = (61, 31, 90) if setting.interpreted else (1000, 255, 4093)
        self.tile = Tile(16, 16, 32) if setting.interpreted else Tile.fit(heads.group)
        count = 3 * (max(self.prefixes) + 64)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.k, self.v = (noise(count, heads.kv, heads.dim).to(dtype).to(device) for _ in "kv")
        wide = torch.bfloat16 if dtype.itemsize == 1 else dtype
        self.q = noise(rows, heads.kv * heads.group, heads.dim).to(wide).to(device)
        self.slots = torch.randperm(count, generator=generator).to(device)
        self.scale = heads.dim**-0.5

    def chain(self, row: int, prefix: int, count: int, part: int = 0) -> Past:
        """Return the past of `count` rows after `prefix` positions, in one third of the cache."""
        start = part * (max(self.prefixes) + 64)
        slots = self.slots[start : start + prefix + count]
        return Past(range(row, row + count), range(prefix + 1, prefix + count + 1), slots)

    def layout(self, *requests: Sequence[Past], tile: Tile | None = None) -> Layout:
        """Lay requests out in the tile of this model."""
        return Layout.of(requests, tile or self.tile, self.heads.group, self.setting.device)

    def paged(self, layout: Layout, q: Tensor | None = None, **options: Any) -> Tensor:
        """Run the kernel of decode and verify."""
        from outrider.kernels.paged_attention import triton

        q = self.q if q is None else q
        return triton.paged_attention(q, self.k, self.v, layout, self.scale, **options)

    def prefill(self, layout: Layout, q: Tensor | None = None, **options: Any) -> Tensor:
        """Run the kernel of prefill."""
        from outrider.kernels.prefill_attention import triton

        q = self.q if q is None else q
        return triton.prefill_attention(q, self.k, self.v, layout, self.scale, **options)

    def alone(self, row: int, slots: Tensor) -> Tensor:
        """Return a row as plain decoding computes it: one request of one row."""
        past = Past([0], [len(slots)], slots)
        return self.paged(self.layout([past]), self.q[row : row + 1])[0]

    def truth(
        self, row: int, slots: Tensor, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """Return a row in float64."""
        k, v = (
            # an 8-bit type cannot be indexed everywhere
            x.float()[slots].double().repeat_interleave(self.heads.group, 1)
            for x in (self.k, self.v)
        )
        scores = torch.einsum("hd,lhd->hl", self.q[row].double(), k) * self.scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window:
            scores[:, : max(0, len(slots) - window)] = -torch.inf
        return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)


def rows_of(pasts: Sequence[Past]) -> Iterator[tuple[int, Tensor]]:
    """Yield each row and the slots it attends to."""
    for past in pasts:
        for row, length in zip(past.rows, past.lens, strict=True):
            yield row, past.slots[:length]


def near_checks(setting: Setting, kernel: str) -> Iterator[Check]:
    """Yield the comparisons with float64: ragged chains, for several models and types."""
    heads = INTERPRETED if setting.interpreted else ON_GPU
    for some in heads[:2] if setting.quick else heads:
        yield _near(setting, kernel, some, torch.bfloat16)
    yield _near(setting, kernel, heads[0], torch.float16)
    yield _near(setting, kernel, heads[0], torch.bfloat16, window=40)
    yield _near(setting, kernel, heads[0], torch.bfloat16, softcap=3.0)
    eight = _eight_bits(setting)
    if eight is not None:
        yield _near(setting, kernel, heads[0], eight)


def _eight_bits(setting: Setting) -> torch.dtype | None:
    """Return the 8-bit float that this processor has, if any."""
    if setting.arch == "gfx942":
        return torch.float8_e4m3fnuz
    has = setting.arch in ("gfx950", "gfx1200", "gfx1201") or (
        setting.arch.startswith("sm_") and int(setting.arch[3:]) >= 89
    )
    return torch.float8_e4m3fn if has else None


def _near(setting: Setting, kernel: str, heads: Heads, dtype: torch.dtype, **options: Any) -> Check:
    def run() -> str:
        case = Case(setting, heads, dtype=dtype)
        pasts = [case.chain(0, case.prefixes[0], 5), case.chain(5, 0, 1, 1),
                 case.chain(6, case.prefixes[2], 2, 2)]  # fmt: skip
        launch = case.paged if kernel == "paged_attention" else case.prefill
        found = launch(case.layout(*([past] for past in pasts)), **options)
        worst = 0.0
        for row, slots in rows_of(pasts):
            exact = case.truth(row, slots, **options)
            # three roundings to the queries' type: weights, sum of values, result
            bound = 3 * torch.finfo(found.dtype).eps * max(1.0, exact.abs().max().item())
            worst = max(worst, near(found[row], exact, bound, f"row {row}"))
        return f"8 rows within {worst:.2f} of 3 roundings of float64"

    said = "".join(f", {name} {value}" for name, value in options.items())
    kind = str(dtype).removeprefix("torch.")
    return Check(f"{kernel}: {heads}, {kind}{said}", "correctness", run)
