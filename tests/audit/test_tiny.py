"""Audits in this process: the tiny pair, a planted biased rule, and planted rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.audit.result import CHANGED, SAME, TIES, Settings
from outrider.audit.run import audit

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TINY = Path(__file__).parents[2] / "src" / "outrider" / "assets" / "tiny"
PROMPTS = [
    "On a misty morning, an outrider rode out of",
    "The outrider of Dale was",
    "Behind Dusty came a blue carriage. In the",
    "At dusk the road to",
    "In the stable of Harrow, a grey",
    "The carriage of Dale was green. The",
]
PLAIN, SPECULATIVE = f"transformers:{TINY}/target", f"transformers:{TINY}/target#draft={TINY}/draft"


def found(samples=0, speculative=SPECULATIVE, plain=PLAIN):
    settings = Settings(chat=False, max_tokens=40, samples=samples, temperature=1.5, concurrency=3)
    return audit((plain, speculative), PROMPTS, PROMPTS[1:2], settings)


def test_the_true_rule():
    result = found(samples=24)
    assert result.verdict in (SAME, TIES)
    assert result.greedy_counts.accepted > 50
    assert result.sampling_counts.drafted > 10
    assert result.sampling.tests
    assert not result.sampling.differs


def test_a_planted_rule_that_takes_any_draft_among_the_two_best(monkeypatch):
    from outrider.core import loop, match

    def lenient(rule, p, proposal, coins):
        y = p.draw(coins)
        best = p.logits.topk(2, dim=-1).indices.tolist()
        for row, token in zip(proposal.parent_rows, proposal.tokens.tolist(), strict=True):
            if token in best[row]:
                y[row] = token
        return match(y, proposal)

    monkeypatch.setattr(loop, "verify", lenient)
    result = found()
    assert result.verdict == CHANGED
    assert result.count("wrong") >= 2
    assert all(o.own_margin < 0 for n, o in result.greedy.divergences.items()
               if result.verdicts[n] == "wrong")  # fmt: skip


def test_planted_rounding_ties(monkeypatch):
    """Verified rows are off by up to one spacing of bfloat16, as a pass of another shape may be."""
    from outrider.engines.transformers import TransformersHost

    true, coins = TransformersHost.forward, torch.Generator().manual_seed(3)

    def noisy(self, requests, proposal):
        logits = true(self, requests, proposal)
        if not len(proposal.tokens):
            return logits
        exponents = logits.float().abs().amax(-1, keepdim=True).log2().floor()
        spacing = 2.0 ** (exponents - 7)
        steps = torch.randint(-1, 2, logits.shape, generator=coins)
        return (logits.float() + spacing * steps).to(torch.bfloat16)

    monkeypatch.setattr(TransformersHost, "forward", noisy)
    kind = "dtype=bfloat16"
    result = found(plain=f"{PLAIN}#{kind}", speculative=f"{SPECULATIVE},{kind}")
    assert result.verdict == TIES
    assert result.count("numerical tie") >= 1
    assert result.tolerance.value <= 0.5
