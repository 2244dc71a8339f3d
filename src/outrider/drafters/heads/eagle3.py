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
EAGLE-3.1's further norms (`fc_norm`, `norm_output`) are not read yet: such a head is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.drafters.heads.layers import (
    MLP,
    Attend,
    Attention,
    HeadConfig,
    RMSNorm,
    frequencies,
)


class Eagle3Layer(nn.Module):
    """The head's only layer. Its attention reads embedding and state side by side."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn, self.mlp = Attention(config, 2 * size), MLP(config)

    def forward(self, embedded: Tensor, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """Return g, [N, H]."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)
        h = x + self.self_attn(both, angles, attend)
        found: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return found


class Eagle3Head(nn.Module):
    """An EAGLE-3 head.

    hidden_layers: of the target whose states it reads: see `Drafter`
    """

    name = "eagle3"

    def __init__(self, config: HeadConfig, hidden_layers: Sequence[int], target_size: int) -> None:
        super().__init__()
        self.config, self.hidden_layers = config, tuple(hidden_layers)
        size = config.hidden_size
        self.fc = nn.Linear(len(self.hidden_layers) * target_size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, config.norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, target_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("frequencies", frequencies(config), persistent=False)
        self.d2t: Tensor
        self.frequencies: Tensor

    def reduce(self, states: Tensor) -> Tensor:
        """Return x of the target's states, [n, layers, H] -> [n, H]."""
        found: Tensor = self.fc(states.flatten(1).to(self.fc.weight.dtype))
        return found

    def forward(self, tokens: Tensor, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Read pairs. Return g, which is x of the pair that follows, [N, H].

        tokens, positions: [N]
        """
        angles = positions[:, None].float() * self.frequencies
        found: Tensor = self.midlayer(self.embed_tokens(tokens), x, angles, attend)
        return found

    def logits(self, g: Tensor) -> Tensor:
        """Return the logits over the target's vocabulary, [n, V]; -inf for what it cannot draft."""
        own: Tensor = self.lm_head(self.norm(g)).float()
        if self.config.draft_vocab_size == self.config.vocab_size and not self.d2t.any():
            return own
        found = own.new_full((len(own), self.config.vocab_size), -math.inf)
        found[:, torch.arange(len(self.d2t), device=own.device) + self.d2t] = own
        return found
