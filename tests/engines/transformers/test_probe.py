"""A model is served if our forward is its own, whatever its class is called, and else refused."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from adversaries import Adversary
from tiny_models import LONGROPE, SMALL, VISION, VOCAB, built, ids, plain, tiny

import outrider
from outrider.core import chain
from outrider.engines.transformers import Runner, probe


def moshi(**config):
    from transformers.models.moshi import MoshiConfig, MoshiForCausalLM

    small = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
    return built(MoshiForCausalLM, MoshiConfig(**small, ffn_dim=48, **config))


def paligemma():
    text = {"model_type": "gemma", "head_dim": 8, **SMALL}
    config = transformers.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", **VISION},
        text_config=text,
        image_token_index=VOCAB - 1,
        projection_dim=32,
        hidden_size=32,
        vocab_size=VOCAB,
    )
    return built(transformers.PaliGemmaForConditionalGeneration, config)


def encoder():
    config = transformers.BertConfig(**{**SMALL, "pad_token_id": 0}, is_decoder=False)
    return built(transformers.BertLMHeadModel, config)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DIFFERENT = {
    "two attentions in a layer": (
        lambda: tiny("DiffLlama"),
        "more than once in layer 0|no AttentionInterface",
    ),
    "a mask made of the tokens": (lambda: tiny("Doge"), "layer 0: .* differ"),
    "a window in the mask": (
        lambda: tiny("Phimoe", **EXPERTS, sliding_window=8),
        "layer 0: its mask hides position 120 to 128",
    ),
    "a long window in the mask": (
        lambda: tiny("Phimoe", **EXPERTS, max_position_embeddings=8192, sliding_window=4096),
        "layer 0: its mask hides position 0 to 4096",
    ),
    "a window in a mask of its own": (lambda: moshi(sliding_window=8), "layer 0"),
    "a prompt that sees all of itself": (paligemma, "layer 0: .* prompt"),
    "an encoder": (encoder, "layer 0"),
}


@pytest.mark.parametrize("exactness", ["lossless", "bitwise"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_forward_that_is_not_ours_is_refused(name, exactness):
    make, said = DIFFERENT[name]
    if exactness == "bitwise" and "window in the mask" in name:
        said = "rows beside it"  # mixtures are refused there anyhow
    with pytest.raises(outrider.Unsupported, match=said):
        outrider.generate(make(), [ids(5)], exactness=exactness)


SERVED = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "Gemma2": {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 2.0},
    "Phimoe": EXPERTS | {"sliding_window": None},
    "GPTNeoX": {},
    "Mixtral": EXPERTS,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SERVED)
def test_a_forward_that_is_ours_is_served(name, dtype):
    model = tiny(name, **SERVED[name]).to(dtype)
    prompts = [ids(5), ids(21, 2), ids(40, 3)]
    found = outrider.generate(model, prompts, drafter=model, sampling={"max_tokens": 24})
    assert found.stats.accept_length > 1.5
    if dtype == torch.float32:
        assert found.outputs == plain(model, prompts, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_is_one_key_short_is_found(dtype, monkeypatch):
    """The probe sees a fault of one key in a hundred, in half precision too."""
    from outrider.engines.transformers.passes import Pass

    attend = Pass.attend

    def short(self, layer, q, k, v, scale, window, softcap):
        return attend(self, layer, q, k, v, scale, window and window - 1, softcap)

    monkeypatch.setattr(Pass, "attend", short)
    with pytest.raises(outrider.Unsupported, match="layer 0"):
        outrider.generate(tiny("Mistral", sliding_window=8).to(dtype), [ids(5)])


def test_a_model_is_compared_once(monkeypatch):
    model, calls = tiny("Llama"), []
    compare = probe._check_values
    monkeypatch.setattr(probe, "_check_values", lambda runner: calls.append(compare(runner)))
    for _ in range(2):
        outrider.generate(model, [ids(5)], sampling={"max_tokens": 2})
    assert len(calls) == 1
    model.to(torch.bfloat16)
    outrider.generate(model, [ids(5)], sampling={"max_tokens": 2})
    assert len(calls) == 2


def longrope(name: str, seed: int = 0):
    more = {"original_max_position_embeddings": 32} if name == "Phi3" else {}
    return tiny(name, seed, rope_parameters=dict(LONGROPE), **more)


@pytest.mark.parametrize("exactness", ["lossless", "bitwise"])
@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_rope_factors_follow_the_request(name, exactness):
    """Across the original length, with drafts, and beside a neighbour beyond it."""
    for seed in range(2):
        model = longrope(name, seed)
        prompts = [ids(8), ids(22 + seed, 2), ids(32, 4), ids(50, 3)]
        expected = plain(model, prompts, 30)
        for drafter, k in (("none", 0), (model, 8)):
            found = outrider.generate(
                model,
                prompts,
                drafter=drafter,
                max_drafts=k,
                sampling={"max_tokens": 30},
                exactness=exactness,
            )
            assert found.outputs == expected
            assert not found.stats.fallbacks


def test_twin_rope_factors_of_the_pass(monkeypatch):
    """The comparison can fail: with factors of the pass, a long neighbour changes the answers."""
    from outrider.engines.transformers.rope import RequestRope

    def whole(self, x, position_ids, *args, **kwargs):
        return self.inner(x, position_ids, *args, **kwargs)

    monkeypatch.setattr(RequestRope, "forward", whole)
    with pytest.raises(outrider.Unsupported, match="layer 0"):
        outrider.generate(longrope("Llama"), [ids(8)])


def test_factors_that_change_with_each_position_are_refused():
    """Dynamic NTK depends on what the model was asked before: plain decoding does, too."""
    model = tiny("Llama", rope_parameters={"rope_type": "dynamic", "factor": 8.0})
    rope = model.model.rotary_emb
    rope.config = copy.deepcopy(rope.config)
    rope.config.max_position_embeddings = 32
    rope.original_max_seq_len = rope.max_seq_len_cached = 32
    runner = Runner(model)
    assert runner.rope_limit == 32
    with pytest.raises(outrider.Unsupported, match="max_tokens to 22 or less"):
        outrider.generate(model, [ids(10)], sampling={"max_tokens": 40})
    prompts = [ids(10), ids(4, 2)]
    found = outrider.generate(model, prompts, drafter=model, sampling={"max_tokens": 20})
    assert found.outputs == plain(model, prompts, 20)


def test_a_head_across_the_original_length():
    """A text that is read again gives a drafter no states twice."""
    model, prompt = longrope("Phi3"), ids(28)
    told = []

    class Reader(Adversary):
        hidden_layers = (1, 3)

        def observe(self, outcomes):
            told.extend(len(outcome.hidden) for outcome in outcomes)

        def draft(self, request, k):
            return chain([self.token() for _ in range(k)])

    found = outrider.generate(model, [prompt], drafter=Reader(VOCAB), sampling={"max_tokens": 16})
    assert [found.outputs[0]] == plain(model, [prompt], 16)
    assert told[0] == 28
    assert sum(told) == 28 + 16 - 1
