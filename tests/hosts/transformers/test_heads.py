"""Heads in Transformers: they change speed only, and the one that was trained is worth it."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import outrider
from outrider.core import Unsupported
from outrider.drafters import RoutedDrafter
from outrider.drafters.heads import Eagle3Head, HeadConfig, HeadDrafter, load_head
from outrider.hosts.transformers.heads import HeadFile

TINY = Path(str(files("outrider"))) / "assets" / "tiny"
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


def random_head(target):
    torch.manual_seed(0)
    head = Eagle3Head(HeadConfig.of(target.config.to_dict()), (1, 2, 4), 128).eval()
    head.embed_tokens.weight.data = target.get_input_embeddings().weight.data.float()
    return head.to(target.dtype).requires_grad_(False)


def trained_head(target):
    return load_head(HEAD, target.get_input_embeddings().weight.detach(), 4)


class Shifted(HeadDrafter):
    """Reads the states of the tokens beside the ones it should."""

    def observe(self, outcomes):
        super().observe([replace(o, hidden=o.hidden.roll(1, 0)) for o in outcomes])


HEADS = {
    "random": lambda target, **more: HeadDrafter(random_head(target), 512, **more),
    "trained": lambda target, **more: HeadDrafter(trained_head(target), 512, **more),
    "shifted": lambda target, **more: Shifted(trained_head(target), 512, **more),
}


@pytest.mark.parametrize("siblings", [0, 2], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("name", HEADS)
def test_the_tokens_are_those_of_plain_decoding(name, kind, siblings, target, prompts, plain):
    drafter = HEADS[name](target, min_survival=0.0, siblings=siblings)
    done = outrider.generate(
        target, prompts, drafter=drafter, sampling=SAMPLING[kind], exactness="bitwise", max_drafts=6
    )
    assert done.outputs == plain[kind]
    assert done.stats.drafted > 100
    assert not done.stats.fallbacks


def accept_length(drafter, target, prompts):
    return outrider.generate(
        target, prompts, drafter=drafter, sampling=SAMPLING["greedy"], max_drafts=4
    ).stats.accept_length


def test_the_trained_head_is_worth_it_and_a_shift_costs_it(target, prompts):
    trained, shifted, untrained = (
        accept_length(HEADS[name](target, min_survival=0.0), target, prompts)
        for name in ("trained", "shifted", "random")
    )
    assert trained > 2.0
    assert shifted < trained - 0.5
    assert untrained < 1.2


def test_load_drafter_tells_what_it_is(target, prompts, plain, tmp_path):
    head = outrider.load_drafter(HEAD)
    assert isinstance(head, HeadFile)
    done = outrider.generate(
        target, prompts, drafter=head, sampling=SAMPLING["greedy"], exactness="bitwise"
    )
    assert done.outputs == plain["greedy"]
    assert done.stats.accept_length > 1.5
    assert isinstance(outrider.load_drafter(TINY / "draft"), torch.nn.Module)
    with pytest.raises(Unsupported, match=r"config\.json"):
        outrider.load_drafter(tmp_path)


def test_a_head_of_another_target_is_refused(load):
    other = load("tiny-draft")
    with pytest.raises(Unsupported, match="trained for"):
        outrider.generate(other, [[1, 2]], drafter=outrider.load_drafter(HEAD))


def test_under_control(target, prompts, plain):
    """Control decides when the head drafts; the head gets its states through it."""
    drafter = outrider.adaptive(target, outrider.load_drafter(HEAD))
    assert drafter.hidden_layers == (1, 2, 3)
    for _ in range(2):
        done = outrider.generate(
            target, prompts, drafter=drafter, sampling=SAMPLING["greedy"], exactness="bitwise"
        )
        assert done.outputs == plain["greedy"]
        assert not done.stats.fallbacks


def test_routed_each_reads_its_own_layers(target, prompts, plain):
    head, other = trained_head(target), random_head(target)
    routed = RoutedDrafter(
        {"a": HeadDrafter(head, 512), "b": HeadDrafter(other, 512), "c": outrider.NgramDrafter()},
        lambda request: "abc"[request.id % 3],
    )
    assert routed.hidden_layers == (1, 2, 3, 4)
    done = outrider.generate(
        target, prompts, drafter=routed, sampling=SAMPLING["greedy"], exactness="bitwise"
    )
    assert done.outputs == plain["greedy"]
    assert not done.stats.fallbacks
