"""Heads that others' code made, written and ran give the same logits here.

The others are SpecForge 0.2 and speculators 0.9. With their many requirements they would replace
what is here, so they are installed beside it:

    pip install --no-deps --target DIR -r requirements/heads-references.txt
    PYTHONPATH=src:DIR pytest tests/drafters/heads/test_references.py
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file

from outrider.drafters.heads import load_head
from outrider.drafters.heads.blocks import BlockModel
from outrider.drafters.heads.layers import HeadCache, SequencePass

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "vocab_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "attention_bias": False,
}  # fmt: skip
ROWS, LAYERS = 12, 6
NEAR = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def eager():
    """Their norms are compiled, which takes minutes."""
    before = torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    yield
    del before
    torch.compiler.set_stance("default")


@pytest.fixture
def theirs(monkeypatch):
    """Import a module of speculators; what only their training needs is stubbed."""
    if find_spec("speculators") is None:
        pytest.skip("needs speculators")
    for name in ("datasets", "hs_connectors"):
        if find_spec(name) is None:
            stub = MagicMock()
            stub.__spec__, stub.__path__ = ModuleSpec(name, None), []
            monkeypatch.setitem(sys.modules, name, stub)
    return import_module


def shaken(model):
    """Return the model with weights that tell all its tensors from each other."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + ("norm" in name))
    return model.eval().requires_grad_(False)


def written(model, config, folder, drop=("embed_tokens.weight",)):
    """Save a model of theirs; return our head of it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, default=str))
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if k not in drop}
    save_file(weights, folder / "model.safetensors")
    embedding = model.embed_tokens.weight.detach()
    return load_head(folder, embedding, LAYERS, lm_head=model.lm_head.weight.detach())


def run(head, tokens, states):
    """Return our logits after all pairs, and after one more of the head's own, [n, V] and [1, V].

    The further pair is that of the last token but one, whose state is the head's own.
    """
    rows = len(tokens)
    x, positions = head.reduce(states), torch.arange(1, rows + 1)
    cache = HeadCache()
    attend = SequencePass([cache], [rows])
    g = head(tokens, x, positions, attend)
    attend.keep()
    cache.truncate(rows - 1)
    more = head(tokens[-1:], g[-2:-1], positions[-1:], SequencePass([cache], [1]))
    return head.logits(g), head.logits(more)


def seen_by(model, call):
    """Return what the model's lm_head gave while `call` ran."""
    found = []
    hook = model.lm_head.register_forward_hook(lambda m, i, output: found.append(output))
    call()
    hook.remove()
    return found


EAGLE3 = [
    {}, {"fc_norm": True}, {"norm_before_fc": True}, {"norm_output": True},
    {"norm_before_residual": True}, {"fc_norm": True, "norm_output": True},
]  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("norms", EAGLE3, ids=lambda norms: "+".join(norms) or "plain")
@torch.no_grad()
def test_eagle3_of_speculators(norms, model_type, theirs, tmp_path):
    """Two steps: the second reads the head's own state."""
    core = theirs("speculators.models.eagle3.core")
    layer = {**SHAPE, "model_type": model_type, "num_hidden_layers": 1}
    own = {"speculators_model_type": "eagle3", "draft_vocab_size": 24, **norms,
           "eagle_aux_hidden_state_layer_ids": [2, 3, 5]}  # fmt: skip
    config = core.Eagle3SpeculatorConfig(**own, transformer_layer_config=layer)
    config.transformer_layer_config._attn_implementation = "eager"
    model = shaken(core.Eagle3DraftModel(config))
    model.d2t.copy_(torch.arange(24) // 2)
    head = written(model, {**own, "transformer_layer_config": layer}, tmp_path / "head")
    tokens, states = torch.arange(ROWS) * 3 % 40, torch.randn(ROWS, 3, 32)
    one, two = seen_by(model, lambda: model(
        hidden_states=states.flatten(1)[None], input_ids=tokens[None],
        document_ids=torch.zeros(1, ROWS, dtype=torch.int64), ttt_steps=2,
    ))  # fmt: skip
    ids = torch.arange(24) + torch.arange(24) // 2
    found, more = run(head, tokens, states)
    torch.testing.assert_close(found[:, ids], one[0], **NEAR)
    # their second step's row i has the token after i, beside the state of i
    torch.testing.assert_close(more[:, ids], two[0, -2:-1], **NEAR)


@pytest.mark.parametrize("fc_norm", [False, True])
@torch.no_grad()
def test_eagle3_of_specforge(fc_norm, tmp_path):
    if find_spec("specforge") is None:
        pytest.skip("needs specforge")
    module = import_module("specforge.modeling.draft.llama3_eagle")
    from transformers import LlamaConfig

    own = {**SHAPE, "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": 24}
    config = LlamaConfig(**own, fc_norm=fc_norm, pad_token_id=0)
    config.rope_scaling = None  # their rotary embedding wants Transformers 4's names
    config.rope_theta = 10_000.0
    config.pretraining_tp = 1
    model = shaken(module.LlamaForCausalLMEagle3(config))
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    said = {**own, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": ids}
    head = written(model, {**said, "fc_norm": fc_norm}, tmp_path / "head")
    tokens, states = torch.arange(ROWS) * 3 % 40, torch.randn(ROWS, 3, 32)
    normed = model(states.flatten(1)[None], model.embed_tokens(tokens)[None])
    found, _ = run(head, tokens, states)
    torch.testing.assert_close(found[:, :24], model.lm_head(normed)[0], **NEAR)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text"])
@torch.no_grad()
def test_mtp_of_speculators(model_type, theirs, tmp_path):
    core = theirs("speculators.models.mtp.core")
    layer = {**SHAPE, "model_type": model_type, "num_hidden_layers": 1}
    if model_type == "qwen3_5_text":
        layer["layer_types"] = ["full_attention"]
        layer["rope_parameters"] = {**SHAPE["rope_parameters"], "partial_rotary_factor": 0.5}
    method = {"proposal_type": "greedy", "speculative_tokens": 2}
    verifier = {"name_or_path": None, "architectures": []}
    own = {"speculators_model_type": "mtp", "speculators_config": {
        "algorithm": "mtp", "default_proposal_method": "greedy", "proposal_methods": [method],
        "verifier": verifier}}  # fmt: skip
    config = core.MTPSpeculatorConfig(**own, transformer_layer_config=layer)
    config.transformer_layer_config._attn_implementation = "eager"
    model = shaken(core.MTPDraftModel(config))
    drop = ("embed_tokens.weight", "lm_head.weight")
    said = {**own, "transformer_layer_config": layer}
    head = written(model, said, tmp_path / "head", drop)
    tokens, states = torch.arange(ROWS) * 3 % 40, torch.randn(ROWS, 1, 32)
    (one, *_), *_ = model(input_ids=tokens[None], hidden_states=states[:, 0][None])
    count = one.shape[1]
    found, _ = run(head, tokens[1 : 1 + count], states[:count])
    torch.testing.assert_close(found, one[0], **NEAR)


BLOCK = {
    **SHAPE,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
}


def block_logits(head, tokens, states, start):
    model = BlockModel(head)
    sequence = model.open(None)
    sequence.tell(0, head.reduce(states[:start]))
    model.extend([(sequence, tokens[: start + 1].tolist())])
    return head.logits(sequence.block.states)


@torch.no_grad()
def test_dflash_of_specforge(tmp_path):
    if find_spec("specforge") is None:
        pytest.skip("needs specforge")
    module = import_module("specforge.modeling.draft.dflash")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    own = {"block_size": 5, "num_target_layers": LAYERS,
           "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 2, 4]}}  # fmt: skip
    config = Qwen3Config(**BLOCK, **own)
    config._attn_implementation = "eager"
    model = shaken(module.DFlashDraftModel(config))
    model.embed_tokens, model.lm_head = torch.nn.Embedding(40, 32), torch.nn.Linear(32, 40, False)
    drop = ("embed_tokens.weight", "lm_head.weight")
    said = {**BLOCK, **own, "architectures": ["DFlashDraftModel"]}
    head = written(model, said, tmp_path / "head", drop)
    tokens, states = torch.arange(ROWS) * 3 % 40, torch.randn(ROWS, 3, 32)
    block = torch.tensor([[int(tokens[7]), 39, 39, 39, 39]])
    out = model(position_ids=torch.arange(12)[None], noise_embedding=model.embed_tokens(block),
                target_hidden=states[:7].flatten(1)[None])  # fmt: skip
    found = block_logits(head, tokens, states, 7)
    torch.testing.assert_close(found, model.lm_head(out)[0, 1:], **NEAR)


@torch.no_grad()
def test_dflash_of_speculators(theirs, tmp_path):
    core = theirs("speculators.models.dflash.core")
    own = {"speculators_model_type": "dflash", "draft_vocab_size": 24, "block_size": 5,
           "aux_hidden_state_layer_ids": [2, 3, 5], "mask_token_id": 39}  # fmt: skip
    config = core.DFlashSpeculatorConfig(**own, transformer_layer_config=BLOCK)
    config.transformer_layer_config._attn_implementation = "eager"
    model = shaken(core.DFlashDraftModel(config))
    model.d2t.copy_(torch.arange(24) // 2)
    head = written(model, {**own, "transformer_layer_config": BLOCK}, tmp_path / "head")
    tokens, states = torch.arange(ROWS) * 3 % 40, torch.randn(ROWS, 3, 32)
    mask = torch.zeros(1, ROWS)
    mask[0, 6] = 1  # the only place where a block may begin
    (logits,) = seen_by(model, lambda: model._backbone_forward(
        states.flatten(1)[None], tokens[None], mask, torch.randn(1, ROWS, 32),
        torch.zeros(1, ROWS, dtype=torch.int64), max_anchors=1,
    ))  # fmt: skip
    found = block_logits(head, tokens, states, 6)
    ids = torch.arange(24) + torch.arange(24) // 2
    torch.testing.assert_close(found[:, ids], logits[0, 1:5], **NEAR)
