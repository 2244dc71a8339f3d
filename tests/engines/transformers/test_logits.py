"""Prefill, decode and verify logits against vanilla Transformers, over architectures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer

import outrider
from outrider.engines.transformers import Runner

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from logits import TEXT, compare, ours, vanilla

PHASES = ["prefill", "decode", "verify"]
SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GQA = SMALL | {"num_key_value_heads": 2}
ARCHITECTURES = {
    "Llama": GQA,
    "Qwen2": GQA,
    "Qwen3": GQA | {"head_dim": 32},
    "Mistral": GQA | {"sliding_window": 12},
    "Gemma2": GQA | {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16},
    "Phi3": GQA | {"pad_token_id": 0},
    "Olmo2": GQA,
    "GPTNeoX": SMALL,
    "GPT2": {"vocab_size": 160, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "Cohere": GQA,
}


def make(name: str):
    """Return a random model whose opinions are strong enough to compare."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name])
    # sdpa has no soft-capped scores
    config._attn_implementation = "eager" if name == "Gemma2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    return model.eval()


@pytest.mark.parametrize("exactness", ["lossless", "bitwise"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, exactness):
    model = make(name)
    ids = torch.randint(3, 160, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    for phase in PHASES:
        expected = vanilla(model, ids, 20, phase)
        found = ours(model, ids, 20, phase, exactness)
        result = compare(found, expected)
        assert result["argmax_equal"] == result["positions"] == 28, phase
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("exactness", ["lossless", "bitwise"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["tiny-target", "tiny-draft"])
def test_trained_models(load, tokenizer, name, phase, exactness):
    """Llama and GPT-2, as they ship with the package: every argmax, in float32."""
    check(load(name), tokenizer(name), phase, exactness)


@pytest.mark.models
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["stories260k", "stories15m"])
def test_real_models(load, tokenizer, name, phase):
    check(load(name), tokenizer(name), phase, "lossless")


def check(model, tokenizer, phase, exactness):
    ids = tokenizer.encode(TEXT)[:200]
    start = len(ids) - 60
    expected = vanilla(model, ids, start, phase)
    result = compare(ours(model, ids, start, phase, exactness), expected)
    assert result["argmax_equal"] == result["positions"] == 60
    assert result["max_abs_difference"] < 1e-3


def test_twin_a_wrong_past_is_seen(load, tokenizer):
    """The comparison can fail: with one cached token exchanged, logits differ."""
    model, tok = load("tiny-target"), tokenizer("tiny-target")
    ids = tok.encode(TEXT)[:120]
    wrong = [*ids[:100], ids[101], ids[100], *ids[102:]]
    expected = vanilla(model, ids, 110, "decode")
    assert compare(ours(model, wrong, 110, "decode"), expected)["max_abs_difference"] > 0.1


def test_models_that_do_not_fit_are_refused():
    stablelm = transformers.StableLmConfig(**GQA)  # attention of its own, not the interface's
    with pytest.raises(outrider.Unsupported, match="no AttentionInterface"):
        Runner(transformers.AutoModelForCausalLM.from_config(stablelm).eval())
    t5 = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32
    )
    with pytest.raises(outrider.Unsupported, match="decoder-only"):
        Runner(transformers.AutoModelForSeq2SeqLM.from_config(t5).eval())
    mamba = transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4
    )
    with pytest.raises(outrider.Unsupported, match="decoder-only"):
        Runner(transformers.AutoModelForCausalLM.from_config(mamba).eval())


def test_tokenizer_loads_from_the_package():
    path = Path(outrider.__file__).parent / "assets" / "tiny"
    for name in ("target", "draft"):
        assert AutoTokenizer.from_pretrained(path / name).decode([290]) != ""
