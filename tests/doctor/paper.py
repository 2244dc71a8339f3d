"""Models on paper: a config and headers, and holes where the numbers would be."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

TINY = Path(__file__).parents[2] / "src" / "outrider" / "assets" / "tiny"

QWEN_1_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN_0_5B = QWEN_1_5B | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Qwen2's tensors."""
    wide, between = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * wide // config["num_attention_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], wide)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], wide)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows in (("q", wide), ("k", kv), ("v", kv)):
            found[f"{at}.self_attn.{name}_proj.weight"] = (rows, wide)
            found[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        found[f"{at}.self_attn.o_proj.weight"] = (wide, wide)
        for name in ("gate", "up"):
            found[f"{at}.mlp.{name}_proj.weight"] = (between, wide)
        found[f"{at}.mlp.down_proj.weight"] = (wide, between)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = (wide,)
    found["model.norm.weight"] = (wide,)
    return found


def write_safetensors(file: Path, tensors: dict[str, tuple[int, ...]], dtype="BF16", each=2):
    """Write a header; the data is a hole in the file."""
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + prod(shape) * each
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
