"""Accepted rows of a KV cache, moved together: K and V of all layers in one launch.

After a tree is verified its accepted nodes lie apart in the cache. This brings them into the order
in which plain decoding would have written them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import use_triton
from outrider.kernels.kv_commit import reference

__all__ = ["Caches", "kv_commit"]

_WORDS = (torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True)
class Caches:
    """K and V of all layers as one launch sees them. Made once: it writes a table to the device.

    tensors: each [S, ...]
    base:    the tensor with the lowest address, as words
    offsets: [C] int64, where each tensor begins, in words from `base`
    width:   words in a row
    stride:  words from one row to the next
    align:   each tensor and each row begins at a multiple of so many words
    """

    tensors: tuple[Tensor, ...]
    base: Tensor
    offsets: Tensor
    width: int
    stride: int
    align: int

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Caches:
        """Tabulate caches whose rows have equally many bytes and are equally far apart."""
        first = min(tensors, key=lambda cache: cache.data_ptr())
        size, step = _row_bytes(first), first.stride(0) * first.element_size()
        for cache in tensors:
            if not cache[:1].is_contiguous() or cache.device != first.device:
                raise ValueError("caches must be [S, ...] on one device, each row contiguous")
            if (_row_bytes(cache), cache.stride(0) * cache.element_size()) != (size, step):
                raise ValueError("rows of different sizes or strides: make one Caches for each")
        starts = [cache.data_ptr() - first.data_ptr() for cache in tensors]
        numbers = [first.data_ptr(), size, step, *starts]
        word = next(w for w in _WORDS if not any(n % w.itemsize for n in numbers))
        # 16 bytes are what one instruction can move
        aligned = word is torch.int32 and not any(n % 16 for n in numbers)
        rows = first[:1].reshape(-1).view(word)
        return Caches(
            tensors=tuple(tensors),
            base=rows,
            offsets=torch.tensor([s // word.itemsize for s in starts], device=first.device),
            width=size // word.itemsize,
            stride=step // word.itemsize,
            align=16 // word.itemsize if aligned else 1,
        )


def kv_commit(caches: Caches, src: Tensor, dst: Tensor) -> None:
    """Copy row src[b, i] to row dst[b, i] in every cache, i after i; a -1 moves nothing.

    Requests must not share slots. Within a request a row must not be read after it was written:
    so it is when rows move towards the front in their order, as accepted drafts do.

    src, dst: [B, N] integers
    """
    if src.dim() != 2 or src.shape != dst.shape:
        raise ValueError(f"src and dst must be [B, N], not {list(src.shape)}, {list(dst.shape)}")
    if src.is_floating_point() or dst.is_floating_point():
        raise TypeError("src and dst must hold integers")
    if not (src.is_contiguous() and dst.is_contiguous()):
        raise ValueError("src and dst must be contiguous: call .contiguous()")
    if src.device != caches.base.device or dst.device != caches.base.device:
        raise ValueError(f"src and dst must be on {caches.base.device}, like the caches")
    if use_triton(caches.base.device):
        from outrider.kernels.kv_commit import triton

        triton.kv_commit(
            caches.base, caches.offsets, caches.width, caches.stride, caches.align, src, dst
        )
    else:
        reference.kv_commit(caches.tensors, src, dst)


def _row_bytes(cache: Tensor) -> int:
    return cache[0].numel() * cache.element_size()
