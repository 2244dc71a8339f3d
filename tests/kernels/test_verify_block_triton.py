"""Block verification in Triton: the integers of `core.verify_block`, and the target's law.

The kernel and core (in float64) see the same float32 probabilities and the same coins. Their
results could differ only where a comparison is within float64 rounding.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from scipy import stats
from test_verify_residual_triton import chains, draw

from outrider.core import KeyedCoins
from outrider.core import verify_block as core_verify_block
from outrider.kernels import verify_block as op
from outrider.kernels.verify_block import reference
from outrider.kernels.verify_block import triton as kernel
from outrider.kernels.verify_residual import triton as residual
from outrider.kernels.verify_residual.reference import Verified, as_core, verify_residual


def assert_reference(batch: dict) -> Verified:
    expected = reference.verify_block(**batch)
    found = kernel.verify_block(**batch)
    assert found.num_accepted_drafts.tolist() == expected.num_accepted_drafts.tolist()
    assert found.next_tokens.tolist() == expected.next_tokens.tolist()
    return found


@pytest.mark.parametrize("vocab", [1, 7, 1000])
@pytest.mark.parametrize("law", ["sampled", "point mass"])
def test_ragged_chains(interpreted, vocab, law):
    batch = chains([3, 0, 1, 5, 2, 8], vocab)
    if law == "point mass":
        batch["q"] = None
    found = assert_reference(batch)
    assert found.num_accepted_drafts.sum() > 0 or law == "point mass"


def test_several_splits(interpreted):
    assert_reference(chains([3, 2], 5000, seed=1))


def test_reference_is_core():
    """The operation's own signature, in terms of core's types."""
    batch = chains([2, 0, 3], 7)
    law, proposal = as_core(**batch)
    verdict = core_verify_block(law, proposal, KeyedCoins())
    assert torch.equal(op.verify_block(**batch).next_tokens, verdict.next_tokens)


@pytest.mark.parametrize("counts", [[0], [1], [4], [0, 0, 0]], ids=str)
def test_one_row_and_no_drafts(interpreted, counts):
    assert_reference(chains(counts, 11, seed=1))


def test_whole_vocabulary(interpreted, monkeypatch):
    """In three splits instead of 38, to spare the interpreter: the result depends on neither."""
    monkeypatch.setattr(kernel, "SPLIT", 65_536)
    found = assert_reference(chains([2], 151_936, seed=2))
    assert found.next_tokens.item() > 0


def test_equal_laws_keep_everything(interpreted):
    """Every r is 1 and nothing is left: the limit 0 / 0 of the rule counts as 1."""
    found = assert_reference(chains([4, 6], 50, near=0.0))
    assert found.num_accepted_drafts.tolist() == [4, 6]


def test_a_prefix_may_pass_after_a_shorter_one_failed(interpreted):
    """What sets the rule apart from `residual`: the longest prefix that passes is kept."""
    batch = chains([6] * 8, 7, seed=3, near=1.0)
    found = assert_reference(batch).num_accepted_drafts
    alone = verify_residual(**batch).num_accepted_drafts
    assert (found > alone).any()


def test_zero_probabilities(interpreted):
    """What p rules out is never emitted."""
    batch = chains([3] * 8, 9, seed=4)
    batch["p"][:, ::2] = 0
    batch["p"] /= batch["p"].sum(-1, keepdim=True)
    found = assert_reference(batch)
    assert (found.next_tokens % 2 == 1).all()


def test_nothing_left(interpreted):
    """q is at least p everywhere, by rounding: after a rejection the draw is from p."""
    batch = chains([1] * 12, 6, seed=5)
    batch["q"] = batch["p"][::2] * 1.5
    found = assert_reference(batch)
    assert 0 < found.num_accepted_drafts.sum() < 12


def test_padding(interpreted):
    found = assert_reference(chains([2, 1, -1, -1], 7))
    assert found.next_tokens[2:].tolist() == [-1, -1]
    assert found.num_accepted_drafts[2:].tolist() == [0, 0]


def test_strided_rows(interpreted):
    batch = chains([3, 2], 40, seed=6)
    padded = {name: torch.nn.functional.pad(batch[name], (3, 5)) for name in ("p", "q")}
    strided = {name: padded[name][:, 3:43] for name in padded}
    found, expected = assert_reference(batch | strided), assert_reference(batch)
    assert found.next_tokens.tolist() == expected.next_tokens.tolist()


@triton.jit
def without_memory(b_odds, count, DRAFTS: tl.constexpr):
    return tl.minimum(b_odds, 1.0)


def test_twin_ratios_without_memory(interpreted, monkeypatch):
    """Each r_i by its own draft alone, which is `residual`'s ratio, must not pass."""
    monkeypatch.setattr(kernel, "_prefix_ratios", without_memory)
    with pytest.raises(AssertionError):
        assert_reference(chains([6] * 8, 7, seed=3, near=1.0))


# The law


P = torch.tensor([0.50, 0.25, 0.25])
Q = torch.tensor([0.98, 0.01, 0.01])
RUNS = 120


def p_value() -> float:
    """Return the chi-square test's, of the first token that each of many requests emits.

    Two drafts each, so that the first is also judged by what follows it.
    """
    generator = torch.Generator().manual_seed(9)
    x = draw(Q.expand(2 * RUNS, -1), generator).view(RUNS, 2)
    rows = torch.arange(3 * RUNS)
    batch = {
        "p": P.expand(3 * RUNS, -1),
        "q": Q.expand(2 * RUNS, -1),
        "drafts": torch.cat([x[:, :1], x], 1).flatten(),
        "rows_start": torch.arange(RUNS + 1) * 3,
        "seeds": rows // 3 * 7919 + 1,
        "positions": rows % 3 + 5,
        "max_drafts": 2,
    }
    found = kernel.verify_block(**batch)
    first = torch.where(found.num_accepted_drafts > 0, x[:, 0], found.next_tokens)
    seen = torch.bincount(first, minlength=3)
    return stats.chisquare(seen.tolist(), (P.double() / P.double().sum() * RUNS).tolist()).pvalue


def test_law():
    assert p_value() > 1e-3


exact_left = residual.left_of


@triton.jit
def all_of_p(p_row, q_row, x, scale, o_v, V, taken, POINT: tl.constexpr):
    return exact_left(p_row, q_row, x, scale, o_v, V, 0, POINT)


def test_twin_recovering_from_p_is_biased(monkeypatch):
    monkeypatch.setattr(residual, "left_of", all_of_p)
    assert p_value() < 1e-4


def test_wrong_arguments_are_refused():
    good = chains([2, 2], 7)
    with pytest.raises(ValueError, match="q must be"):
        op.verify_block(**(good | {"q": torch.ones(4, 8)}))
