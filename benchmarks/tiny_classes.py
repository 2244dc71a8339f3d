"""Tiny random models of the classes in Transformers' causal-LM mapping.

A class is built from its own configuration, with SIZES where it has a field of that name, and with
what MORE says for classes whose fields depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB = 97
LARGEST = 30_000_000
"""Weights of a model that still counts as tiny."""

_NONE = ("pad_token_id", "bos_token_id", "eos_token_id")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("hidden_size_per_layer_input", "head_dim", "kv_channels"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "decoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim",), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    "rotary_dim": 4,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_ssm": 64,
    "state_size": 8,
    "num_kv_shared_layers": 2,
    "laurel_rank": 4,
    "is_decoder": True,
    **dict.fromkeys(_NONE),
}
_MLA = {"num_key_value_heads": 4, "head_dim": 8, "v_head_dim": 12}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("DeepseekV2", "DeepseekV3", "DeepseekV32", "GlmMoeDsa"), _MLA),
    **dict.fromkeys(("Glm4MoeLite", "MiniCPM3", "AXK1", "AXK2", "KimiLinear"), _MLA),
    "LongcatFlash": _MLA | {"num_layers": 2, "zero_expert_num": 1, "v_head_dim": 8},
    "Dots1": {"n_shared_experts": 1},
    "Gemma3n": {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4}
    | {"layer_types": _ALTERNATING},
    "Gemma4": {"layer_types": _ALTERNATING},
    "Bamba": {"attn_layer_indices": [0, 1, 2, 3]},
    **{name: {"pad_token_id": 0} for name in ("Emu3", "ModernBertDecoder")},
}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_ADDED = ("layer_types", "n_shared_experts", "attn_layer_indices")
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
}


def classes() -> Iterator[tuple[type[PretrainedConfig], type[PreTrainedModel]]]:
    """Yield each class of the mapping, once, with its configuration."""
    seen = set()
    for config, found in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        for kind in found if isinstance(found, tuple) else (found,):
            if kind not in seen:
                seen.add(kind)
                # the mapping may name the configuration of a larger model that the class is in
                yield kind.config_class or config, kind


def variants(config: type[PretrainedConfig]) -> dict[str, dict[str, Any]]:
    """Return what is changed in a class's configuration, by name."""
    fields = config().get_text_config(decoder=True)
    known = fields.to_dict()
    found: dict[str, dict[str, Any]] = {"usual": {}}
    if "sliding_window" in known:
        found = {"window": {"sliding_window": 8}, "no window": {"sliding_window": None}}
        if "use_sliding_window" in known:
            found["window"] |= {"use_sliding_window": True, "max_window_layers": 2}
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        found["longrope"] = {"rope_parameters": _LONGROPE}
        if "original_max_position_embeddings" in known:
            found["longrope"] |= {"original_max_position_embeddings": 32}
    return found


def build(
    kind: type[PreTrainedModel], config: type[PretrainedConfig], change: dict[str, Any]
) -> PreTrainedModel:
    """Return a random model of this class, whose opinions are strong enough to compare."""
    name = kind.__name__.partition("For")[0].removesuffix("LMHeadModel")
    made = _configuration(config, MORE.get(name, {}) | change)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(made).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} weights")
    torch.manual_seed(0)
    model = kind(_configuration(config, MORE.get(name, {}) | change)).eval().float()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() > 1 or parameter_name.endswith(".A"):
            parameter.data.normal_(0, 0.25)
    settings = model.generation_config
    settings.eos_token_id = settings.bos_token_id = None
    settings.pad_token_id = 0
    return model


def _configuration(config: type[PretrainedConfig], change: dict[str, Any]) -> PretrainedConfig:
    """Return a configuration, and that of its text within, with SIZES and the change."""
    usual = config()
    text = usual.get_text_config(decoder=True)
    names = [name for name in ("text_config", "decoder") if getattr(usual, name, None) is text]
    if names:
        inner = _fields(text, {"pad_token_id": 0, **change}) | {"model_type": text.model_type}
        return config(**{names[0]: inner}, **_vision(usual))
    try:
        return config(**_fields(usual, change))
    except Exception:  # some want these to be numbers
        return config(**_fields(usual, {"pad_token_id": 0, **_ENDS, **change}))


def _vision(usual: PretrainedConfig) -> dict[str, Any]:
    """Return the smallest image part; texts of the comparison have no images."""
    part = getattr(usual, "vision_config", None)
    if not isinstance(part, PretrainedConfig):
        return {}
    known = part.to_dict()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1}
    sizes |= {"num_attention_heads": 2, "num_heads": 2, "out_hidden_size": 32}
    found = {name: size for name, size in sizes.items() if name in known}
    return {"vision_config": found | {"model_type": part.model_type}}


def _fields(usual: PretrainedConfig, change: dict[str, Any]) -> dict[str, Any]:
    known = usual.to_dict()
    found = {name: size for name, size in SIZES.items() if name in known}
    found |= {name: value for name, value in change.items() if name in known or name in _ADDED}
    if (rope := found.get("rope_parameters")) is not None:
        width = found.get("qk_rope_head_dim") or found.get("head_dim") or 8
        share = (getattr(usual, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
        count = int(width * share) // 2
        factors = {"short_factor": [1.0] * count, "long_factor": [2.0**i for i in range(count)]}
        partial = {} if share == 1.0 else {"partial_rotary_factor": share}
        found["rope_parameters"] = rope | factors | partial
    return found
