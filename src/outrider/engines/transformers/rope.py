"""Rotary factors that depend on how long a sequence is: longrope and dynamic NTK.

Transformers computes one set of factors for a whole pass, by the largest position in it. In a pass
of ours there are rows of many requests, and drafts. Each row gets the factors that its request
would have in plain decoding: those of the prompt's length in a prompt, those of its own position
after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from outrider.engines.transformers.passes import CURRENT

MAX_POSITIONS = 1 << 24
"""Where the model names no limit of its own, factors are compared up to this length."""


class RequestRope(nn.Module):
    """A rotary embedding with two sets of factors: each row has those of its own request.

    limits: by layer type (None if there are none) the longest sequence with the first set
    """

    def __init__(self, inner: nn.Module, limits: dict[str | None, int]) -> None:
        super().__init__()
        self.inner, self.limits = inner, limits

    def __getattr__(self, name: str) -> Any:
        """Return what models read from their rotary embedding."""
        return getattr(self._modules["inner"], name) if name != "inner" else self._modules[name]

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the inner module does, row by row."""
        limit = self.limits.get(args[0] if args else kwargs.get("layer_type"))

        def factors(ids: Tensor) -> Any:
            return self.inner(x, ids, *args, **kwargs)

        step = CURRENT.get()
        if step is None or limit is None:
            return factors(position_ids)
        beyond = torch.tensor([length > limit for length in step.lengths], device=x.device)
        # one more row, at a position beyond the limit, brings the other set
        more = torch.full_like(position_ids[..., :1], limit)
        rows = [(~beyond).nonzero()[:, 0], beyond.nonzero()[:, 0]]
        parts = []
        if len(rows[0]):
            parts.append((rows[0], factors(position_ids[..., rows[0]])))
        if len(rows[1]):
            found = factors(torch.cat([position_ids[..., rows[1]], more], -1))
            parts.append((rows[1], _map(found, lambda part: part[..., :-1, :])))
        return _merge(parts, len(step.lengths))


def _map(found: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(found) if isinstance(found, Tensor) else tuple(map(change, found))


def _merge(parts: list[tuple[Tensor, Any]], count: int) -> Any:
    """Put the rows of each part, [..., n, D], in their places among all."""
    if isinstance(parts[0][1], Tensor):
        first = parts[0][1]
        merged = first.new_empty((*first.shape[:-2], count, first.shape[-1]))
        for rows, found in parts:
            merged[..., rows, :] = found
        return merged
    columns = zip(*(found for _, found in parts), strict=True)
    places = [rows for rows, _ in parts]
    return tuple(_merge(list(zip(places, column, strict=True)), count) for column in columns)


def serve_each_request(view: PreTrainedModel, max_length: int) -> int | None:
    """Make rows independent of the pass that they are in. Return the longest length served so.

    None is no limit. Two sets of factors, as longrope has, are served by `RequestRope`; what
    changes further with each position, as dynamic NTK does, is served up to the first change.
    """
    longest = None
    for parent in list(view.modules()):
        for name, child in list(parent.named_children()):
            if not hasattr(child, "rope_type") or isinstance(child, RequestRope):
                continue
            limits, two = _limits(child, min(max_length, MAX_POSITIONS))
            if limits and two:
                parent._modules[name] = RequestRope(child, limits)
            elif limits:
                longest = min([*limits.values(), longest or MAX_POSITIONS])
    return longest


def row_limits(view: PreTrainedModel) -> list[int]:
    """Return the lengths at which rows change to the other set of factors."""
    ropes = [module for module in view.modules() if isinstance(module, RequestRope)]
    return sorted({limit for rope in ropes for limit in rope.limits.values()})


def drops_its_cache(model: PreTrainedModel) -> bool:
    """Say whether plain `generate` may read a text again where factors change, as Phi-3 does."""
    own = type(model).prepare_inputs_for_generation
    return own is not GenerationMixin.prepare_inputs_for_generation


def _limits(rope: nn.Module, max_length: int) -> tuple[dict[str | None, int], bool]:
    """Return the length at which each layer type's factors change, and whether it is once only."""
    kinds: list[str | None] = list(rope.rope_type) if isinstance(rope.rope_type, dict) else [None]
    found, once = dict[str | None, int](), True
    for kind in kinds:
        short = _factors(rope, kind, 2)
        if _same(short, _factors(rope, kind, max_length)):
            continue
        same, other = 2, max_length  # lengths with and without the first set
        while other - same > 1:
            middle = (same + other) // 2
            if _same(short, _factors(rope, kind, middle)):
                same = middle
            else:
                other = middle
        found[kind] = same
        long = _factors(rope, kind, max_length)
        once &= _same(long, _factors(rope, kind, other))
    return found, once


def _factors(rope: nn.Module, kind: str | None, length: int) -> Any:
    """Return the factors of position 1 in a pass that is this long, by a rope that saw no other."""
    fresh = copy.copy(rope)  # some keep what they have computed
    fresh.__dict__ |= {"_buffers": dict(rope._buffers)}
    device = next((b.device for b in rope._buffers.values() if b is not None), None)
    ids = torch.tensor([[1, length - 1]], device=device)
    x = torch.zeros(1, 2, 1, device=device)
    with torch.inference_mode():
        found = fresh(x, ids, **({} if kind is None else {"layer_type": kind}))
    return _map(found, lambda part: part[..., 0, :])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
