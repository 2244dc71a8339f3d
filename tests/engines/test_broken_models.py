"""A model's files that are damaged: each is refused in one line, whichever library reads it."""

from __future__ import annotations

import json
import shutil

import pytest

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
