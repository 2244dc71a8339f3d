"""A model's files that are damaged: each is refused in one line, whichever library reads it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.clients.models import load_model, load_tokenizer
from outrider.errors import Unsupported


@pytest.fixture
def copied(model_dir, tmp_path):
    shutil.copytree(model_dir("tiny-target"), tmp_path / "model")
    return tmp_path / "model"


def change_config(folder, **change):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


BROKEN = {
    "truncated weights": truncate,
    "no header": lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100),
    "a size that is text": lambda folder: change_config(folder, hidden_size="big"),
    "a list of sizes": lambda folder: change_config(folder, num_hidden_layers=[4]),
    "no sizes": lambda folder: change_config(folder, num_attention_heads=0),
    "not an object": lambda folder: (folder / "config.json").write_text("[1]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_models_are_refused_in_one_line(copied, name):
    BROKEN[name](copied)
    with pytest.raises(Unsupported, match="no model at") as refused:
        load_model(str(copied), "auto")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 5}', '{"version": "1.0"}'])
def test_broken_tokenizers_are_refused_in_one_line(copied, text):
    (copied / "tokenizer.json").write_text(text)
    with pytest.raises(Unsupported, match="no tokenizer at") as refused:
        load_tokenizer(str(copied))
    assert "\n" not in str(refused.value)


CODE = "raise SystemExit('code of a checkpoint was run')"
MAP = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


def test_no_code_of_a_checkpoint_is_run_or_asked_about(copied, monkeypatch):
    """Transformers asks at the terminal otherwise, and `yes` answers."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (copied / "evil.py").write_text(CODE)
    change_config(copied, model_type="evil", auto_map=MAP)
    with pytest.raises(Unsupported, match="no model at") as refused:
        load_model(str(copied), "auto")
    assert "\n" not in str(refused.value)
    tokenizer = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "Evil"}
    (copied / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(Unsupported, match="no tokenizer at"):
        load_tokenizer(str(copied))


def test_pickles_are_not_read(copied):
    weights = load_model(str(copied), "auto").state_dict()
    torch.save(weights, copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(Unsupported, match=r"no model at .* other forms can run code.*; convert it"):
        load_model(str(copied), "auto")


def test_a_model_keeps_the_name_that_it_was_asked_by(copied):
    assert load_model(str(copied), "auto").config.name_or_path == str(copied)


def test_weights_that_are_missing_are_not_made_up(copied):
    """Transformers fills them with random numbers."""
    weights = load_file(copied / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Unsupported, match=r"lacks model\.layers\.3\.mlp\.up_proj\.weight"):
        load_model(str(copied), "auto")


@pytest.mark.parametrize(
    "change",
    [
        {"intermediate_size": 60_000},  # less than what is refused without Transformers
        {"head_dim": 60_000},
        {"model_type": "gpt2", "max_position_embeddings": 10**7},
        {"model_type": "mixtral", "num_local_experts": 60_000},
    ],
)
def test_models_that_are_larger_than_their_weights_are_not_built(copied, change, monkeypatch):
    change_config(copied, **change)
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded")
    )
    with pytest.raises(Unsupported, match=r"of a model of .* numbers"):
        load_model(str(copied), "auto")


def test_models_of_endless_parts_are_not_built(copied, monkeypatch):
    monkeypatch.setattr("outrider.engines.transformers.loading._MOST_MODULES", 30)
    with pytest.raises(Unsupported, match="a model of more than 30 parts"):
        load_model(str(copied), "auto")


def test_a_tokenizer_with_a_config_that_fills_the_memory(copied):
    """Transformers reads config.json for a tokenizer too, and makes a list of all labels."""
    change_config(copied, num_labels=10**8)
    with pytest.raises(Unsupported, match="num_labels=100,000,000"):
        load_tokenizer(str(copied))


def test_a_name_of_the_hub_is_fetched_as_data(copied, monkeypatch):
    asked = []

    def download(name, allow_patterns, ignore_patterns=()):
        asked.append((name, allow_patterns))
        return str(copied)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_model("some/model", "auto").config.name_or_path == "some/model"
    load_tokenizer("some/model")
    patterns = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
    documents = ("some/model", patterns)
    assert asked == [documents, ("some/model", ["model.safetensors"]), documents]


@pytest.mark.parametrize("name", ["some/model", "no such name", "a/../b"])
def test_a_name_that_the_hub_does_not_have(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Unsupported, match="no model at") as refused:
        load_model(name, "auto")
    assert "\n" not in str(refused.value)
