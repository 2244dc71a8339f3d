"""What config.json may say beside weights: sizes that they have, and nothing that runs code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from outrider.checkpoint import checked
from outrider.errors import Unsupported

TINY = Path(__file__).parents[2] / "src" / "outrider" / "assets" / "tiny"


@pytest.fixture
def changed(tmp_path):
    """Return a function that copies the tiny target with another config.json."""

    def change(**more) -> Path:
        path = Path(shutil.copytree(TINY / "target", tmp_path / "model", dirs_exist_ok=True))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | more))
        return path

    return change


def test_the_tiny_models_fit():
    for name in ("target", "draft"):
        found = checked(TINY / name)
        assert found.stored == 2 * found.count  # float16


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 1e9},
        {"hidden_size": 10**9},
        {"vocab_size": 10**12},
        {"vocab_size": 513},
        {"intermediate_size": 10**8},
        {"num_labels": 10**8},
        {"num_experts": 10**8},
        {"max_position_embeddings": 2**63},
        {"vision_config": {"depth": 10**6}},
        {"vision_config": {"inner": [{"num_blocks": 5000}]}},
        {"text_config": {"hidden_size": 10**9}},
    ],
)
def test_sizes_that_the_weights_do_not_have(changed, change):
    with pytest.raises(Unsupported, match="and its weights allow") as refused:
        checked(changed(**change))
    assert "\n" not in str(refused.value)


def test_lengths_are_no_sizes(changed):
    checked(changed(max_position_embeddings=10**7, rope_theta=10**8, sliding_window=10**6))
    checked(changed(max_window_layers=70, unknown=10**10))


@pytest.mark.parametrize(
    "change",
    [
        {"attn_implementation": "some/kernel"},
        {"_attn_implementation": {"": "some/kernel"}},
        {"text_config": {"experts_implementation": "some/kernel"}},
        {"transformers_weights": "../other.safetensors"},
        {"kernel_config": {"RMSNorm": "some/kernel"}},
    ],
)
def test_what_would_run_code_or_read_other_files(changed, change):
    with pytest.raises(Unsupported, match="no code and no other files are loaded"):
        checked(changed(**change))


def test_attention_that_is_in_transformers(changed):
    checked(changed(attn_implementation="sdpa"))


def test_files_that_transformers_would_take_instead(changed):
    path = changed()
    shutil.copy(path / "model.safetensors", path / "shard-00000-model-00001-of-00001.safetensors")
    with pytest.raises(Unsupported, match="is a distributed checkpoint; consolidate it"):
        checked(path)


def test_an_adapter(changed):
    path = changed()
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "other"}')
    with pytest.raises(Unsupported, match="has an adapter; merge it"):
        checked(path)


def test_weights_that_are_pickles(changed):
    path = changed()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(Unsupported, match="convert it to safetensors"):
        checked(path)
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(Unsupported, match="no safetensors"):
        checked(path)
