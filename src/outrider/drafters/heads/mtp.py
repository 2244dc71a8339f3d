"""MTP (DeepSeek-V3, arXiv 2412.19437): one more layer of the target, which reads two tokens ahead.

The head reads pairs, as EAGLE-3 does. With tokens t and the target's states f (the last layer's,
*after* the final norm: what lm_head reads), the pair at position i + 1 is (t_{i+1}, f_i):

    z = eh_proj([enorm(embed(t_{i+1})); hnorm(f_i)])      embedding first, state second
    g = norm(layer(z))                                    a dense layer of Llama's or Qwen's kind
    q = softmax(lm_head(g))                               the distribution of t_{i+2}

Beyond what the target has read, g takes the place of f: the *post-norm* state feeds the next step.
Embedding and lm_head are the target's.

The names differ by family, and the tensors may be in a directory of their own or among those of the
target:

    ours     DeepSeek, GLM                   Qwen3-Next, Qwen3.5           MiMo, speculators
             model.layers.{n}.               mtp.                          mtp_layers.0.
    enorm    enorm                           pre_fc_norm_embedding         token_layernorm
    hnorm    hnorm                           pre_fc_norm_hidden            hidden_layernorm
    eh_proj  eh_proj                         fc                            input_proj
    layer    (no name)                       layers.0                      (no name)
    norm     shared_head.norm                norm                          final_layernorm
    lm_head  shared_head.head

MiMo's own checkpoints have the state first; the columns of eh_proj are swapped when it is read.
(SGLang puts zeros in the place of MiMo's first embedding. Outrider does not.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from outrider.core import Unsupported
from outrider.drafters.heads.layers import (
    Attend,
    DecoderLayer,
    HeadConfig,
    RMSNorm,
    Rotary,
)

DEEPSEEK = r"(?:model\.)?(?:language_model\.)?layers\.\d+\."
LAYOUTS: tuple[tuple[str, dict[str, str]], ...] = (
    (
        r"(?:model\.)?mtp_layers\.0\.",
        {
            "token_layernorm.": "enorm.",
            "hidden_layernorm.": "hnorm.",
            "input_proj.": "eh_proj.",
            "final_layernorm.": "norm.",
        },
    ),
    (
        r"mtp\.",
        {
            "pre_fc_norm_embedding.": "enorm.",
            "pre_fc_norm_hidden.": "hnorm.",
            "fc.": "eh_proj.",
            "norm.": "norm.",
            "layers.0.": "layer.",
        },
    ),
    (
        DEEPSEEK,
        {
            "enorm.": "enorm.",
            "hnorm.": "hnorm.",
            "eh_proj.": "eh_proj.",
            "shared_head.norm.": "norm.",
            "shared_head.head.": "lm_head.",
            "embed_tokens.": "embed_tokens.",
        },
    ),
)
"""How the names of a layout begin, and ours for theirs; a name that is not here is the layer's."""

MISSING = {
    "experts": "a mixture of experts (mlp.experts)",
    "kv_a_proj_with_mqa": "latent attention (MLA: self_attn.kv_a_proj_with_mqa)",
    "linear_attn": "linear attention (linear_attn)",
}
"""What the layer may be made of that is not here, by a part of a tensor's name."""


class MTPHead(nn.Module):
    """An MTP head with a dense layer.

    num_layers: of the target
    """

    name = "mtp"

    def __init__(self, config: HeadConfig, num_layers: int) -> None:
        super().__init__()
        self.config = config
        self.hidden_layers: tuple[int, ...] = (num_layers,)
        size, eps, offset = config.hidden_size, config.norm_eps, config.norm_offset
        self.enorm, self.hnorm = RMSNorm(size, eps, offset), RMSNorm(size, eps, offset)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = DecoderLayer(config)
        self.norm = RMSNorm(size, eps, offset)
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.rotary = Rotary(config)

    def reduce(self, states: Tensor) -> Tensor:
        """Return the target's last states, [n, 1, H] -> [n, H]."""
        return states[:, 0].to(self.eh_proj.weight.dtype)

    def forward(self, tokens: Tensor, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Read pairs. Return g, which takes the place of the target's next state, [N, H].

        tokens, positions: [N]
        """
        angles = self.rotary(positions)
        both = torch.cat([self.enorm(self.embed_tokens(tokens)), self.hnorm(x)], -1)
        found: Tensor = self.norm(self.layer(self.eh_proj(both), angles, attend))
        return found

    def logits(self, g: Tensor) -> Tensor:
        """Return the logits over the target's vocabulary, [n, V]."""
        found: Tensor = self.lm_head(g).float()
        return found


def own_names(names: Sequence[str]) -> dict[str, str]:
    """Return our names of an MTP head's tensors, by theirs. What is not a head's is left out."""
    layers = {name.removesuffix("enorm.weight") for name in names if name.endswith(".enorm.weight")}
    if len(layers) > 1:
        said = ", ".join(sorted(layers))
        raise Unsupported(f"{len(layers)} MTP layers ({said})", fix="use a head with one")
    renamed = {}
    for name in names:
        for prefix, table in LAYOUTS:
            match = re.match(prefix, name)
            # in DeepSeek's layout any layer matches; the head's is the one with `enorm`
            if match and (prefix != DEEPSEEK or match[0] in layers):
                renamed[name] = _own_name(name[match.end() :], table)
                break
    _check_layer(renamed)
    return renamed


def _own_name(rest: str, table: Mapping[str, str]) -> str:
    for theirs, ours in table.items():
        if rest.startswith(theirs):
            return ours + rest[len(theirs) :]
    return f"layer.{rest}"


def _check_layer(names: Iterable[str]) -> None:
    for part, said in MISSING.items():
        if any(f".{part}." in name for name in names):
            raise Unsupported(
                f"an MTP head whose layer has {said}",
                fix="use a head with a dense layer, or SGLang's own MTP",
            )


def embedding_first(weights: dict[str, Tensor]) -> None:
    """Swap the columns of a MiMo head's eh_proj: it has the state first."""
    state, embedding = weights["eh_proj.weight"].chunk(2, -1)
    weights["eh_proj.weight"] = torch.cat([embedding, state], -1)
