"""A model's files that are damaged: each is refused in one line, whichever library reads it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from outrider.engines.models import load_model, load_tokenizer
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
        load_model(str(copied), None)
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
        load_model(str(copied), None)
    assert "\n" not in str(refused.value)
    tokenizer = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "Evil"}
    (copied / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(Unsupported, match="no tokenizer at"):
        load_tokenizer(str(copied))


def test_pickles_are_not_read(copied):
    weights = load_model(str(copied), None).state_dict()
    torch.save(weights, copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(Unsupported, match="no model at"):
        load_model(str(copied), None)
