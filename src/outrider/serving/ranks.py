"""Tensor parallelism: rank 0 decides, and all ranks make the same collective calls.

Ranks compute the same, but on GPUs not always to the last bit, and a fault may happen on one of
them alone. A rank that decided otherwise than the others would make other collective calls than
they do, and all of them would hang. So drafters and control run on rank 0 only: it *tells* the
others of each pass of the draft model before it launches it, and of the proposal. Faults on other
ranks are exchanged after the passes. Emitted tokens are those of rank 0.

What cannot be handled is a rank that raises in the middle of a pass, or before it joined one that
rank 0 has launched: the others wait for it in an all-reduce of the model.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor

WORDS = 1024
"""Numbers that the first broadcast of a message carries; a longer one takes two broadcasts."""


class Message(IntEnum):
    """What rank 0 tells the others, with lists of numbers."""

    DECODE = 0
    """A decode pass of the draft model: tokens, req_pool_indices and positions of its rows."""
    EXTEND = 1
    """A prefill pass of it: req_pool_indices, prefix lengths, numbers of tokens, and tokens."""
    DONE = 2
    """No more passes in this step: tokens, numbers of drafts and parents of the proposal."""


class Ranks:
    """The ranks that run one model.

    group: SGLang's group of them; None if there is only one
    leads: whether this is rank 0
    alone: whether there is no other
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.leads: bool = group is None or group.rank_in_group == 0
        self.alone: bool = group is None or group.world_size == 1

    def of_rank_0(self, tokens: Tensor) -> Tensor:
        """Return rank 0's tokens. [N] on the device, overwritten on the other ranks."""
        if not self.alone:
            self._group.broadcast(tokens, src=0)
        return tokens

    def whole(self, weight: Tensor) -> Tensor:
        """Return a weight whose first dimension is shared among the ranks. All ranks must ask."""
        if self.alone:
            return weight
        found: Tensor = self._group.all_gather(weight.data, dim=0)
        return found

    def any(self, flag: bool) -> bool:
        """Say whether any rank says so. All ranks must ask."""
        if self.alone:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group.cpu_group)
        return bool(flags.item())

    def tell(self, message: Message, *lists: ArrayLike) -> None:
        """Send to the other ranks, which must `hear`. For rank 0."""
        if self.alone:
            return
        numbers = [np.asarray(numbers, dtype=np.int64) for numbers in lists]
        head = [0, int(message), len(numbers), *map(len, numbers)]
        words = np.concatenate([np.array(head), *numbers])
        words[0] = len(words)
        first = np.zeros(WORDS, dtype=np.int64)
        first[: len(words)] = words[:WORDS]
        self._broadcast(torch.from_numpy(first))
        if len(words) > WORDS:
            self._broadcast(torch.from_numpy(words[WORDS:]))

    def hear(self) -> tuple[Message, list[list[int]]]:
        """Return what rank 0 tells. For the others."""
        first = torch.zeros(WORDS, dtype=torch.int64)
        self._broadcast(first)
        words: list[int] = first.tolist()
        if words[0] > WORDS:
            more = torch.zeros(words[0] - WORDS, dtype=torch.int64)
            self._broadcast(more)
            words += more.tolist()
        message, count = Message(words[1]), words[2]
        lists, start = [], 3 + count
        for length in words[3:start]:
            lists.append(words[start : start + length])
            start += length
        return message, lists

    def _broadcast(self, words: Tensor) -> None:
        dist.broadcast(words, src=self._group.ranks[0], group=self._group.cpu_group)
