"""Runs a Transformers model over packed rows of many sequences, with our own paged cache.

One kind of pass serves prefill, decode and verify: each sequence brings the tokens it has not
cached yet, as a chain or a tree, and all of them go through the model side by side in one row.
The model is left as it is. A view of it runs, whose attention goes through us, by Transformers' own
`AttentionInterface`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core import Request, Unsupported
from outrider.engines.exactness import Exactness, current_name
from outrider.engines.transformers.identity import Verdicts
from outrider.engines.transformers.passes import (
    CURRENT,
    NAME,
    Pass,
    Segment,
    TracedMasks,
    traced_masks,
)
from outrider.engines.transformers.pool import CachedSequence, KVPool
from outrider.engines.transformers.rope import drops_its_cache, row_limits, serve_each_request
from outrider.engines.transformers.view import model_view, unwrapped
from outrider.errors import check_choice
from outrider.kernels.row_invariant import ROWS, RowInvariant

_PROVEN = Verdicts.none()
"""Models whose rows do not depend on the rows beside them."""


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
        model = unwrapped(model)
        check_model(model)
        self.model: PreTrainedModel = model
        self._view = model_view(model, NAME)
        self.exactness = exactness
        self.pool = KVPool()
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.max_length: int = getattr(config, "max_position_embeddings", None) or 2**31
        self.num_layers: int = config.num_hidden_layers
        # lengths at which plain decoding changes its rotary factors: see `rope`
        self.rope_limit = serve_each_request(self._view, self.max_length)
        self.max_length = min(self.max_length, self.rope_limit or self.max_length)
        self.row_limits = row_limits(self._view)
        drops = bool(self.row_limits) and drops_its_cache(model)
        self.recompute_limit = self.row_limits[0] if drops else None
        if exactness == "bitwise" and not _PROVEN.hold(model):
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
        # A prompt passes alone, in its natural shape: a function of the prompt alone,
        # not of the batch. All other rows share a pass and are invariant by tiles.
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
        self, segments: Sequence[Segment], layers: Sequence[int] = (), trace: bool = False
    ) -> tuple[Tensor, Sequence[Tensor]]:
        device = self.model.device
        places = ROWS if self.exactness == "bitwise" else None
        step = Pass.plan(segments, self.pool, places, device)
        current = CURRENT.set(step)
        try:
            out = self._view(
                input_ids=torch.tensor([step.tokens], device=device),
                position_ids=torch.tensor([step.positions], device=device),
                # a mask of four dimensions is taken for a finished one: none is built
                attention_mask=None if trace else torch.zeros(1, 1, 1, 1, device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(step.wanted, device=device),
                # all layers' states then live until the end of the pass
                output_hidden_states=bool(layers),
            )
        finally:
            CURRENT.reset(current)
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

    @torch.inference_mode()
    def trace_masks(self) -> TracedMasks:
        """Return how the model defines its masks, by a pass that is given none."""
        sequence = self.open()
        with traced_masks() as traced:
            self._forward([Segment(sequence, [1 % self.vocab_size])], trace=True)
        self.close(sequence)
        return traced

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


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose layers are not all attention of a decoder, by its configuration."""
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
