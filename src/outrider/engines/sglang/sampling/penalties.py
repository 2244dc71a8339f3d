"""The host's penalties, kept in step with what was emitted."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.serving.values import ServedRequest


def copied(orchestrator: Any, index: Tensor) -> Any:
    """Return a copy of the host's penalties with an entry for each of `index`."""
    copied = copy.copy(orchestrator)
    copied.penalizers = {}
    for kind, penalizer in orchestrator.penalizers.items():
        twin = copied.penalizers[kind] = copy.copy(penalizer)
        twin._orchestrator_ref = weakref.ref(copied)
        twin.filter(index)
    return copied


def advance(orchestrator: Any, tokens: Sequence[int], device: Any) -> None:
    """Let the host's penalties count one more output token of each entry; -1 is none."""
    still = [i for i, token in enumerate(tokens) if token < 0]
    ids = torch.tensor([max(token, 0) for token in tokens], device=device)
    states = [
        (penalizer, name, value[still].clone())
        for penalizer in orchestrator.penalizers.values()
        if still and penalizer.is_prepared()
        for name, value in vars(penalizer).items()
        if isinstance(value, Tensor)
    ]
    orchestrator.cumulate_output_tokens(ids)
    for penalizer, name, before in states:
        getattr(penalizer, name)[still] = before


class Penalties:
    """Keeps the host's penalties in step with what was emitted: under overlap the host is late.

    It also mends a gap of the host's: a retracted request comes back with its penalties empty.
    """

    def __init__(self) -> None:
        # how many output tokens of each request its penalties have counted
        self._counted: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def renew(self, batch: Any) -> None:
        """Count all output tokens of a batch whose penalties the host has just made."""
        for req in batch.reqs:
            self._counted[req] = 0
        self._count(batch, [req.output_ids for req in batch.reqs])

    def catch_up(self, batch: Any, requests: Sequence[ServedRequest]) -> None:
        """Count the output tokens that are not counted yet. requests: all of the batch"""
        if batch.sampling_info.penalizer_orchestrator.is_required:
            self._count(batch, [request.output for request in requests])

    def _count(self, batch: Any, outputs: Sequence[list[int]]) -> None:
        orchestrator = batch.sampling_info.penalizer_orchestrator
        if not orchestrator.is_required:
            return  # no request here has penalties; those of one that joins are counted then
        fresh = [
            self._fresh(req, output) if has_penalties(req) else []
            for req, output in zip(batch.reqs, outputs, strict=True)
        ]
        for j in range(max(map(len, fresh), default=0)):
            tokens = [new[j] if j < len(new) else -1 for new in fresh]
            advance(orchestrator, tokens, batch.device)

    def _fresh(self, req: Any, output: list[int]) -> list[int]:
        """Return the output tokens that are not counted yet, and count them."""
        before, self._counted[req] = self._counted.get(req, 0), len(output)
        return output[before:]


def has_penalties(req: Any) -> bool:
    """Say whether it matters what a request has emitted. For others nothing is counted."""
    p = req.sampling_params
    penalties = p.frequency_penalty, p.presence_penalty, p.repetition_penalty - 1, p.min_new_tokens
    return any(penalties)
