"""SGLang's own modules of heads and ours: the same states and logits from the same checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.drafters.heads import load_head
from outrider.drafters.heads.dflash import BlockPass
from outrider.drafters.heads.layers import HeadCache, SequencePass

HERE = Path(__file__).parent
TINY = Path(str(files("outrider"))) / "assets" / "tiny"
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "vocab_size": 64,
    "rope_theta": 10_000.0, "num_hidden_layers": 1, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
ROWS, LAYERS = 9, 6
FIRST = version("sglang") == "0.5.11"
CASES = {
    "eagle3": ("eagle3", {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64,
                          "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}),
    "eagle": ("eagle", {"architectures": ["LlamaForCausalLMEagle"]}),
    "mimo": ("mtp", {"architectures": ["MiMoMTP"], "model_type": "mimo"}),
    "dflash": ("dflash", {"architectures": ["DFlashDraftModel"], "block_size": 5,
                          "num_hidden_layers": 2, "num_target_layers": LAYERS,
                          "dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 2, 4]}}),
}  # fmt: skip
EAGLE3 = CASES["eagle3"][1]
NEWER = {
    name: ("eagle3", {**EAGLE3, **norms})
    for name, norms in {
        "eagle3": {},
        "fc_norm": {"fc_norm": True},
        "norm_before_fc": {"norm_before_fc": True},
        "norm_output": {"norm_output": True},
        "3.1": {"fc_norm": True, "norm_output": True},
    }.items()
}


def tensors(kind, config):
    """Return random weights of a checkpoint, by the names that SGLang reads."""
    size, wide, narrow = 32, 32, 16
    before = {"eagle3": "midlayer.", "eagle": "layers.0.", "mtp": "model.mtp_layers.0."}
    shapes = {}
    for i in range(config.get("num_hidden_layers", 1)):
        at = before.get(kind, f"layers.{i}.")
        read = 2 * size if kind == "eagle3" else size
        shapes |= {f"{at}self_attn.q_proj.weight": (wide, read),
                   f"{at}self_attn.k_proj.weight": (narrow, read),
                   f"{at}self_attn.v_proj.weight": (narrow, read),
                   f"{at}self_attn.o_proj.weight": (size, wide),
                   f"{at}mlp.gate_proj.weight": (48, size), f"{at}mlp.up_proj.weight": (48, size),
                   f"{at}mlp.down_proj.weight": (size, 48),
                   f"{at}post_attention_layernorm.weight": (size,)}  # fmt: skip
        if kind != "eagle":
            shapes[f"{at}input_layernorm.weight"] = (size,)
        if kind == "dflash":
            shapes |= {f"{at}self_attn.{n}_norm.weight": (8,) for n in "qk"}
        if kind == "mtp":
            shapes[f"{at}self_attn.q_proj.bias"] = (wide,)
            shapes |= {f"{at}self_attn.{n}_proj.bias": (narrow,) for n in "kv"}
    at = before.get(kind, "")
    if kind == "eagle3":
        shapes |= {"fc.weight": (size, 3 * size), f"{at}hidden_norm.weight": (size,),
                   "norm.weight": (size,), "lm_head.weight": (64, size)}  # fmt: skip
        if config.get("fc_norm"):
            shapes |= {f"fc_norm.{i}.weight": (size,) for i in range(3)}
        if config.get("norm_before_fc"):
            shapes["input_norm.weight"] = (3 * size,)
    elif kind == "eagle":
        shapes |= {"fc.weight": (size, 2 * size), "fc.bias": (size,)}
    elif kind == "mtp":
        shapes |= {f"{at}token_layernorm.weight": (size,), f"{at}hidden_layernorm.weight": (size,),
                   f"{at}input_proj.weight": (size, 2 * size),
                   f"{at}final_layernorm.weight": (size,)}  # fmt: skip
    else:
        shapes |= {"fc.weight": (size, 3 * size), "hidden_norm.weight": (size,),
                   "norm.weight": (size,)}  # fmt: skip
    embedding = "model.embed_tokens.weight" if kind == "mtp" else "embed_tokens.weight"
    shapes |= {} if kind == "dflash" else {embedding: (64, size)}
    return {n: 0.3 * torch.randn(s) + (len(s) == 1 and "norm" in n) for n, s in shapes.items()}


def inputs(kind, more):
    """Return a case for `head_modules`."""
    config = {**SHAPE, **more}
    layers = 3 if kind in ("eagle3", "dflash") else 1
    tokens, positions = torch.arange(ROWS) * 5 % 64, torch.arange(1, ROWS + 1)
    if kind == "dflash":
        tokens, positions = torch.tensor([7, 63, 63, 63, 63]), ROWS + torch.arange(5)
    embedding = torch.randn(64, 32)
    return {
        "kind": kind, "config": config, "weights": tensors(kind, config), "tokens": tokens,
        "states": torch.randn(ROWS, layers * 32), "positions": positions, "embedding": embedding,
        "embedded": embedding[tokens],
    }  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return all cases, and what SGLang's modules made of them."""
    torch.manual_seed(0)
    cases = {name: inputs(*case) for name, case in (CASES if FIRST else NEWER).items()}
    folder = tmp_path_factory.mktemp("modules")
    torch.save({"target": str(TINY / "target"), "cases": cases}, folder / "in.pt")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE / "site")])
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, HERE / "head_modules.py", folder / "in.pt", folder / "out.pt"],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, **cpu, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return cases, torch.load(folder / "out.pt")


@pytest.mark.parametrize("name", CASES if FIRST else NEWER)
@torch.no_grad()
def test_ours_and_sglangs_agree(name, ran, tmp_path):
    case, theirs = (found[name] for found in ran)
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    save_file(case["weights"], tmp_path / "model.safetensors")
    output, tokens, positions = torch.randn(64, 32), case["tokens"], case["positions"]
    head = load_head(tmp_path, case["embedding"], LAYERS, lm_head=output)
    x = head.reduce(case["states"].view(ROWS, -1, 32))
    if case["kind"] == "dflash":
        cache = HeadCache()
        for i, both in enumerate(head.context(x, torch.arange(ROWS))):
            cache.append(i, *both)
        cache.length = ROWS
        found = head(tokens, positions, BlockPass([cache], len(tokens)))
    else:
        found = head(tokens, x, positions, SequencePass([HeadCache()], [ROWS]))
        torch.testing.assert_close(found, theirs["fed"], atol=1e-5, rtol=1e-5)
    logits = theirs["normed"] @ case["weights"].get("lm_head.weight", output).T
    torch.testing.assert_close(head.logits(found), logits, atol=1e-5, rtol=1e-5)
