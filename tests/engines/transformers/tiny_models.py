"""Tiny random models of many classes, whose opinions are strong enough to compare."""

from __future__ import annotations

import torch
import transformers

VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}


def tiny(name: str, seed: int = 0, std: float = 0.25, **config):
    """Return a random model of a class by its name without `ForCausalLM`; SMALL, changed."""
    made = getattr(transformers, f"{name}Config")(**{**SMALL, **config})
    return built(getattr(transformers, f"{name}ForCausalLM"), made, seed, std)


def built(kind, config, seed: int = 0, std: float = 0.25):
    torch.manual_seed(seed)
    model = kind(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith(".A"):
            parameter.data.normal_(0, std)
    settings = model.generation_config
    settings.eos_token_id = settings.bos_token_id = None
    settings.pad_token_id = 0
    return model


def ids(length: int, seed: int = 1, vocab_size: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (length,), generator=generator).tolist()


def plain(model, prompts, count: int, **options) -> list[list[int]]:
    """Return what the model's own `generate` emits for each prompt, alone."""
    outputs = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        found = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            **{"do_sample": False, **options},
        )
        outputs.append(found[0, len(prompt) :].tolist())
    return outputs
