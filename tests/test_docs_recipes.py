"""docs/recipes.md says what Transformers models of each family do: run, in small, with drafts."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

import outrider
from outrider.doctor.model import read_model
from outrider.doctor.pair import check_attention, check_kind
from pages import ROOT

SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Mistral": {"sliding_window": 12},
    "Gemma2": {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16},
    "Phi3": {"pad_token_id": 0},
    "Mixtral": LOCAL_EXPERTS,
    "Qwen2Moe": SHARED,
    "Qwen3Moe": EXPERTS | {"head_dim": 16},
    "Olmoe": EXPERTS,
    "GptOss": LOCAL_EXPERTS | {"head_dim": 16, "sliding_window": 12},
    "DeepseekV2": MLA,
    "DeepseekV3": MLA,
    "Qwen3Next": SHARED | {"head_dim": 16, "num_hidden_layers": 4},
    "FalconH1": {},
    "Mamba": {},
    "Llama4Text": {"num_local_experts": 2, "head_dim": 16, "intermediate_size_mlp": 96},
}
PAGE = (ROOT / "docs" / "recipes.md").read_text()
ROWS = dict(re.findall(r"^\| (\w+) \| ((?:same|refused)[^\n]*) \|$", PAGE, re.MULTILINE))
ANSWER = 12

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.partition(".")[0]) < 5, reason="the page is of Transformers 5"
)


def make(name: str):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | FAMILIES[name])
    if name == "Gemma2":
        config._attn_implementation = "eager"  # sdpa has no soft-capped scores
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    return model.eval()


def outcome(model, prompt: list[int], exactness: str) -> str:
    """Return what the page should say."""
    sampling = {"max_tokens": ANSWER, "ignore_eos": True}
    try:
        done = outrider.generate(
            model, [prompt], drafter="ngram", sampling=sampling, exactness=exactness
        )
    except outrider.Unsupported:
        return "refused"
    plain = model.generate(
        torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None
    )
    same = done.outputs[0] == plain[0, len(prompt) :].tolist()
    return "same answers" if same else "other answers"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_does_what_the_page_says(name):
    model = make(name)
    prompt = torch.randint(3, 160, (20,), generator=torch.Generator().manual_seed(1)).tolist() * 2
    found = (outcome(model, prompt, exactness) for exactness in ("lossless", "bitwise"))
    assert " | ".join(found) == ROWS[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_doctor_says_the_same(name, tmp_path):
    """From config.json alone: it names as a problem what the host refuses, and nothing else."""
    config = getattr(transformers, f"{name}Config")(**SMALL | FAMILIES[name])
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(tmp_path)
    model = read_model(str(tmp_path))
    found = [*check_kind(model), *check_attention(model, in_sglang=False)]
    is_refused = any(finding.level == "problem" for finding in found)
    assert is_refused == ROWS[name].startswith("refused"), found


def test_every_row_of_the_page_is_run():
    assert ROWS.keys() == FAMILIES.keys()
