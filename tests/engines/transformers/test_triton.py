"""The same host on its Triton kernels, in the interpreter: what a GPU would run."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is imported

import pytest
import torch
from adversaries import RaggedDrafter, RandomDrafter
from test_logits import make

pytest.importorskip("triton")
import outrider
from outrider.engines.transformers import Runner
from outrider.engines.transformers.passes import Segment
from outrider.kernels import KERNELS, interpreter, use_triton

IDS = torch.randint(3, 160, (24,), generator=torch.Generator().manual_seed(1)).tolist()
PARENTS = (-1, 0, 0, 1, 2, 3)


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setenv(KERNELS, "triton")
    with interpreter.checked(shuffle=1):
        yield


def logits(model, exactness="lossless"):
    """The rows of a prompt, of one more token, of a chain and of a tree of drafts."""
    runner = Runner(model, exactness)
    sequence = runner.open()
    rows = [runner.extend([(sequence, IDS[:12])]), runner.extend([(sequence, IDS[12:13])])]
    rows.append(runner.run([Segment(sequence, IDS[13:19])]))
    rows.append(runner.run([Segment(sequence, IDS[13:19], PARENTS)]))
    return torch.cat(rows)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Mistral"])
def test_the_logits_of_plain_torch(name, monkeypatch, triton):
    """Full attention, soft-capped scores and sliding windows."""
    model = make(name)
    found = logits(model)
    monkeypatch.setenv(KERNELS, "torch")
    torch.testing.assert_close(found, logits(model), rtol=1e-3, atol=1e-4)


def test_the_proof_of_invariance_runs_on_the_kernels(triton):
    Runner(make("Llama"), "bitwise")


# nothing, a little or all that it may; the other one always drafts all
@pytest.mark.parametrize(
    "drafter", [pytest.param(RandomDrafter, marks=pytest.mark.slow), RaggedDrafter]
)
def test_the_tokens_of_plain_decoding(drafter, triton):
    target, prompts = make("Llama"), [IDS[:9], IDS[9:12]]
    wanted = [
        outrider.SamplingParams(max_tokens=8, ignore_eos=True, temperature=t, seed=7)
        for t in (0.0, 0.8)
    ]

    def run(drafter, **options):
        return outrider.generate(
            target, prompts, drafter=drafter, sampling=wanted, exactness="bitwise", **options
        ).outputs

    assert run(drafter(target.config.vocab_size), max_drafts=3) == run("none")


def test_who_runs_as_triton(monkeypatch):
    monkeypatch.delenv(KERNELS, raising=False)
    assert not use_triton(torch.device("cpu"))
    assert use_triton(torch.device("cuda"))
    monkeypatch.setenv(KERNELS, "torch")
    assert not use_triton(torch.device("cuda"))
    monkeypatch.setenv(KERNELS, "cuda")
    with pytest.raises(
        outrider.Unsupported, match="OUTRIDER_KERNELS='cuda'; choose one of torch, "
    ):
        use_triton(torch.device("cpu"))
