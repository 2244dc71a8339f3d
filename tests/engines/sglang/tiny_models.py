"""Models and flags that servers are compared with, and tiny models for it: of random weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny" / "target"
"""A Llama, trained on a few texts. All models here have its tokenizer."""


@dataclass(frozen=True)
class Case:
    """What is compared.

    what: for the documentation
    model_type: of the model's configuration
    flags: of both servers
    files: SGLang's model files that it needs
    adapters: how many LoRA adapters there are
    draft: the draft model of the server with Outrider
    since: the first version of SGLang that has it
    """

    what: str
    model_type: str
    flags: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    adapters: int = 0
    draft: Path | None = None
    since: str = "0.5.11"


CASES = {
    "moe": Case(
        "mixture of experts (Qwen3-MoE); `--page-size 16`, with a draft model",
        "qwen3_moe",
        ("--page-size", "16"),
        ("qwen3_moe", "qwen2_moe", "qwen3"),
        draft=TARGET,
    ),
    "lora": Case(
        "LoRA adapters, several in a batch; `--page-size 64`",
        "llama",
        ("--lora-backend", "torch_native", "--max-loras-per-batch", "3", "--page-size", "64"),
        adapters=2,
        since="0.5.23",
    ),
    "window": Case("sliding windows (Gemma 3)", "gemma3_text", (), ("gemma3_causal",)),
}
COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
}
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
ADAPTED = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers that adapters change."""


def make(model_type: str, folder: Path) -> Path:
    """Make a model of this type. Its texts repeat themselves: lookups find drafts."""
    if model_type == "llama":
        return TARGET
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **CONFIGS[model_type]})
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
        model.lm_head.weight.mul_(8.0)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, folder)
    return folder


def make_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Make a LoRA adapter of random weights for a model."""
    import torch
    from safetensors.torch import load_file, save_file

    made, weights = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith(ADAPTED):
            rows, columns = weight.shape
            a, b = (torch.randn(n, LORA["r"], generator=made) for n in (columns, rows))
            weights[f"base_model.model.{layer}.lora_A.weight"] = a.T.contiguous() * columns**-0.5
            weights[f"base_model.model.{layer}.lora_B.weight"] = b * 0.3
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {**LORA, "target_modules": ADAPTED, "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
