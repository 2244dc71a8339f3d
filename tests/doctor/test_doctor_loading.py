"""What loading would refuse is a problem to the doctor, by the same checks."""

from __future__ import annotations

import json
import shutil

import pytest
from paper import TINY

from outrider.doctor.pair import Plan
from outrider.doctor.run import examine
from outrider.errors import Unsupported

pytest.importorskip("torch")
pytest.importorskip("transformers")

from outrider.clients import load_model, load_tokenizer


def config(**more):
    def change(path):
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))

    return change


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def as_pickle(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def load(path):
    load_model(path, "auto")
    load_tokenizer(path)


BROKEN = {
    "truncated weights": truncate,
    "pickles": as_pickle,
    "a size that is text": config(hidden_size="big"),
    "a list of sizes": config(num_hidden_layers=[4]),
    "no heads": config(num_attention_heads=0),
    "many layers": config(num_hidden_layers=10**6),
    "another width": config(intermediate_size=60_000),
    "a kernel of the hub": config(attn_implementation="some/kernel"),
    "an activation that is none": config(hidden_act="some"),
    "a tokenizer that is none": lambda path: (path / "tokenizer.json").write_text('{"model": 5}'),
    "a tokenizer cut short": lambda path: (path / "tokenizer.json").write_text('{"model": {'),
    "a tokenizer's config": lambda path: (path / "tokenizer_config.json").write_text("[]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_doctor_finds_what_loading_refuses(tmp_path, name):
    path = shutil.copytree(TINY / "target", tmp_path / "model")
    BROKEN[name](path)
    with pytest.raises(Unsupported) as refused:
        load(str(path))
    report = examine(str(path), None, None, Plan())
    problems = [finding.what for finding in report.findings if finding.level == "problem"]
    assert problems
    assert any(problem.partition(": ")[2] in str(refused.value) for problem in problems)


def test_twin_the_tiny_models_have_no_problem():
    report = examine(str(TINY / "target"), str(TINY / "draft"), None, Plan())
    assert [finding for finding in report.findings if finding.level == "problem"] == []
