"""A head beside its target, by their files."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from paper import QWEN_1_5B

from outrider.doctor.heads import check_head, is_head
from outrider.doctor.model import read_model
from outrider.doctor.pair import Plan
from outrider.doctor.run import examine

TINY = Path(str(files("outrider"))) / "assets" / "tiny"


@pytest.fixture
def changed(tmp_path):
    """Return a function that copies a tiny head with another config.json."""

    def change(name="head", **more):
        folder = tmp_path / "head"
        shutil.copytree(TINY / name, folder)
        config = json.loads((folder / "config.json").read_text()) | more
        (folder / "config.json").write_text(json.dumps(config))
        return read_model(str(folder))

    return change


def check(head):
    return list(check_head(read_model(str(TINY / "target")), head))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("head", "(eagle3, in the format of SGLang) that reads the states of layers [1, 2, 3]"),
        ("mtp", "(mtp, in the format of speculators) that reads the last states"),
        ("dflash", "(dflash, in the format of SGLang)"),
    ],
)
def test_heads_that_fit(name, said):
    head = read_model(str(TINY / name))
    assert is_head(head)
    findings = check(head)
    assert said in findings[0].what
    assert {finding.level for finding in findings} <= {"ok", "note", "warning"}
    assert not any("refused in SGLang" in finding.what for finding in findings)


def test_models_are_no_heads(make):
    assert not is_head(read_model(str(TINY / "target")))
    assert not is_head(read_model(str(TINY / "draft")))
    assert not is_head(read_model(str(make("model", QWEN_1_5B))))
    # as in DeepSeek-V3, GLM-4.5 and MiMo, whose checkpoints have MTP layers beside the model
    with_mtp = QWEN_1_5B | {"num_nextn_predict_layers": 1}
    assert not is_head(read_model(str(make("with_mtp", with_mtp))))


@pytest.mark.parametrize(
    ("more", "level", "said"),
    [
        ({"hidden_size": 256}, "problem", "a width of 256; "),
        ({"vocab_size": 1024, "draft_vocab_size": 1024}, "problem", "a vocabulary of 1,024"),
        ({"hidden_act": "gelu"}, "problem", "hidden_act 'gelu'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 40]}}, "problem", "with 4"),
        ({"max_position_embeddings": 64}, "note", "64 positions"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
            "warning",
            "refused in",
        ),
        # [2, n / 2, n - 3]: as vLLM and speculators count
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 1]}}, "warning", "neighbour"),
    ],
)
def test_heads_that_do_not(changed, more, level, said):
    findings = [finding for finding in check(changed(**more)) if finding.level == level]
    assert any(said in f"{finding.what} {finding.why}" for finding in findings)


def test_the_other_count_is_seen_in_speculators_format_too(changed):
    more = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 1, 0]}
    shape = json.loads((TINY / "head" / "config.json").read_text())
    findings = check(changed(**more, transformer_layer_config=shape))
    assert any("as SGLang count" in finding.what for finding in findings)


def test_doctor_looks_at_a_head_as_a_head():
    report = examine(str(TINY / "target"), str(TINY / "head"), None, Plan())
    assert not report.count("problem")
    assert any("is a head" in finding.what for finding in report.findings)
    assert report.cost is None


def test_a_target_that_is_named_twice_drafts_with_its_own_layer(changed):
    """As SGLang is told to: --speculative-draft-model-path is the target's path."""
    with_layer = changed("target", num_nextn_predict_layers=1)
    assert not is_head(with_layer)
    report = examine(with_layer.path, with_layer.path, None, Plan())
    said = [finding.what for finding in report.findings]
    assert any(
        "has a head among its own weights (mtp), which reads the last states" in s for s in said
    )
    assert report.cost is None  # nobody weighs it as a draft model
    assert not any("draft" in row.what for row in report.budget.rows)


def test_twin_a_target_without_a_layer_of_its_own_is_a_draft_model():
    target = str(TINY / "target")
    report = examine(target, target, None, Plan())
    assert not any("own weights" in finding.what for finding in report.findings)
    assert report.cost is not None
