"""Residual verification in Triton: the integers of `core.verify_residual`, and the target's law.

The kernel and core (in float64) see the same float32 probabilities and the same coins. Their
results could differ only where a comparison is within float64 rounding.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

from outrider.core import KeyedCoins
from outrider.core import verify_residual as core_verify_residual
from outrider.kernels import verify_residual as op
from outrider.kernels.verify_residual import reference
from outrider.kernels.verify_residual import triton as kernel


def draw(q: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial(q, 1, generator=generator).squeeze(-1)


def chains(counts: list[int], vocab: int, seed: int = 0, near: float = 0.5) -> dict:
    """Return a batch of chains with so many drafts each. near: how far q lies from p."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([0, *(count + 1 for count in counts)])
    starts = sizes.cumsum(0)
    rows, batch = int(starts[-1]), sum(count >= 0 for count in counts)
    p = torch.randn(rows, vocab, generator=generator).mul(2).softmax(-1)
    is_draft = torch.ones(rows, dtype=torch.bool)
    is_draft[starts[:batch]] = False
    parent = is_draft.nonzero().squeeze(-1) - 1  # a draft's row of q is about its parent's of p
    noise = torch.randn(rows - batch, vocab, generator=generator)
    q = (p[parent].log() + near * noise).softmax(-1)
    drafts = torch.full((rows,), -7)
    drafts[is_draft] = draw(q, generator) if len(q) else drafts[:0]
    return {
        "p": p,
        "q": q,
        "drafts": drafts,
        "rows_start": starts,
        "seeds": torch.randint(0, 2**62, (rows,), generator=generator),
        "positions": torch.arange(rows) + 100,
        "max_drafts": max(0, *counts),
    }


def assert_reference(batch: dict) -> reference.Verified:
    expected = reference.verify_residual(**batch)
    found = kernel.verify_residual(**batch)
    assert found.num_accepted_drafts.tolist() == expected.num_accepted_drafts.tolist()
    assert found.next_tokens.tolist() == expected.next_tokens.tolist()
    return found


@pytest.mark.parametrize("vocab", [1, 7, 1000, 5000])
@pytest.mark.parametrize("law", ["sampled", "point mass"])
def test_ragged_chains(interpreted, vocab, law):
    batch = chains([3, 0, 1, 5, 2, 5, 8], vocab)
    if law == "point mass":
        batch["q"] = None
    found = assert_reference(batch)
    assert found.num_accepted_drafts.sum() > 0 or law == "point mass"


def test_reference_is_core():
    """The operation's own signature, in terms of core's types."""
    batch = chains([2, 0, 3], 7)
    law, proposal = reference.as_core(**batch)
    verdict = core_verify_residual(law, proposal, KeyedCoins())
    assert proposal.num_drafts.tolist() == [2, 0, 3]
    assert torch.equal(op.verify_residual(**batch).next_tokens, verdict.next_tokens)


@pytest.mark.parametrize("counts", [[0], [4], [0, 0, 0]], ids=str)
def test_one_row_and_no_drafts(interpreted, counts):
    assert_reference(chains(counts, 11, seed=1))


def test_whole_vocabulary(interpreted, monkeypatch):
    """In three splits instead of 38, to spare the interpreter: the result depends on neither."""
    monkeypatch.setattr(kernel, "SPLIT", 65_536)
    found = assert_reference(chains([2], 151_936, seed=2))
    assert found.next_tokens.item() > 0


def test_equal_laws_keep_everything(interpreted):
    found = assert_reference(chains([4, 6], 50, near=0.0))
    assert found.num_accepted_drafts.tolist() == [4, 6]


def test_point_masses_of_the_target(interpreted):
    """A greedy target: kept exactly where the draft is its token, and its token follows."""
    batch = chains([3, 3, 3], 20, seed=3)
    best = batch["p"].argmax(-1)
    batch["p"] = torch.nn.functional.one_hot(best, 20).float()
    batch["drafts"][1:4] = best[:3]  # the first request's drafts are all right
    batch["drafts"][5] = (best[4] + 1) % 20  # the second's first is wrong
    batch["q"] = None
    found = assert_reference(batch)
    assert found.num_accepted_drafts[:2].tolist() == [3, 0]
    assert found.next_tokens[:2].tolist() == [best[3], best[4]]


def test_zero_probabilities(interpreted):
    """What p rules out is never emitted, and a draft that q rules out never kept."""
    batch = chains([2] * 12, 9, seed=4)
    batch["p"][:, ::2] = 0
    batch["p"] /= batch["p"].sum(-1, keepdim=True)
    batch["q"][::3] = torch.nn.functional.one_hot(torch.tensor(1), 9).float()
    found = assert_reference(batch)
    assert (found.next_tokens % 2 == 1).all()


def test_nothing_left(interpreted):
    """q is at least p everywhere, by rounding: after a rejection the draw is from p."""
    batch = chains([1] * 20, 6, seed=5)
    batch["q"] = batch["p"][::2] * 1.5
    found = assert_reference(batch)
    assert 0 < found.num_accepted_drafts.sum() < 20


def test_padding(interpreted):
    """Requests without rows come last, and emit nothing."""
    found = assert_reference(chains([2, 1, -1, -1], 7))
    assert found.next_tokens[2:].tolist() == [-1, -1]
    assert found.num_accepted_drafts[2:].tolist() == [0, 0]


def test_strided_rows(interpreted):
    batch = chains([3, 2], 40, seed=6)
    padded = {name: torch.nn.functional.pad(batch[name], (3, 5)) for name in ("p", "q")}
    strided = {name: padded[name][:, 3:43] for name in padded}
    found, expected = assert_reference(batch | strided), assert_reference(batch)
    assert found.next_tokens.tolist() == expected.next_tokens.tolist()


def test_a_draft_that_is_no_token_is_rejected(interpreted):
    batch = chains([2, 2], 30, seed=7)
    batch["drafts"][[1, 4]] = torch.tensor([30, -1])
    assert kernel.verify_residual(**batch).num_accepted_drafts.tolist() == [0, 0]


def test_nan_is_not_a_probability(interpreted):
    """Neither drawn nor kept; the reference has no say, since torch's argmax picks NaN."""
    batch = chains([0, 0, 1], 6, seed=10)
    batch["p"][:, ::2] = torch.nan
    batch["drafts"][3] = 2
    found = kernel.verify_residual(**batch)
    assert (found.next_tokens % 2 == 1).all()
    assert found.num_accepted_drafts[2] == 0


def test_twin_coins_of_another_position(interpreted):
    """A walk that keys its coins by the draft's row instead of its parent's must not pass."""
    batch = chains([5] * 6, 7, seed=8)
    expected = reference.verify_residual(**batch)
    shifted = kernel.verify_residual(**(batch | {"positions": batch["positions"] + 1}))
    assert shifted.next_tokens.tolist() != expected.next_tokens.tolist()


# The law


P = torch.tensor([0.50, 0.25, 0.25])
Q = torch.tensor([0.98, 0.01, 0.01])
RUNS = 120


def p_value() -> float:
    """Return the chi-square test's, of the first token that each of many requests emits."""
    generator = torch.Generator().manual_seed(9)
    x = draw(Q.expand(RUNS, -1), generator)
    rows = torch.arange(2 * RUNS)
    batch = {
        "p": P.expand(2 * RUNS, -1),
        "q": Q.expand(RUNS, -1),
        "drafts": torch.stack([x, x], 1).flatten(),
        "rows_start": torch.arange(RUNS + 1) * 2,
        "seeds": rows // 2 * 7919 + 1,
        "positions": rows % 2 + 5,
        "max_drafts": 1,
    }
    found = kernel.verify_residual(**batch)
    first = torch.where(found.num_accepted_drafts > 0, x, found.next_tokens)
    seen = torch.bincount(first, minlength=3)
    return stats.chisquare(seen.tolist(), (P.double() / P.double().sum() * RUNS).tolist()).pvalue


def test_law():
    assert p_value() > 1e-3


exact_left = kernel.left_of


@triton.jit
def all_of_p(p_row, q_row, x, scale, o_v, V, taken, POINT: tl.constexpr):
    return exact_left(p_row, q_row, x, scale, o_v, V, 0, POINT)


def test_twin_recovering_from_p_is_biased(monkeypatch):
    monkeypatch.setattr(kernel, "left_of", all_of_p)
    assert p_value() < 1e-4


# What is refused


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"p": torch.ones(6, 7).double()}, "p must be"),
        ({"q": torch.ones(4, 8)}, "q must be"),
        ({"p": torch.ones(7, 6).t()}, r"call \.contiguous"),
        ({"seeds": torch.zeros(3, dtype=torch.int64)}, "3 entries for 6 rows"),
        ({"drafts": torch.zeros(6)}, "drafts must be"),
        ({"max_drafts": 1}, "more than max_drafts=1"),
        ({"max_drafts": -1}, "must not be negative"),
    ],
)
def test_wrong_arguments_are_refused(change, error):
    good = chains([2, 2], 7)
    with pytest.raises(ValueError, match=error):
        op.verify_residual(**({**good, "p": good["p"][:, :7]} | change))
