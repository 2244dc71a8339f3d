"""A model read from its files: sizes, limits, and files that are not what they should be."""

from __future__ import annotations

import json

import pytest
from paper import QWEN_1_5B, TINY, shapes, write_safetensors

from outrider.checkpoint import Tensor
from outrider.doctor.model import find, read_model
from outrider.errors import Unsupported

# by hand: 151,936 x 1,536 + 28 x 46,797,824 + 1,536
QWEN_1_5B_NUMBERS = 1_543_714_304


def test_sizes_of_qwen_by_hand(qwen):
    big, small = qwen
    assert big.bytes_loaded() == 2 * QWEN_1_5B_NUMBERS
    assert big.bytes_loaded("float32") == 4 * QWEN_1_5B_NUMBERS
    assert small.bytes_loaded() == 2 * 494_032_768
    assert big.bytes_read() == 2 * QWEN_1_5B_NUMBERS  # tied: the table is the head
    assert (big.layers, big.kv_heads, big.head_dim, big.context) == (28, 2, 128, 32768)


def test_an_embedding_table_that_is_not_the_head_is_not_read(make):
    config = QWEN_1_5B | {"tie_word_embeddings": False}
    model = read_model(str(make("untied", config)))
    table = 2 * 151_936 * 1536
    assert model.bytes_loaded() == 2 * QWEN_1_5B_NUMBERS + table
    assert model.bytes_read() == 2 * QWEN_1_5B_NUMBERS
    # a head that was saved though it is tied is loaded once
    saved_twice = shapes(QWEN_1_5B) | {"lm_head.weight": (151_936, 1536)}
    model = read_model(str(make("twice", QWEN_1_5B, saved_twice)))
    assert model.bytes_loaded() == 2 * QWEN_1_5B_NUMBERS


def test_of_experts_those_are_read_that_a_row_visits(make):
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    tensors = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": (10, 10) for i in range(8)}
    tensors |= {"model.layers.0.mlp.gate.weight": (8, 10)}
    tensors |= {"model.layers.0.mlp.shared_expert.up_proj.weight": (10, 10)}
    model = read_model(str(make("moe", config, tensors)))
    always, experts = 2 * (80 + 100), 2 * 800
    assert model.bytes_read() == pytest.approx(always + experts / 4)
    assert model.bytes_read(rows=3) == pytest.approx(always + experts * (1 - 0.75**3))
    assert model.bytes_loaded() == always + experts


def test_layers_beyond_the_last_and_other_senses_are_left_out(make):
    tensors = shapes(QWEN_1_5B) | {
        "model.layers.28.mlp.up_proj.weight": (10, 10),
        "mtp.fc.weight": (10, 10),
        "visual.blocks.0.attn.weight": (10, 10),
    }
    model = read_model(str(make("more", QWEN_1_5B, tensors)))
    assert model.bytes_loaded() == 2 * QWEN_1_5B_NUMBERS


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(64, 96), (64, 60)])
def test_few_bits_take_what_the_packed_weight_takes(bits, shape):
    torch = pytest.importorskip("torch")
    from outrider.kernels.quantized_linear import QuantizedWeight

    packed = QuantizedWeight(torch.zeros(shape, dtype=torch.bfloat16), bits)
    actual = sum(buffer.numel() * buffer.element_size() for buffer in packed.buffers())
    tensor = Tensor("w", "BF16", shape, 2 * shape[0] * shape[1])
    assert tensor.in_few_bits(bits, "bfloat16") == actual


@pytest.mark.parametrize(
    ("more", "length"),
    [
        ({}, 32768),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 131072),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 32768),
        (
            {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 8192}},
            32768,
        ),
        ({"max_position_embeddings": None, "n_positions": 1024}, 1024),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_the_longest_sequence(make, more, length):
    assert read_model(str(make("model", QWEN_1_5B | more, {}))).context == length


def test_many_files(tmp_path, make):
    path = make("shards", QWEN_1_5B, {})
    (path / "model.safetensors").unlink()
    names = list(shapes(QWEN_1_5B).items())
    half = len(names) // 2
    for number, part in enumerate((names[:half], names[half:])):
        write_safetensors(path / f"{number}.safetensors", dict(part))
    index = {name: f"{int(i >= half)}.safetensors" for i, (name, _) in enumerate(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert read_model(str(path)).bytes_loaded() == 2 * QWEN_1_5B_NUMBERS

    (path / "1.safetensors").unlink()
    model = read_model(str(path))
    assert model.bytes_loaded() is None
    (finding,) = model.findings
    assert (finding.level, f"1.safetensors in {path} is missing" in finding.what) == (
        "problem",
        True,
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"abc", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        ((4).to_bytes(8, "little") + b"{...", "cannot be read"),
        ((14).to_bytes(8, "little") + b'{"a": {"b":1}}', "cannot be read"),
    ],
)
def test_weights_that_are_none(make, content, said):
    path = make("model", QWEN_1_5B, {})
    (path / "model.safetensors").write_bytes(content)
    (finding,) = read_model(str(path)).findings
    assert finding.level == "problem"
    assert said in finding.what


def test_a_download_that_broke_off(make):
    path = make("model", QWEN_1_5B)
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(10_000_000)
    (finding,) = read_model(str(path)).findings
    assert "has 10,000,000 bytes instead of 3,087," in finding.what


def test_a_model_without_weights_is_still_read(make):
    path = make("model", QWEN_1_5B)
    (path / "model.safetensors").unlink()
    model = read_model(str(path))
    assert model.bytes_loaded() is None
    assert [finding.level for finding in model.findings] == ["warning"]


def test_what_is_no_model(tmp_path):
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    for path in (empty, broken):
        path.mkdir()
    (broken / "config.json").write_text('{"model_type": ')
    listed, other, adapter = (tmp_path / name for name in ("listed", "other", "adapter"))
    for path, name, content in (
        (listed, "config.json", "[]"),
        (other, "config.json", '{"name": "x"}'),
        (adapter, "adapter_config.json", "{}"),
    ):
        path.mkdir()
        (path / name).write_text(content)
    for path, said in (
        (tmp_path / "none" / "here", "no directory"),
        (empty, "no config.json"),
        (broken, "cannot be read"),
        (listed, "not an object"),
        (other, "no model_type"),
        (adapter, "is an adapter"),
        (other / "config.json", "is a file"),
    ):
        with pytest.raises(Unsupported, match=said):
            read_model(str(path))


def test_a_name_is_looked_up_in_the_cache(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Unsupported, match="hf download some/model"):
        find("some/model")
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text((TINY / "target" / "config.json").read_text())
    import huggingface_hub

    look = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **more: look(name, cache_dir=tmp_path, **more),
    )
    assert find("some/model") == snapshot
    assert read_model("some/model").name == "some/model"


def test_a_name_without_the_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(Unsupported, match="pip install huggingface_hub"):
        find("some/model")
