"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858): a layer on top of the target's last states.

The head reads pairs, as EAGLE-3 does. With tokens t and the target's states f (the last layer's,
*after* the final norm: what lm_head reads), the pair at position i + 1 is (t_{i+1}, f_i):

    z = fc([embed(t_{i+1}); f_i])                embedding first, state second
    h = z + attention(z)                         no norm before attention
    g = h + mlp(norm(h))                         and none at the end
    q = softmax(lm_head(g))                      the distribution of t_{i+2}

Beyond what the target has read, g takes the place of f. Embedding and lm_head are the target's.
EAGLE-2 is the same head with other trees.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.drafters.heads.layers import Attend, DecoderLayer, HeadConfig, Rotary


class EagleHead(nn.Module):
    """An EAGLE-1 or EAGLE-2 head.

    num_layers: of the target
    """

    name = "eagle"

    def __init__(self, config: HeadConfig, num_layers: int, bias: bool = True) -> None:
        super().__init__()
        self.config, size = config, config.hidden_size
        self.hidden_layers: tuple[int, ...] = (num_layers,)
        self.fc = nn.Linear(2 * size, size, bias=bias)
        self.layers = nn.ModuleList([DecoderLayer(config, input_norm=False)])
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.rotary = Rotary(config)

    def reduce(self, states: Tensor) -> Tensor:
        """Return the target's last states, [n, 1, H] -> [n, H]."""
        return states[:, 0].to(self.fc.weight.dtype)

    def forward(self, tokens: Tensor, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Read pairs. Return g, which takes the place of the target's next state, [N, H].

        tokens, positions: [N]
        """
        angles = self.rotary(positions)
        z = self.fc(torch.cat([self.embed_tokens(tokens), x], -1))
        found: Tensor = self.layers[0](z, angles, attend)
        return found

    def logits(self, g: Tensor) -> Tensor:
        """Return the logits over the target's vocabulary, [n, V]."""
        found: Tensor = self.lm_head(g).float()
        return found
