"""How `train_head.py` writes a head: in the formats that SGLang and speculators read."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from head_losses import UNROLLED, AnyHead
from safetensors.torch import save_file
from transformers import PreTrainedModel

from outrider.drafters.heads import DFlashHead, Eagle3Head


def save(
    head: AnyHead,
    target: PreTrainedModel,
    args: argparse.Namespace,
    losses: list[float],
    out: Path,
) -> None:
    """Write the head. EAGLE-3 and DFlash are written in both formats, speculators' beside SGLang's.

    An MTP head with a directory of its own has no format in SGLang: it is written as speculators
    does.
    """
    shared = {"embed_tokens.weight"} | ({"lm_head.weight"} if args.kind != "eagle3" else set())
    weights = {n: w.detach() for n, w in head.state_dict().items() if n not in shared}
    if args.kind != "eagle3":
        weights.pop("d2t", None)
    small = {n: w if n == "d2t" else w.half().contiguous() for n, w in weights.items()}
    if args.kind == "eagle3":
        small["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        small["t2d"][torch.arange(len(head.d2t)) + head.d2t] = True
    for folder, config in configs(head, target, args, out).items():
        folder.mkdir(parents=True, exist_ok=True)
        named = {rename(n, args.kind, config): w for n, w in small.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    size = sum(w.numel() for n, w in weights.items() if n != "d2t")
    title = {"eagle3": "EAGLE-3", "mtp": "MTP", "dflash": "DFlash"}[args.kind]
    (out / "training.json").write_text(json.dumps(progress(args, losses), indent=2) + "\n")
    (out / "README.md").write_text(
        f"# {title} head for {args.model.name}\n\n{size:,} parameters, reads layers "
        f"{list(head.hidden_layers)} (as Transformers counts). Made by `scripts/train_head.py` in "
        f"{len(losses):,} steps; loss {losses[-1] if losses else math.nan:.3f}. For tests and "
        "small models.\n"
    )


def progress(args: argparse.Namespace, losses: list[float], points: int = 40) -> dict[str, Any]:
    """Return how far training has come, and the loss against the tokens read.

    Each point is the mean over the steps since the one before it.
    """
    size = max(1, math.ceil(len(losses) / points))
    parts = [losses[i : i + size] for i in range(0, len(losses), size)]
    tokens, curve, done = args.batch * args.length, [], 0
    for part in parts:
        done += len(part)
        curve.append({"tokens": done * tokens, "loss": round(sum(part) / len(part), 4)})
    names = "kind steps batch length rate seed draft_vocab fc_norm intermediate"
    return {
        "model": args.model.name,
        **{name: getattr(args, name) for name in names.split()},
        "done": len(losses),
        "tokens": len(losses) * tokens,
        "curve": curve,
    }


def kind_shape(args: argparse.Namespace) -> dict[str, Any]:
    """Return in what the head's config.json differs from the target's."""
    found: dict[str, Any] = {
        "model_type": "llama" if args.kind == "eagle3" else "qwen3",
        "num_hidden_layers": args.layers,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
    }
    if args.intermediate:
        found["intermediate_size"] = args.intermediate
    if args.draft_vocab:
        found["draft_vocab_size"] = args.draft_vocab
    return found


def rename(name: str, kind: str, config: dict[str, Any]) -> str:
    """Return the name of a tensor in the format of this config.json."""
    if kind == "eagle3" and "speculators_model_type" in config:
        return name.replace("midlayer.", "layers.0.")
    if kind != "mtp":
        return name
    theirs = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
              "norm": "final_layernorm"}  # fmt: skip
    first, _, rest = name.partition(".")
    return f"mtp_layers.0.{rest if first == 'layer' else f'{theirs[first]}.{rest}'}"


def configs(
    head: AnyHead, target: PreTrainedModel, args: argparse.Namespace, out: Path
) -> dict[Path, dict[str, Any]]:
    """Return the config.json of each directory to write."""
    kept = (
        "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act "
        "rms_norm_eps rope_parameters max_position_embeddings vocab_size attention_bias model_type "
        "num_hidden_layers"
    )
    whole = {**target.config.to_dict(), **kind_shape(args)}
    shape = {name: whole[name] for name in kept.split() if name in whole}
    method = {"proposal_type": "greedy", "speculative_tokens": UNROLLED}
    sglang: dict[str, Any] = {**shape, "torch_dtype": "float16", "tie_word_embeddings": False}
    sglang["rope_theta"] = head.config.theta  # SGLang 0.5.11 looks here
    speculators: dict[str, Any] = {
        "speculators_model_type": args.kind, "speculators_version": "0.9.0",
        "transformer_layer_config": shape,
    }  # fmt: skip
    ids = list(head.hidden_layers)
    if isinstance(head, Eagle3Head):
        nested = {"use_aux_hidden_state": True,
                  "eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids]}  # fmt: skip
        own: dict[str, Any] = {"draft_vocab_size": head.config.draft_vocab_size}
        if head.norms.fc_norm:
            own["fc_norm"] = True
        sglang |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": nested,
            **own,
        }
        speculators |= {"architectures": ["Eagle3Speculator"], **own,
                        "eagle_aux_hidden_state_layer_ids": ids}  # fmt: skip
    elif isinstance(head, DFlashHead):
        block, mask = head.block.size, head.block.mask_token_id
        nested = {"mask_token_id": mask, "target_layer_ids": [i - 1 for i in ids]}
        sglang |= {"architectures": ["DFlashDraftModel"], "block_size": block,
                   "num_target_layers": target.config.num_hidden_layers,
                   "dflash_config": nested}  # fmt: skip
        speculators |= {"architectures": ["DFlashSpeculator"], "block_size": block,
                        "mask_token_id": mask, "aux_hidden_state_layer_ids": ids,
                        "draft_vocab_size": head.config.vocab_size}  # fmt: skip
        method["speculative_tokens"] = block - 1
    else:
        speculators |= {"architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1}
    speculators["speculators_config"] = {
        "algorithm": args.kind, "default_proposal_method": "greedy", "proposal_methods": [method],
        "verifier": {"name_or_path": args.model.name,
                     "architectures": target.config.architectures},
    }  # fmt: skip
    if args.kind == "mtp":
        return {out: speculators}
    return {out: sglang, out / "speculators": speculators}
