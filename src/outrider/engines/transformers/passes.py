"""One pass of a model over packed rows of many sequences, and the attention within it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from outrider.core import ROOT, Unsupported
from outrider.engines.transformers.pool import CachedSequence, KVPool
from outrider.kernels import arch, use_triton
from outrider.kernels.paged_attention import (
    Layout,
    Past,
    Tile,
    Tiles,
    paged_attention,
    tile_rows,
    tree_pasts,
)
from outrider.kernels.prefill_attention import causal_attention, prefill_attention

NAME = "outrider"


@dataclass(frozen=True)
class Segment:
    """The tokens that one sequence brings to a pass.

    tokens:  the first follows the cached ones
    parents: for each token the index of the one it follows, or ROOT for the cached ones; None is
             a chain
    logits_from: the first token whose logits are wanted
    """

    sequence: CachedSequence
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    logits_from: int = 0

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        parents = self.parents
        return parents is None or list(parents) == list(range(-1, len(parents) - 1))

    @property
    def is_prompt(self) -> bool:
        """Whether nothing is cached before it."""
        return self.sequence.length == 0 and self.is_chain


@dataclass(frozen=True)
class Pass:
    """One pass of the model: its rows, and where their keys are.

    lengths: for each row how long the sequence is in the pass in which plain decoding computes it
    prompts: the past of each sequence with nothing cached, its rows numbered in the pass
    others:  the rows of all other sequences
    pasts:   their pasts by sequence, one for each branch of a tree, numbered among `others`
    places:  rows of a tile in plain torch, None for any number: then bits may differ
    """

    tokens: list[int]
    positions: list[int]
    wanted: list[int]
    slots: Tensor
    lengths: list[int]
    prompts: list[Past]
    others: Tensor
    pasts: list[list[Past]]
    places: int | None
    pool: KVPool
    layers: set[int] = field(default_factory=set)
    laid_out: dict[tuple[str, int], Tiles | Layout] = field(default_factory=dict)

    @staticmethod
    def plan(
        segments: Sequence[Segment], pool: KVPool, places: int | None, device: torch.device
    ) -> Pass:
        """Lay out the rows of a pass and give each a slot."""
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        slots: list[Tensor] = []
        lengths: list[int] = []
        prompts: list[Past] = []
        others: list[int] = []
        pasts: list[list[Past]] = []
        for segment in segments:
            sequence, start, count = segment.sequence, len(tokens), len(segment.tokens)
            prefix = sequence.length
            pool.reserve(sequence, prefix + count)
            tokens += segment.tokens
            wanted += range(start + segment.logits_from, start + count)
            own = sequence.slots[prefix : prefix + count]
            slots.append(own)
            parents = range(-1, count - 1) if segment.is_chain else segment.parents or ()
            depths: list[int] = []
            for parent in parents:
                depths.append(1 if parent == ROOT else depths[parent] + 1)
            positions += [prefix + depth - 1 for depth in depths]
            alone = [prefix + depth for depth in depths]
            lengths += [count] * count if segment.is_prompt else alone
            if segment.is_prompt:
                prompts.append(Past(range(start, start + count), depths, own))
                continue
            # the rows of this segment, as numbered among `others`
            first = len(others)
            others += range(start, start + count)
            pasts.append(tree_pasts(parents, sequence.slots[:prefix], own, first))
        return Pass(
            tokens,
            positions,
            wanted,
            slots=torch.cat(slots).to(device),
            lengths=lengths,
            prompts=prompts,
            others=torch.tensor(others, dtype=torch.int64, device=device),
            pasts=pasts,
            places=places,
            pool=pool,
        )

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Store this layer's keys and values and attend. q, k, v: [N, H, D] -> [N, Hq, Dv]."""
        if layer in self.layers:
            raise Unsupported(
                f"attention that is computed more than once in layer {layer}",
                fix="use a model with one attention in each layer",
            )
        self.layers.add(layer)
        k_cache, v_cache = self.pool.write(layer, self.slots, k, v)
        how = (scale, window, softcap)
        by_triton, group = use_triton(q.device), q.shape[1] // k.shape[1]
        out = q.new_empty((*q.shape[:2], v.shape[-1]))
        if self.pasts:
            rows = self.others
            few = q if len(rows) == len(q) else q[rows]
            laid_out = self._lay_out("others", group, by_triton, q)
            found = paged_attention(few, k_cache, v_cache, laid_out, *how)
            if few is q:
                return found
            out[rows] = found
        for past in self.prompts:
            own = slice(past.rows[0], past.rows[-1] + 1)
            if by_triton:
                layout = self._lay_out(f"prompt {own.start}", group, by_triton, q, past)
                assert isinstance(layout, Layout)
                out[own] = prefill_attention(q[own], k_cache, v_cache, layout, *how)
            else:
                out[own] = causal_attention(q[own], k[own], v[own], *how)
        return out

    def _lay_out(
        self, name: str, group: int, by_triton: bool, q: Tensor, prompt: Past | None = None
    ) -> Tiles | Layout:
        """Return which rows share which keys, made once for all layers with such heads."""
        key = (name, group)
        if key not in self.laid_out:
            tile = Tile.fit(group)
            if not by_triton:
                pasts = [past for request in self.pasts for past in request]
                self.laid_out[key] = tile_rows(pasts, self.places, q.device)
            elif prompt is None:
                self.laid_out[key] = Layout.of(self.pasts, tile, group, q.device)
            else:
                tile = tile.for_prefill(arch(q.device), q.shape[-1], same_bits=False)
                alone = Past(range(len(prompt.rows)), prompt.lens, prompt.slots)
                self.laid_out[key] = Layout.of([[alone]], tile, group, q.device)
        return self.laid_out[key]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as Transformers' `sdpa`, or over the paged cache within one of our passes."""
    step = CURRENT.get()
    if step is None:
        return cast(
            "tuple[Tensor, None]",
            sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs),
        )
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise Unsupported(
                f"attention with {name} in {type(module).__name__}", fix="use another model"
            )
    if traced := _TRACED.get():
        traced.note(cast(int, module.layer_idx), attention_mask, kwargs.get("sliding_window"))
    scaling = kwargs.get("scaling")
    # ours is row invariant by itself: no need to look at each of its operations
    with torch._C.DisableTorchFunction():
        out = step.attend(
            cast(int, module.layer_idx),
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"),
        )
        return out[None], None


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Build the mask of Transformers' `sdpa`; within `traced_masks` note how it is defined."""
    traced = _TRACED.get()
    if traced is None:
        return cast("Tensor | None", sdpa_mask(*args, **kwargs))
    stand_in = torch.zeros(1, 1, 1, 1, device=kwargs.get("device"))
    traced.defined.append((stand_in, kwargs["mask_function"]))
    return stand_in


@dataclass
class TracedMasks:
    """How the masks of a pass are defined.

    defined: stand-ins for the masks that were built, and their definitions
    layers: by layer its mask's definition, None for a mask that is not one of them; and the window
        that the layer asks for. Layers without a mask are left out.
    """

    defined: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)
    layers: dict[int, tuple[MaskFunction | None, int | None]] = field(default_factory=dict)

    def note(self, layer: int, given: Tensor | None, window: int | None) -> None:
        """Note what a layer's attention was given."""
        if given is not None:
            known = [f for made, f in self.defined if made.data_ptr() == given.data_ptr()]
            self.layers[layer] = (known[0] if known else None, window)


@contextmanager
def traced_masks() -> Iterator[TracedMasks]:
    """Note how the model defines the masks of a pass that is given none."""
    traced = TracedMasks()
    token = _TRACED.set(traced)
    try:
        yield traced
    finally:
        _TRACED.reset(token)


MaskFunction: TypeAlias = "Callable[[Any, Any, Tensor, Tensor], Tensor]"
_TRACED: ContextVar[TracedMasks | None] = ContextVar("outrider_masks", default=None)

# The pass that the model is in. Not every model hands keyword arguments on to its attention.
CURRENT: ContextVar[Pass | None] = ContextVar("outrider_pass", default=None)

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
