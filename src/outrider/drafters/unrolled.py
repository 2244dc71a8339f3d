"""Chains that are drafted without waiting: drafts stay on the device until the next pass runs.

On a GPU a pass of a head takes half a millisecond. To read its drafts, and to tell the device what
to read next, takes the host as long again, and the device stands still meanwhile. Here the next
pass reads the drafts where they are, and they come to the host while it runs. So the host learns of
a draft a pass late: when it sees that drafting should end, one more pass is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

S_contra = TypeVar("S_contra", contravariant=True)


class Unrolled(Protocol):
    """Sequences of a model that go on side by side, by tokens that are on the device."""

    def read(self, tokens: Tensor) -> Tensor:
        """Read one more token of each sequence, [B]. Return the logits after it, [B, V]."""
        ...


class UnrollingModel(Protocol[S_contra]):
    """What a draft model must do to draft without waiting. S: its handle of a sequence."""

    def unroll(self, sequences: Sequence[S_contra], limits: Sequence[int]) -> Unrolled:
        """Begin to read on from the ends of sequences, which stay as they are.

        limits: how many tokens of each will be read; what is read beyond is of no use
        """
        ...


class Copied:
    """Tensors on their way to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrived: Any = None
        if tensors[0].is_cuda:
            self._arrived = torch.cuda.current_stream(tensors[0].device).record_event()

    def read(self) -> Any:
        """Wait for them. Return them as lists."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return tuple(tensor.tolist() for tensor in self._tensors)
