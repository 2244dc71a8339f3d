"""What a draft costs and how far it reads; models that hosts refuse."""

from __future__ import annotations

import pytest
from paper import QWEN_1_5B

from outrider.doctor.model import read_model
from outrider.doctor.pair import Cost, Plan, check_attention, check_context, check_cost, check_kind


def test_the_equation():
    """speed-up = tokens per step / (step time / decode time), with numbers that are plain."""
    cost = Cost(draft=0.25, verify=1.0, drafts=2)
    assert cost.step == 1.5
    assert cost.speedup(0.5) == pytest.approx((1 + 0.5 + 0.25) / 1.5)
    # 1 + a + a^2 = 1.5
    assert cost.break_even == pytest.approx((3**0.5 - 1) / 2)
    assert cost.speedup(cost.break_even) == pytest.approx(1)
    assert Cost(draft=1.0, verify=1.0, drafts=4).break_even is None
    # one draft of cost c is worth it above c
    assert Cost(draft=0.3, verify=1.0, drafts=1).break_even == pytest.approx(0.3)


def test_a_draft_above_a_quarter_is_warned_of(qwen):
    big, small = qwen
    cost = Cost.of(big, small, Plan(), None)
    assert cost.draft == pytest.approx(494_032_768 / 1_543_714_304)
    (finding,) = check_cost(big, small, Plan(), on_cpu=True)
    assert finding.level == "warning"
    assert "1:3.1, above 1:4" in finding.what
    assert "1 + 4 x 0.32 = 2.28 passes" in finding.why
    assert f"acceptance of {cost.break_even:.2f}" in finding.why
    assert "draft_bits: 4" in finding.fix
    # few bits are for CPU
    (finding,) = check_cost(big, small, Plan(), on_cpu=False)
    assert "draft_bits" not in finding.fix


def test_few_bits_make_it_cheap_on_cpu_and_stop_a_gpu(qwen):
    plan = Plan(draft_bits=4)
    (finding,) = check_cost(*qwen, plan, on_cpu=True)
    assert (finding.level, "in 4 bits" in finding.what) == ("ok", True)
    levels = [finding.level for finding in check_cost(*qwen, plan, on_cpu=False)]
    assert levels == ["problem", "ok"]


def test_a_draft_as_large_as_its_target_never_pays(qwen):
    big, _ = qwen
    (finding,) = check_cost(big, big, Plan(), on_cpu=False)
    assert finding.level == "warning"
    assert "slower than plain decoding" in finding.why


def test_with_experts_a_wider_pass_reads_more(make):
    config = QWEN_1_5B | {"num_hidden_layers": 1, "num_experts": 16, "num_experts_per_tok": 2}
    tensors = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": (100, 100) for i in range(16)}
    model = read_model(str(make("moe", config, tensors)))
    plan = Plan(requests=1, drafts=3)
    cost = Cost.of(model, model, plan, None)
    assert cost.verify == pytest.approx((1 - (14 / 16) ** 4) / (2 / 16))
    assert "2 of 16 experts" in list(check_cost(model, model, plan, on_cpu=False))[-1].what
    assert Cost.of(model, model, Plan(requests=1, drafts=24, weighed=3), None) == cost
    # a large batch visits them all anyway
    assert Cost.of(model, model, Plan(requests=200), None).verify == pytest.approx(1)


def test_without_weights_the_cost_is_not_known(qwen, make):
    path = make("bare", QWEN_1_5B)
    (path / "model.safetensors").unlink()
    (finding,) = check_cost(qwen[0], read_model(str(path)), Plan(), on_cpu=True)
    assert finding.level == "note"


@pytest.mark.parametrize(
    ("reads", "wanted", "in_sglang", "level"),
    [
        (32768, None, True, "ok"),
        (8192, None, True, "problem"),  # SGLang stops
        (8192, None, False, "warning"),
        (8192, 8192, True, "ok"),
        (8192, 8193, True, "problem"),
        (32768, 32769, False, "problem"),  # beyond the target itself
    ],
)
def test_the_context_of_a_draft(make, reads, wanted, in_sglang, level):
    target = read_model(str(make("target", QWEN_1_5B, {})))
    draft = read_model(str(make("draft", QWEN_1_5B | {"max_position_embeddings": reads}, {})))
    (finding,) = check_context(target, draft, Plan(context=wanted), in_sglang)
    assert finding.level == level
    if level != "ok":
        assert finding.fix


@pytest.mark.parametrize(
    ("more", "level", "said"),
    [
        ({}, "ok", "bfloat16, 2.88 GiB"),
        ({"is_encoder_decoder": True}, "problem", "an encoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "problem", "linear_att"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "ok", "GiB"),
        ({"mamba_d_state": 16}, "problem", "state-space layers"),
        ({"architectures": ["Gemma4ForCausalLM"]}, "warning", "sliding-window"),
        ({"architectures": ["GptOssForCausalLM"]}, "problem", "attention sinks"),
        ({"attention_chunk_size": 8192}, "problem", "chunked_attention layers"),  # Llama 4
        ({"vision_config": {}}, "warning", "more than text"),
        ({"kv_lora_rank": 512}, "warning", "MLA"),
    ],
)
def test_models_that_hosts_refuse(make, more, level, said):
    model = read_model(str(make("model", QWEN_1_5B | more)))
    (finding,) = check_kind(model)
    assert finding.level == level
    assert said in finding.what


@pytest.mark.parametrize(
    ("architecture", "in_sglang", "levels"),
    [
        ("Qwen2ForCausalLM", False, []),
        ("FalconForCausalLM", False, ["problem"]),
        ("FalconForCausalLM", True, ["warning"]),  # SGLang has a class of its own
        ("NotInTransformers", False, []),
    ],
)
def test_attention_that_cannot_be_replaced(make, architecture, in_sglang, levels):
    model = read_model(str(make("model", QWEN_1_5B | {"architectures": [architecture]})))
    assert [finding.level for finding in check_attention(model, in_sglang)] == levels
