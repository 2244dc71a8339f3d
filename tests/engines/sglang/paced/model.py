"""The model that a server on the paced device loads: as small as SGLang takes it."""

from __future__ import annotations

import json
from pathlib import Path

from paced.texts import VOCABULARY

FLAGS = (
    *("--load-format", "dummy", "--disable-radix-cache"),
    *("--stream-interval", "64", "--chunked-prefill-size", "8192"),
)
"""Of every server on the paced device."""

LONGEST, HEADED = 65536, 4


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": VOCABULARY - 1,
}


def write_head(folder: Path) -> Path:
    """Write the config.json of an EAGLE-3 head for a model of HEADED layers. Return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **CONFIG,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, layers: int = 1) -> Path:
    """Write a model with 64 bytes of cache a token and layer, without weights. Return its folder.

    layers: a head needs HEADED
    """
    config = {**CONFIG, "num_hidden_layers": layers}
    folder.mkdir(parents=True, exist_ok=True)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    files = {
        "config.json": config,
        "generation_config.json": {},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
