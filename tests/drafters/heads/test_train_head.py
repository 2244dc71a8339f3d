"""`scripts/train_head.py`: what it writes can be loaded, and what it misses it says."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.drafters.heads import kind_of, load_head

SCRIPTS = Path(__file__).parents[3] / "scripts"
TARGET = Path(str(files("outrider"))) / "assets" / "tiny" / "target"
TEXT = "Once there was an outrider called Anna. Anna had a mare called Fern. " * 20


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("transformers")
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("train_head")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture
def train(script, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)

    def run(*args, model=TARGET, steps=2, out=tmp_path / "head"):
        fixed = [str(model), "--out", str(out), "--steps", str(steps), "--length", "40"]
        monkeypatch.setattr(sys, "argv", ["train_head", *fixed, "--text", str(text), *args])
        script.main()
        return out

    return run


@pytest.fixture(scope="module")
def shared():
    return load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].float()


@pytest.mark.parametrize("options", ["eagle3", "eagle3 --fc-norm", "mtp", "dflash"])
def test_what_it_writes_is_a_head(options, train, shared):
    kind, *more = options.split()
    out = train("--kind", kind, *more)
    folders = [out] if kind == "mtp" else [out, out / "speculators"]
    heads = [load_head(folder, shared, 4, lm_head=shared) for folder in folders]
    assert {kind_of(json.loads((f / "config.json").read_text())) for f in folders} == {kind}
    for other in heads[1:]:
        assert other.hidden_layers == heads[0].hidden_layers
        for name, tensor in heads[0].state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
    if kind == "eagle3":
        assert all(head.norms.fc_norm == bool(more) for head in heads)
    assert "head" in (out / "README.md").read_text()
    if importlib.util.find_spec("matplotlib"):
        assert (out / "loss.svg").read_text().startswith("<?xml")


def test_training_goes_on_where_it_stopped(train):
    out = train("--kind", "mtp", steps=2)
    train("--kind", "mtp", steps=3)
    assert torch.load(out / "training.pt")["done"] == 3


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_an_interruption_changes_nothing(kind, train, script, tmp_path, monkeypatch):
    """The pieces of text and the anchors that a step draws depend on the step alone."""
    options = ["--kind", kind, "--save-at", "2", "4"]
    whole = train(*options, steps=4, out=tmp_path / "whole")
    monkeypatch.setattr(script, "SAVE_EVERY", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(script, "save", stop)  # is called in step 2, before that step is kept
        with pytest.raises(KeyboardInterrupt):
            train(*options, steps=4)
    out = train(*options, steps=4)
    for step in ("step-2", "step-4", ""):
        ours, theirs = (load_file(o / step / "model.safetensors") for o in (out, whole))
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()), step
    told = json.loads((out / "step-2" / "training.json").read_text())
    assert (told["done"], told["tokens"], told["curve"][-1]["tokens"]) == (
        2,
        2 * 8 * 40,
        2 * 8 * 40,
    )


def stop(*args):
    raise KeyboardInterrupt


def test_a_draft_vocabulary_is_the_most_frequent_tokens(train, shared):
    out = train("--draft-vocab", "20")
    head = load_head(out, shared, 4)
    drafted = torch.arange(20) + head.d2t
    assert len(head.lm_head.weight) == 20
    assert len(set(drafted.tolist())) == 20
    t2d = load_file(out / "model.safetensors")["t2d"]
    assert t2d.nonzero()[:, 0].tolist() == drafted.tolist()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--text", "missing.txt"], "no text at missing.txt"),
        (["--length", "2000"], "fewer than 2000 tokens"),
        (["--kind", "mtp", "--draft-vocab", "9"], "--draft-vocab is for --kind eagle3"),
        (["--kind", "mtp", "--fc-norm"], "--fc-norm is for --kind eagle3"),
        (["--layers", "2"], "--layers is for --kind dflash"),
        (["--kind", "dflash", "--block", "1"], "--block must be at least 2"),
    ],
)
def test_what_it_misses_it_says(args, said, train, capsys):
    assert said in one_line(capsys, lambda: train(*args))


def one_line(capsys, run):
    """Return the error that a run ends with, which is one line and no traceback."""
    with pytest.raises(SystemExit):
        run()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_missing_model_is_named(train, capsys, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((TARGET / "config.json").read_text())
    assert "no model at" in one_line(capsys, lambda: train(model=tmp_path / "nowhere"))
    assert f"cannot load {empty}" in one_line(capsys, lambda: train(model=empty))


def test_the_training_of_another_head_is_not_gone_on_with(train, capsys):
    train("--kind", "mtp")
    capsys.readouterr()
    assert "is of another head" in one_line(capsys, lambda: train("--kind", "dflash"))
