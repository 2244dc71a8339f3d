"""Heads in Transformers: they change speed only, and the one that was trained is worth it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from some_heads import TINY, TRAINED, made, trained_head

import outrider
from outrider.core import Unsupported
from outrider.engines.transformers.heads import HeadFile

HEAD = TINY / "head"
SAMPLING = {
    "greedy": {"max_tokens": 60},
    "T=0.7": {"max_tokens": 60, "temperature": 0.7, "seed": 5},
    "penalty": {"max_tokens": 40, "repetition_penalty": 1.2},
}


@pytest.fixture(scope="module")
def plain(target, prompts):
    """Return what plain decoding emits, by kind of sampling."""
    return {
        kind: outrider.generate(
            target, prompts, drafter=None, sampling=sampling, exactness="bitwise"
        ).outputs
        for kind, sampling in SAMPLING.items()
    }


KINDS = ("eagle3", "mtp", "dflash")
SHAPES = {
    "chain": {"min_survival": 0.0},
    "leaves": {"min_survival": 0.7, "siblings": 2},  # they take the room that a short chain leaves
    "tree": {"min_survival": 0.0, "width": 3},
}
CASES = [
    *((f"{kind} {state}", sampling, shape)
      for kind in KINDS for state in ("random", "trained") for sampling in SAMPLING
      for shape in (("chain", "leaves") if state == "trained" else ("chain",))),
    *((f"{kind} {state}", "T=0.7", "leaves") for kind in KINDS for state in ("shifted", "layers")),
    ("eagle random", "greedy", "leaves"),
    *((f"{kind} trained", sampling, "tree") for kind in ("eagle3", "mtp") for sampling in SAMPLING),
    *((f"eagle3 {state}", "T=0.7", "tree") for state in ("random", "shifted", "layers")),
    ("eagle random", "greedy", "tree"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "shape"), CASES)
def test_the_tokens_are_those_of_plain_decoding(name, kind, shape, target, prompts, plain):
    drafter = made(name, target, **SHAPES[shape])
    done = outrider.generate(
        target, prompts, drafter=drafter, sampling=SAMPLING[kind], exactness="bitwise",
        max_drafts=16 if shape == "tree" else 6,
    )  # fmt: skip
    assert done.outputs == plain[kind]
    assert done.stats.drafted > 60
    branched = done.stats.drafted - sum(done.stats.proposed_at.values())
    assert bool(branched) == (shape != "chain")
    assert not done.stats.fallbacks


@pytest.mark.parametrize("name", ["mtp trained", "dflash trained"])
@pytest.mark.parametrize("rule", ["residual", "block"])
def test_other_rules_accept_their_drafts(name, rule, target, prompts):
    """Their distributions are known, so the rules that need them find them."""
    done = outrider.generate(
        target, prompts, drafter=made(name, target, min_survival=0.0), rule=rule, max_drafts=4,
        sampling=SAMPLING["T=0.7"],
    )  # fmt: skip
    assert done.stats.accept_length > 1.5
    assert not done.stats.fallbacks


def accept_length(drafter, target, prompts):
    return outrider.generate(
        target, prompts, drafter=drafter, sampling=SAMPLING["greedy"], max_drafts=4
    ).stats.accept_length


@pytest.mark.parametrize("kind", KINDS)
def test_the_trained_head_is_worth_it_and_a_shift_costs_it(kind, target, prompts):
    trained, shifted, untrained = (
        accept_length(made(f"{kind} {state}", target, min_survival=0.0), target, prompts)
        for state in ("trained", "shifted", "random")
    )
    assert trained > 2.0
    assert shifted < trained - 0.2
    assert untrained < 1.2


@pytest.mark.parametrize("kind", KINDS)
def test_load_drafter_tells_what_it_is(kind, target, prompts, plain):
    head = outrider.load_drafter(TRAINED[kind])
    assert isinstance(head, HeadFile)
    assert head.kind == kind
    done = outrider.generate(
        target, prompts, drafter=head, sampling=SAMPLING["greedy"], exactness="bitwise"
    )
    assert done.outputs == plain["greedy"]
    assert done.stats.accept_length > 1.5


def test_load_drafter_reads_models_and_refuses_the_rest(tmp_path):
    assert isinstance(outrider.load_drafter(TINY / "draft"), torch.nn.Module)
    with pytest.raises(Unsupported, match=r"config\.json"):
        outrider.load_drafter(tmp_path)
    with pytest.raises(Unsupported, match="it is a model"):
        outrider.load_drafter(TINY / "draft", kind="dflash")


def test_an_mtp_layer_among_the_targets_weights(target, prompts, plain, tmp_path):
    """Written as Qwen does, beside the target's own tensors."""
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
             "norm": "norm", "layer": "layers.0"}  # fmt: skip
    weights = load_file(TINY / "target" / "model.safetensors")
    for name, tensor in trained_head(target, "mtp").state_dict().items():
        first, _, rest = name.partition(".")
        if first in names:
            weights[f"mtp.{names[first]}.{rest}"] = tensor.contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((TINY / "target" / "config.json").read_text())
    mlp = weights["mtp.layers.0.mlp.up_proj.weight"].shape[0]
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": mlp}))
    done = outrider.generate(
        target, prompts, drafter=outrider.load_drafter(tmp_path, kind="mtp"),
        sampling=SAMPLING["greedy"], exactness="bitwise",
    )  # fmt: skip
    assert done.outputs == plain["greedy"]
    assert done.stats.accept_length > 1.5


def test_a_head_of_another_target_is_refused(load):
    other = load("tiny-draft")
    with pytest.raises(Unsupported, match="trained for"):
        outrider.generate(other, [[1, 2]], drafter=outrider.load_drafter(HEAD))


@pytest.mark.parametrize("kind", KINDS)
def test_under_control(kind, target, prompts, plain):
    """Control decides when the head drafts; the head gets its states through it."""
    drafter = outrider.adaptive(target, outrider.load_drafter(TRAINED[kind]))
    assert drafter.hidden_layers == {"mtp": (4,)}.get(kind, (1, 2, 3))
    for _ in range(2):
        done = outrider.generate(
            target, prompts, drafter=drafter, sampling=SAMPLING["greedy"], exactness="bitwise"
        )
        assert done.outputs == plain["greedy"]
        assert not done.stats.fallbacks


def test_control_chooses_among_several_heads_and_a_model(target, prompts, plain, tmp_path):
    """Each of them reads other layers of the target, and control tries them all."""
    heads = [outrider.load_drafter(TRAINED[kind]) for kind in KINDS]
    drafter = outrider.adaptive(target, [*heads, target], trace=tmp_path / "steps")
    assert list(drafter.control.models) == [*KINDS, "model"]
    for kind, sampling in SAMPLING.items():
        done = outrider.generate(
            target, prompts, drafter=drafter, sampling=sampling, exactness="bitwise"
        )
        assert done.outputs == plain[kind]
        assert not done.stats.fallbacks
    steps = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert (
        len({name for step in steps for name in step["drafters"]} & {*drafter.control.models}) > 1
    )
