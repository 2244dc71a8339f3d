"""Who touched what last: a storage as a whole, or each of its cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_CELLS = 1 << 22
"""A storage with more elements has larger cells: one for each row."""


class Cells:
    """Who touched a storage last: as a whole, or each cell of it.

    is_device: whether it is the device's; a race is counted only then
    """

    __slots__ = ("cells", "is_device", "readers", "step", "write")

    def __init__(self) -> None:
        self.is_device = False
        self.write: Any = None  # stream, clock, site
        self.readers: dict[int, Any] = {}  # by stream: clock, site
        self.cells: int | None = None  # how many; None as a whole
        self.step = 1  # elements of a cell

    def split(self, tensor: Tensor) -> None:
        """Go on cell by cell."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        if size > MOST_CELLS:
            self.step = max(1, tensor.stride(0))
        self.cells = count = size // self.step + 1

        def full(*values: int) -> list[np.ndarray]:
            return [np.full(count, value, np.int64) for value in values]

        self.write = full(*(self.write or (0, 0, 0)))
        self.readers = {stream: full(*found) for stream, found in self.readers.items()}


def cells_of(tensor: Tensor, state: Cells) -> Any:
    """Return the cells that a tensor covers."""
    start, count = tensor.storage_offset(), tensor.numel()
    sizes = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s]
    dense = 1
    for n, s in sorted(sizes, key=lambda each: each[1]):
        if s != dense:
            break
        dense *= n
    else:
        return slice(start // state.step, (start + min(count, dense) - 1) // state.step + 1)
    found = np.array([start])
    for n, s in sizes:
        found = (found[:, None] + np.arange(n) * s).ravel()
    return steps(found, state)


def steps(elements: np.ndarray, state: Cells) -> np.ndarray:
    return elements if state.step == 1 else np.unique(elements // state.step)


def indexed(tensor: Tensor, indices: Any, state: Cells) -> Any:
    """Return the cells that a tensor's elements at these indices are in."""
    first = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in first) or len(first) != len(indices):
        return cells_of(tensor, state)
    found: np.ndarray = np.array(tensor.storage_offset())
    for index, size, stride in zip(first, tensor.shape, tensor.stride(), strict=False):
        place = index.detach().as_subclass(Tensor).numpy()
        found = found + np.where(place < 0, place + size, place) * stride
    found = found.ravel()
    for size, stride in list(zip(tensor.shape, tensor.stride(), strict=True))[len(first) :]:
        found = (found[:, None] + np.arange(size) * stride).ravel()
    return steps(found, state)
