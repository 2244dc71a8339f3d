"""EAGLE-1 and EAGLE-2 heads: the formula, and the names they are published with."""

from __future__ import annotations

import json

import pytest
import torch
from by_hand import causal, mlp, norm
from safetensors.torch import save_file

from outrider.core import Unsupported
from outrider.drafters.heads import EagleHead, HeadConfig, kind_of, load_head
from outrider.drafters.heads.layers import HeadCache, SequencePass

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 256,
    "vocab_size": 40, "model_type": "llama",
}  # fmt: skip
LAYERS = 6


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def head(request):
    torch.manual_seed(0)
    made = EagleHead(HeadConfig.of(SHAPE), LAYERS, bias=request.param)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval().requires_grad_(False)


def run(head, count=8):
    tokens, rows = torch.arange(count) * 3 % 40, torch.arange(count)
    x = torch.randn(30, 1, 32, generator=torch.Generator().manual_seed(1))[:count]
    return tokens, x[:, 0], head(tokens, head.reduce(x), rows + 1, SequencePass([HeadCache()], [8]))


@torch.inference_mode()
def test_a_pass_is_the_formula(head):
    tokens, x, found = run(head)
    layer = head.layers[0]
    z = head.fc(torch.cat([head.embed_tokens(tokens), x], -1))
    h = z + causal(layer.self_attn, z, range(1, 9))
    g = h + mlp(layer.mlp, norm(h, layer.post_attention_layernorm))
    torch.testing.assert_close(found, g, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.logits(found), found @ head.lm_head.weight.T)


@pytest.mark.parametrize("prefix", ["", "model."])
@torch.inference_mode()
def test_it_is_loaded(prefix, head, tmp_path):
    config = {**SHAPE, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    assert kind_of(config) == "eagle"
    (tmp_path / "config.json").write_text(json.dumps(config))
    shared = ("embed_tokens.weight", "lm_head.weight")
    weights = {f"{prefix}{k}": v for k, v in head.state_dict().items() if k not in shared}
    save_file(weights, tmp_path / "model.safetensors")
    embedding, output = head.embed_tokens.weight.detach(), head.lm_head.weight.detach()
    found = load_head(tmp_path, embedding, LAYERS, lm_head=output)
    assert found.hidden_layers == (LAYERS,)
    torch.testing.assert_close(run(found)[2], run(head)[2])
    save_file(weights | {"layers.0.input_layernorm.weight": torch.zeros(32)},
              tmp_path / "model.safetensors")  # fmt: skip
    with pytest.raises(Unsupported, match=r"unknown layers\.0\.input_layernorm\.weight"):
        load_head(tmp_path, embedding, LAYERS, lm_head=output)
