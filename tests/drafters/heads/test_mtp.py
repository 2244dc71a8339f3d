"""MTP heads: the formula, every layout's names, Qwen3.5's own layer, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from by_hand import decoder_layer, norm
from safetensors.torch import save_file

from outrider.core import Unsupported
from outrider.drafters.heads import HeadConfig, MTPHead, kind_of, load_head
from outrider.drafters.heads.layers import HeadCache, SequencePass

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 256,
    "vocab_size": 40, "model_type": "qwen3",
}  # fmt: skip
LAYERS = 6


def shaken(head):
    """Return the head with weights that tell all norms and biases from each other."""
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head.eval().requires_grad_(False)


def made(model_type="qwen3", **more):
    torch.manual_seed(0)
    return shaken(MTPHead(HeadConfig.of({**SHAPE, "model_type": model_type, **more}), LAYERS))


@pytest.fixture
def states():
    return torch.randn(30, 1, 32, generator=torch.Generator().manual_seed(1))


def logits(head, states, count=9):
    tokens, rows = torch.arange(count) * 3 % 40, torch.arange(count)
    x = head.reduce(states[:count])
    return head.logits(head(tokens, x, rows + 1, SequencePass([HeadCache()], [count])))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_5_text"])
@torch.inference_mode()
def test_a_pass_is_the_formula(model_type, states):
    head = made(model_type)
    assert head.hidden_layers == (LAYERS,)
    tokens, x = torch.arange(10) * 3 % 40, head.reduce(states[:10])
    both = torch.cat([norm(head.embed_tokens(tokens), head.enorm), norm(x, head.hnorm)], -1)
    g = norm(decoder_layer(head.layer, head.eh_proj(both), range(1, 11)), head.norm)
    cache, found = HeadCache(), []
    for part in ([0, 1, 2, 3], [4], [5, 6, 7, 8, 9]):
        rows = torch.tensor(part)
        attend = SequencePass([cache], [len(part)])
        found.append(head(tokens[rows], x[rows], rows + 1, attend))
        attend.keep()
    torch.testing.assert_close(torch.cat(found), g, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.logits(g), g @ head.lm_head.weight.T)


@torch.inference_mode()
def test_the_layer_is_qwen3_5s_own(states):
    """Gated attention, norms around 1, a quarter of the dimensions turned."""
    theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    shape = {k: v for k, v in SHAPE.items() if k not in ("rope_theta", "model_type")}
    config = Qwen3_5TextConfig(
        **shape, num_hidden_layers=1, layer_types=["full_attention"], rope_parameters=rope
    )
    config._attn_implementation = "eager"
    head = made("qwen3_5_text", rope_parameters=rope)
    layer = theirs.Qwen3_5DecoderLayer(config, 0).eval()
    layer.load_state_dict(head.layer.state_dict())
    x, positions = torch.randn(1, 7, 32), torch.arange(1, 8)
    turned = theirs.Qwen3_5TextRotaryEmbedding(config)(x, positions[None, None].expand(3, 1, 7))
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    expected = layer(x, position_embeddings=turned, attention_mask=mask)
    expected = expected[0] if isinstance(expected, tuple) else expected
    found = head.layer(x[0], head.rotary(positions), SequencePass([HeadCache()], [7]))
    torch.testing.assert_close(found, expected.view(7, 32), atol=1e-5, rtol=1e-5)


# their names for ours: prefix, then the four that are not the layer's
LAYOUTS = {
    "deepseek": ("model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "mimo": ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj",
             "final_layernorm"),
    "speculators": ("mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj",
                    "final_layernorm"),
}  # fmt: skip
CONFIGS = {
    "deepseek": {**SHAPE, "architectures": ["SomeForCausalLMNextN"], "num_hidden_layers": 1},
    "qwen": {**SHAPE, "architectures": ["Qwen3ForCausalLMMTP"]},
    "mimo": {**SHAPE, "architectures": ["MiMoMTP"], "model_type": "mimo"},
    "speculators": {"speculators_model_type": "mtp", "transformer_layer_config": SHAPE},
    "within": {**SHAPE, "architectures": ["SomeForCausalLM"], "num_hidden_layers": LAYERS,
               "num_nextn_predict_layers": 1},
}  # fmt: skip


def write(head, folder, layout, config, n=0, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    prefix, *others = LAYOUTS[layout]
    names = dict(zip(("enorm", "hnorm", "eh_proj", "norm"), others, strict=True))
    weights = {}
    for name, tensor in head.state_dict().items():
        first, _, rest = name.partition(".")
        if first in names:
            weights[f"{prefix.format(n=n)}{names[first]}.{rest}"] = tensor
        elif first == "layer":
            inner = "layers.0." if layout == "qwen" else ""
            weights[f"{prefix.format(n=n)}{inner}{rest}"] = tensor
    if layout == "mimo":  # the state first
        key = "model.mtp_layers.0.input_proj.weight"
        weights[key] = torch.cat([weights[key][:, 32:], weights[key][:, :32]], 1)
    weights |= changes
    save_file({k: v.contiguous() for k, v in weights.items() if v is not None},
              folder / "model.safetensors")  # fmt: skip
    return folder


def load(path, head, **more):
    shared = head.embed_tokens.weight.detach(), head.lm_head.weight.detach()
    return load_head(path, shared[0], LAYERS, lm_head=shared[1], **more)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_every_layout_is_the_same_head(layout, states, tmp_path):
    head = made()
    path = write(head, tmp_path / "head", layout, CONFIGS[layout])
    assert kind_of(CONFIGS[layout]) == "mtp"
    found = load(path, head)
    torch.testing.assert_close(logits(found, states), logits(head, states))


@pytest.mark.parametrize("layout", ["deepseek", "qwen", "mimo"])
@torch.inference_mode()
def test_the_head_is_found_among_the_targets_weights(layout, states, tmp_path):
    """Only its own tensors are read."""
    head = made("llama")
    config = {**CONFIGS["within"], "model_type": "mimo" if layout == "mimo" else "llama"}
    other = {f"model.layers.{i}.self_attn.q_proj.weight": torch.zeros(2, 2) for i in range(LAYERS)}
    other |= {"model.embed_tokens.weight": torch.zeros(1), "lm_head.weight": torch.zeros(1)}
    path = write(head, tmp_path / "target", layout, config, n=LAYERS, **other)
    assert kind_of(config) == "model"
    found = load(path, head, kind="mtp")
    torch.testing.assert_close(logits(found, states), logits(head, states))


@torch.inference_mode()
def test_a_head_may_bring_its_own_output(states, tmp_path):
    head = made()
    own = {"model.layers.0.shared_head.head.weight": torch.randn(40, 32),
           "model.layers.0.embed_tokens.weight": head.embed_tokens.weight.detach()}  # fmt: skip
    path = write(head, tmp_path / "head", "deepseek", CONFIGS["deepseek"], **own)
    found = load_head(path, torch.zeros(40, 32), LAYERS, lm_head=torch.zeros(40, 32))
    head.lm_head.weight.data = own["model.layers.0.shared_head.head.weight"]
    torch.testing.assert_close(logits(found, states), logits(head, states))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mtp.fc.weight": None}, "no MTP tensors"),
        ({"mtp.norm.weight": None}, "missing norm.weight"),
        ({"mtp.layers.0.self_attn.k_norm.weight": None}, "missing layer.self_attn.k_norm.weight"),
        ({"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(1)}, "mixture of experts"),
        ({"mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(1)}, "MLA"),
        ({"mtp.layers.0.linear_attn.in_proj.weight": torch.zeros(1)}, "linear attention"),
        ({"mtp.layers.1.mlp.up_proj.weight": torch.zeros(1)}, "unknown layer.layers.1"),
        ({"model.norm.weight": torch.zeros(1)}, r"unknown model\.norm\.weight"),
        ({"mtp_layers.0.final_layernorm.weight": torch.zeros(32)}, "norm.weight twice"),
        ({"mtp.norm.weight": torch.zeros(9)}, r"of another shape norm.weight: \(9,\)"),
    ],
)
def test_refused_weights(changes, said, tmp_path):
    head = made()
    path = write(head, tmp_path / "head", "qwen", CONFIGS["qwen"], **changes)
    with pytest.raises(Unsupported, match=said):
        load(path, head)


def test_more_than_one_layer_is_refused(tmp_path):
    head = made()
    more = {"model.layers.7.enorm.weight": torch.zeros(32)}
    path = write(head, tmp_path / "head", "deepseek", CONFIGS["within"], n=LAYERS, **more)
    with pytest.raises(Unsupported, match="2 MTP layers"):
        load(path, head, kind="mtp")


def test_without_the_targets_output_it_is_named(tmp_path):
    head = made()
    path = write(head, tmp_path / "head", "qwen", CONFIGS["qwen"])
    with pytest.raises(Unsupported, match=r"missing lm_head\.weight"):
        load_head(path, head.embed_tokens.weight.detach(), LAYERS)


def test_a_target_without_a_head(tmp_path):
    head = made()
    path = write(head, tmp_path / "head", "qwen", CONFIGS["within"], **{"mtp.fc.weight": None})
    with pytest.raises(Unsupported, match="no MTP tensors"):
        load(path, head, kind="mtp")
    with pytest.raises(Unsupported, match="not a head"):
        load(path, head)
