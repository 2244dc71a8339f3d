"""EAGLE-3 (arXiv 2503.01840): one layer that reads what the target thought, and drafts from it.

The head reads pairs. With tokens t and the target's states f (f_i is what the target knew after
reading t_i), the pair at position i + 1 is (t_{i+1}, x_i), where

    x_i = fc([f_i of a low layer; of a middle one; of a high one])
    h   = x_i + attention([norm(embed(t_{i+1})); norm(x_i)])
    g   = h + mlp(norm(h))
    q   = softmax(lm_head(norm(g)))        the distribution of t_{i+2}

Beyond what the target has read there is no f. The head then puts its own g in the place of x: the
*pre-norm* state feeds the next step. Attention sees all earlier pairs.

`d2t` maps the head's smaller vocabulary to the target's: draft id i is target id i + d2t[i].

EAGLE-3.1 and others add norms, which config.json names:

    fc_norm                x_i = fc([norm_1(f_i of a low layer); norm_2(...); norm_3(...)])
    norm_before_fc         x_i = fc(norm([f_i of a low layer; of a middle one; of a high one]))
    norm_output            norm(g) takes the place of x, not g
    norm_before_residual   h = norm(x_i) + attention(...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core import Unsupported
from outrider.drafters.heads.formats import reading_config
from outrider.drafters.heads.layers import (
    MLP,
    Attend,
    Attention,
    HeadConfig,
    RMSNorm,
    Rotary,
    spread,
)


@dataclass(frozen=True)
class Eagle3Norms:
    """Which norms a head has beside those of the first EAGLE-3: see above."""

    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    @staticmethod
    @reading_config
    def of(config: Mapping[str, Any]) -> Eagle3Norms:
        """Read them from a config.json."""
        nested = config.get("eagle_config") or {}
        before_fc = nested.get("norm_before_fc", config.get("norm_before_fc"))
        found = Eagle3Norms(
            fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
            norm_before_fc=bool(before_fc),
            norm_output=bool(config.get("norm_output")),
            norm_before_residual=bool(config.get("norm_before_residual")),
        )
        if found.fc_norm and found.norm_before_fc:
            raise Unsupported(
                "a head with fc_norm and norm_before_fc", fix="heads have one of them"
            )
        return found


class Eagle3Layer(nn.Module):
    """The head's only layer. Its attention reads embedding and state side by side."""

    def __init__(self, config: HeadConfig, norm_before_residual: bool = False) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn, self.mlp = Attention(config, 2 * size), MLP(config)

    def forward(self, embedded: Tensor, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """Return g, [N, H]."""
        normed = self.hidden_norm(x)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        h = (normed if self.norm_before_residual else x) + self.self_attn(both, angles, attend)
        found: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return found


class Eagle3Head(nn.Module):
    """An EAGLE-3 head.

    hidden_layers: of the target whose states it reads: see `Drafter`
    target_size: width of the target's states
    """

    name = "eagle3"

    def __init__(
        self,
        config: HeadConfig,
        hidden_layers: Sequence[int],
        target_size: int,
        norms: Eagle3Norms | None = None,
    ) -> None:
        super().__init__()
        self.config, self.hidden_layers = config, tuple(hidden_layers)
        self.norms = norms or Eagle3Norms()
        size, eps, wide = config.hidden_size, config.norm_eps, len(self.hidden_layers) * target_size
        if self.norms.norm_before_fc:
            self.input_norm = RMSNorm(wide, eps)
        if self.norms.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(target_size, eps) for _ in self.hidden_layers)
        self.fc = nn.Linear(wide, size, bias=False)
        self.midlayer = Eagle3Layer(config, self.norms.norm_before_residual)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, target_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rotary = Rotary(config)
        self.d2t: Tensor

    def reduce(self, states: Tensor) -> Tensor:
        """Return x of the target's states, [n, layers, H] -> [n, H]."""
        states = states.to(self.fc.weight.dtype)
        if self.norms.fc_norm:
            rows = zip(self.fc_norm, states.unbind(1), strict=True)
            states = torch.stack([norm(state) for norm, state in rows], 1)
        wide = states.flatten(1)
        if self.norms.norm_before_fc:
            wide = self.input_norm(wide)
        found: Tensor = self.fc(wide)
        return found

    def forward(self, tokens: Tensor, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Read pairs. Return x of the pairs that follow, which is g or norm(g), [N, H].

        tokens, positions: [N]
        """
        angles = self.rotary(positions)
        found: Tensor = self.midlayer(self.embed_tokens(tokens), x, angles, attend)
        return self.norm(found) if self.norms.norm_output else found

    def logits(self, g: Tensor) -> Tensor:
        """Return the logits over the target's vocabulary, [n, V]; -inf for what it cannot draft."""
        own: Tensor = self.lm_head(g if self.norms.norm_output else self.norm(g))
        return spread(own, self.d2t, self.config.vocab_size)
