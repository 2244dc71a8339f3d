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

LONGEST = 65536


def write_model(folder: Path) -> Path:
    """Write a model with 64 bytes of cache a token, without weights. Return its folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
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
