"""Runs a Transformers model over packed rows of many sequences, with our own paged cache.

One kind of pass serves prefill, decode and verify: each sequence brings the tokens it has not
cached yet, as a chain or a tree, and all of them go through the model side by side in one row.
The model's weights and modules are left as they are; only its attention goes through us, by
Transformers' own `AttentionInterface`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast, get_args
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from outrider.core import ROOT, Request, Unsupported
from outrider.errors import check_choice
from outrider.hosts.exactness import Exactness, current_name
from outrider.hosts.transformers.pool import CachedSequence, KVPool
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
from outrider.kernels.row_invariant import ROWS, RowInvariant

NAME = "outrider"
_PROVEN: WeakSet[PreTrainedModel] = WeakSet()


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


class Runner:
    """A model with a paged cache. `exactness="bitwise"` makes rows independent of their company.

    max_unread, max_catch_up: as in `DraftModel`. A pass computes few logits however long it is, so
        these only bound its memory and how long the other requests wait for it.
    """

    max_unread = 1024
    max_catch_up = 4096
    max_branches = 1 << 16

    def __init__(self, model: PreTrainedModel, exactness: Exactness = "lossless") -> None:
        exactness = current_name(exactness)
        check_choice("exactness", exactness, get_args(Exactness))
        _check_model(model)
        self.model = model
        self.exactness = exactness
        self.pool = KVPool()
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.max_length: int = getattr(config, "max_position_embeddings", None) or 2**31
        self.num_layers: int = config.num_hidden_layers
        self._configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        if exactness == "bitwise" and model not in _PROVEN:
            self._prove_invariance()
            _PROVEN.add(model)

    def open(self, request: Request | None = None) -> CachedSequence:
        """Return a new, empty sequence."""
        return CachedSequence()

    def close(self, sequence: CachedSequence) -> None:
        """Give a sequence's slots back."""
        self.pool.release(sequence)

    def extend(self, segments: Sequence[tuple[CachedSequence, Sequence[int]]]) -> Tensor:
        """Append tokens to sequences. Return the logits after the last token of each, [B, V]."""
        logits = self.run([Segment(s, t, logits_from=len(t) - 1) for s, t in segments])
        for sequence, tokens in segments:
            sequence.length += len(tokens)
        return logits

    def catch_up(self, segments: Sequence[tuple[CachedSequence, Sequence[int]]]) -> None:
        """Append tokens to sequences."""
        self.extend(segments)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget the tokens beyond this length."""
        sequence.length = min(sequence.length, length)

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """Return a branch of a sequence: see `KVPool.fork`."""
        return self.pool.fork(sequence)

    def adopt(
        self, sequence: CachedSequence, branch: CachedSequence, others: Sequence[CachedSequence]
    ) -> None:
        """Go on as a branch did: see `KVPool.adopt`."""
        self.pool.adopt(sequence, branch, others)

    def run(self, segments: Sequence[Segment]) -> Tensor:
        """Run the model once over all segments. Return the wanted logits, in order, [n, V].

        Nothing is kept yet: `KVPool.keep` says which rows are.
        """
        return self.run_with_hidden(segments)[0]

    @torch.inference_mode()
    def run_with_hidden(
        self, segments: Sequence[Segment], layers: Sequence[int] = ()
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run, and return the hidden states of every segment too, [tokens, layers, H] each.

        layers: as in `Drafter`; if there are none, nothing is captured
        """
        if self.exactness == "lossless":
            return self._forward(segments, layers)
        # A prompt passes alone, in its natural shape: a function of the prompt, whoever else
        # is there. All other rows share a pass and are invariant by tiles.
        prompts = [i for i, s in enumerate(segments) if s.is_prompt]
        others = [i for i, s in enumerate(segments) if not s.is_prompt]
        logits: dict[int, Tensor] = {}
        hidden: dict[int, Tensor] = {}
        for i in prompts:
            logits[i], (hidden[i],) = self._forward([segments[i]], layers)
        if others:
            wanted = [len(segments[i].tokens) - segments[i].logits_from for i in others]
            with RowInvariant():
                together, states = self._forward([segments[i] for i in others], layers)
            logits |= dict(zip(others, together.split(wanted), strict=True))
            hidden |= dict(zip(others, states, strict=True))
        everyone = range(len(segments))
        return torch.cat([logits[i] for i in everyone]), [hidden[i] for i in everyone]

    def _forward(
        self, segments: Sequence[Segment], layers: Sequence[int]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        device = self.model.device
        places = ROWS if self.exactness == "bitwise" else None
        step = _Pass.plan(segments, self.pool, places, device)
        with self._own_attention(step):
            out = self.model(
                input_ids=torch.tensor([step.tokens], device=device),
                position_ids=torch.tensor([step.positions], device=device),
                # a mask of four dimensions is taken for a finished one: none is built
                attention_mask=torch.zeros(1, 1, 1, 1, device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(step.wanted, device=device),
                # all layers' states then live until the end of the pass
                output_hidden_states=bool(layers),
            )
        if len(step.layers) != self.num_layers:
            raise Unsupported(
                f"{type(self.model).__name__}: {len(step.layers)} of {self.num_layers} layers "
                "reached Outrider's attention",
                fix="use a model whose layers all go through Transformers' AttentionInterface",
            )
        if layers:
            hidden = torch.stack([out.hidden_states[layer][0] for layer in layers], dim=1)
        else:
            hidden = out.logits.new_empty((len(step.tokens), 0, 0))
        return out.logits[0], hidden.split([len(segment.tokens) for segment in segments])

    @contextmanager
    def _own_attention(self, step: _Pass) -> Iterator[None]:
        """Let the model's attention layers call ours while this pass runs."""
        before = [(config, config._attn_implementation) for config in self._configs.values()]
        token = _CURRENT.set(step)
        try:
            for config, _ in before:
                config._attn_implementation = NAME
            yield
        finally:
            _CURRENT.reset(token)
            for config, implementation in before:
                config._attn_implementation = implementation

    def _prove_invariance(self) -> None:
        """Compare rows of a verify pass with one-token passes, bit for bit, or refuse."""
        tokens = [(7 * i + 1) % self.vocab_size for i in range(12)]
        alone = self.open()
        self.extend([(alone, tokens[:4])])
        decoded = [self.extend([(alone, [token])]) for token in tokens[4:]]
        pair = [self.open(), self.open()]
        for sequence in pair:
            self.extend([(sequence, tokens[:4])])
        verified = self.run([Segment(sequence, tokens[4:]) for sequence in pair])
        for sequence in (alone, *pair):
            self.close(sequence)
        if not torch.equal(torch.cat(decoded * 2), verified):
            raise Unsupported(
                f"exactness='bitwise' for {type(self.model).__name__} on {self.model.device}: "
                "a row's logits depend on the rows beside it",
                fix="use exactness='lossless', which is exact given the logits",
            )


@dataclass(frozen=True)
class _Pass:
    """One pass of the model: its rows, and where their keys are.

    prompts: the past of each sequence with nothing cached, its rows numbered in the pass
    others:  the rows of all other sequences
    pasts:   their pasts by sequence, one for each branch of a tree, numbered among `others`
    places:  rows of a tile in plain torch, None for any number: then bits may differ
    """

    tokens: list[int]
    positions: list[int]
    wanted: list[int]
    slots: Tensor
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
    ) -> _Pass:
        """Lay out the rows of a pass and give each a slot."""
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        slots: list[Tensor] = []
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
            if segment.is_prompt:
                prompts.append(Past(range(start, start + count), depths, own))
                continue
            # the rows of this segment, as numbered among `others`
            first = len(others)
            others += range(start, start + count)
            pasts.append(tree_pasts(parents, sequence.slots[:prefix], own, first))
        return _Pass(
            tokens,
            positions,
            wanted,
            slots=torch.cat(slots).to(device),
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
    step = _CURRENT.get()
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


# The pass that the model is in. Not every model hands keyword arguments on to its attention.
_CURRENT: ContextVar[_Pass | None] = ContextVar("outrider_pass", default=None)

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _check_model(model: PreTrainedModel) -> None:
    if not hasattr(model, "config"):
        raise TypeError(
            f"model is of type {type(model).__name__}: "
            "load it with transformers.AutoModelForCausalLM.from_pretrained"
        )
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if model.config.is_encoder_decoder or not model._supports_attention_backend or kinds:
        found = ", ".join(sorted(kinds)) or "no AttentionInterface, or an encoder"
        raise Unsupported(
            f"{type(model).__name__} ({found})",
            fix="use a decoder-only model with full or sliding-window attention",
        )
    if model.training:
        raise Unsupported(f"{type(model).__name__} in training mode", fix="call model.eval()")
