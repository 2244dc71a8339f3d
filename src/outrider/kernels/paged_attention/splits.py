"""Where the splits of a sequence of keys begin: a function of the position alone.

Eight splits of S keys, eight of 2 S, eight of 3 S, and so on. Neither the batch, nor K, nor the
server's longest context changes a boundary, so all servers with one tile add in the same order.
Short contexts have short splits, which keep many programs busy; the number of splits, and with it
the memory of their partial results, grows with the root of the length. With S = 256:

    context     1,024   4,096   8,192   32,768   131,072   1,048,576
    splits          4      12      19       42        87         252
    longest       256     512     768    1,536     2,816       8,192
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAME = 8
"""So many splits have the same size."""


def split_start(index: int, size: int) -> int:
    """Return the first position of a split. size: of the first splits."""
    block, place = divmod(index, SAME)
    return size * (block + 1) * (SAME // 2 * block + place)


def num_splits(length: int, size: int) -> int:
    """Return how many splits so many positions have."""
    return full_splits(length - 1, size) + 1 if length > 0 else 0


def full_splits(length: int, size: int) -> int:
    """Return how many splits end within so many positions."""
    units = length // size
    # eight splits of each size: block b begins at unit 4 b (b + 1) = (2 b + 1) ** 2 - 1
    block = (math.isqrt(units + 1) - 1) // 2
    return SAME * block + (units - SAME // 2 * block * (block + 1)) // (block + 1)


def num_splits_on_device(lens: Tensor, size: int) -> Tensor:
    """Return how many splits each of these lengths has, without asking the device."""
    units = (lens.long() - 1).clamp(min=0) // size
    block = ((units + 1.5).sqrt().long() - 1) // 2
    last = SAME * block + (units - SAME // 2 * block * (block + 1)) // (block + 1)
    return torch.where(lens > 0, last + 1, 0)
