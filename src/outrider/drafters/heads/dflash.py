"""DFlash (arXiv 2602.06036): a few layers that fill in a block of drafts in one pass.

The head reads the target's states as a *context*, and a block of tokens that begins with the last
one: [t_{L-1}, MASK, MASK, ...] at positions L - 1, L, L + 1, ... With f_i the target's states after
reading t_i, at positions i = 0 ... L - 2:

    c_i = hidden_norm(fc([f_i of some layers]))
    x   = embed(block)
    for each layer:
        u = norm(x)
        x = x + attention(queries of u; keys and values of c and of u)
        x = x + mlp(norm(x))
    q_j = softmax(lm_head(norm(x_j)))      the distribution of the token at MASK j

Attention is Qwen3's (queries and keys are normalised), and not causal: each row of the block sees
the whole context and the whole block. c is the same for all layers, so its keys and values are
computed once; those of the block are forgotten after the pass.

All drafts of a block are drawn independently, given the context. Embedding and lm_head are the
target's. A block is always read whole, as the head was trained, even if fewer drafts are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core import Unsupported
from outrider.drafters.heads.formats import reading_config
from outrider.drafters.heads.layers import (
    Attend,
    Attention,
    DecoderLayer,
    HeadCache,
    HeadConfig,
    RMSNorm,
    Rotary,
    spread,
)

OTHERS = (
    "attention_sink_bias",
    "attention_value_scale",
    "conv_kernel_size",
    "final_logit_softcapping",
    "is_causal",
    "projector_type",
    "sample_from_anchor",
    "selector_rank",
    "use_gemma_norm",
)
"""Entries of config.json that make it another head."""


@dataclass(frozen=True)
class Block:
    """What a DFlash head reads beside the context.

    size: tokens of a block: one is known, the others are drafts
    mask_token_id: stands for each draft
    """

    size: int
    mask_token_id: int

    @staticmethod
    @reading_config
    def of(config: Mapping[str, Any], path: Path) -> Block:
        """Read it from a config.json. path: where it is, for messages"""
        nested = config.get("dflash_config") or {}
        both = {**config, **nested}
        for name in OTHERS:
            if both.get(name):
                raise Unsupported(f"the DFlash head at {path} has {name}", fix="use one without it")
        inner = config.get("transformer_layer_config") or config
        if "sliding_attention" in (inner.get("layer_types") or ()):
            raise Unsupported(f"the DFlash head at {path} has sliding_attention layers",
                              fix="use one with full_attention")  # fmt: skip
        missing = [n for n in ("block_size", "mask_token_id") if not isinstance(both.get(n), int)]
        if missing:
            fix = "complete it from the head's page"
            raise Unsupported(f"{path}/config.json has no {', '.join(missing)}", fix=fix)
        return Block(both["block_size"], both["mask_token_id"])


class DFlashHead(nn.Module):
    """A DFlash head.

    hidden_layers: of the target whose states it reads: see `Drafter`
    """

    name = "dflash"

    def __init__(self, config: HeadConfig, hidden_layers: Sequence[int], block: Block) -> None:
        super().__init__()
        known = 0 <= block.mask_token_id < config.vocab_size
        if not (known and 1 < block.size <= config.max_length):
            raise Unsupported(f"a DFlash head with {block}", fix="check its config.json")
        self.config, self.hidden_layers, self.block = config, tuple(hidden_layers), block
        size, eps = config.hidden_size, config.norm_eps
        self.fc = nn.Linear(len(self.hidden_layers) * size, size, bias=False)
        self.hidden_norm, self.norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rotary = Rotary(config)
        self.d2t: Tensor

    def reduce(self, states: Tensor) -> Tensor:
        """Return c of the target's states, [n, layers, H] -> [n, H]."""
        found: Tensor = self.hidden_norm(self.fc(states.flatten(1).to(self.fc.weight.dtype)))
        return found

    def context(self, c: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of context rows, [n, kv heads, D], in each layer."""
        angles = self.rotary(positions)
        attentions = (layer.get_submodule("self_attn") for layer in self.layers)
        return [a.keys_values(c, angles) for a in attentions if isinstance(a, Attention)]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Read blocks, one after the other. Return what stands for each token, [N, H].

        tokens, positions: [N]
        """
        angles = self.rotary(positions)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, angles, attend)
        found: Tensor = self.norm(x)
        return found

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits over the target's vocabulary, [n, V]; -inf for what it cannot draft."""
        return spread(self.lm_head(x), self.d2t, self.config.vocab_size)


class BlockPass:
    """A pass over one block for each of these sequences. Their caches stay as they are."""

    def __init__(self, caches: Sequence[HeadCache], size: int) -> None:
        self._caches, self._size = caches, size

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let each row look at its context and its block: see `Attend`."""
        split = [y.split_with_sizes([self._size] * len(self._caches)) for y in (q, k, v)]
        found = []
        for cache, q, k, v in zip(self._caches, *split, strict=True):
            keys, values = cache.append(layer, k, v)  # not counted: the next pass writes over them
            q, keys, values = (y.transpose(0, 1)[None] for y in (q, keys, values))
            mixed = functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            found.append(mixed[0].transpose(0, 1))
        return torch.cat(found)
