"""Top-k and top-p by bisection keep exactly what sorting keeps."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from outrider.kernels import renorm_prob
from outrider.kernels.renorm_prob import reference
from outrider.kernels.renorm_prob import triton as kernel

NAMES = ("top_k_renorm_prob", "top_p_renorm_prob")
LIMITS = {
    "top_k_renorm_prob": (torch.int32, (1, 2, 5, 40, 2**30)),
    "top_p_renorm_prob": (torch.float32, (0.0, 0.1, 0.5, 0.95, 1.0)),
}


def rows(shape, seed=0, spread=3.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).softmax(-1).to(dtype)


def check(name, probs, limit):
    """The same tokens are kept, and what they weigh is right to 4 units in the last place."""
    ours, theirs = getattr(kernel, name)(probs, limit), getattr(reference, name)(probs, limit)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=4 * 2.0**-23, atol=0)
    return ours


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 3001])
@pytest.mark.parametrize("name", NAMES)
def test_a_limit_for_each_row(name, vocab_size, interpreted):
    dtype, values = LIMITS[name]
    check(name, rows((len(values), vocab_size)), torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("name", NAMES)
def test_one_limit_for_all_rows(name, interpreted):
    for limit in LIMITS[name][1]:
        check(name, rows((1, 50)), limit)


@pytest.mark.parametrize("name", NAMES)
def test_a_large_vocabulary(name, interpreted):
    dtype, _ = LIMITS[name]
    limit = torch.tensor([50 if dtype is torch.int32 else 0.9], dtype=dtype)
    assert (check(name, rows((1, 151_936)), limit) > 0).sum() >= 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_ties_at_the_threshold_stay(name, dtype, interpreted):
    # coarse values tie often: in bfloat16 a row of 1000 has a few hundred different ones
    probs = rows((2, 1000), seed=1, spread=1.0).to(torch.bfloat16).to(dtype)
    kept = (check(name, probs, 7 if name.startswith("top_k") else 0.3) > 0).sum(-1)
    uniform = check(name, torch.full((2, 9), 1 / 9), 3 if name.startswith("top_k") else 0.3)
    assert (kept >= 7).all()
    assert (uniform > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_saturated_masked_and_empty_rows(name, interpreted):
    probs = torch.zeros(5, 33)
    probs[0, 7] = 1.0
    probs[1, 4], probs[1, 9] = 1 - 2.0**-24, 2.0**-24
    probs[2, 30:] = torch.tensor([0.5, 0.25, 0.25])
    probs[3, 0], probs[3, 1] = 1.0, 1e-42  # a denormal is a probability too
    for limit in LIMITS[name][1][1::2]:
        assert (check(name, probs, limit)[4] == 0).all()


def test_weights_above_one_are_found_too(interpreted):
    weights = torch.tensor([[3.0, 2.0, 5.0, 0.5, 1e30]])
    for k in (1, 2, 3):
        assert (check("top_k_renorm_prob", weights, k) > 0).sum() == k


@pytest.mark.parametrize("name", NAMES)
def test_rows_apart_in_memory_and_no_rows(name, interpreted):
    wide = rows((4, 100))
    limit = LIMITS[name][1][2]
    check(name, wide[::2, :77], limit)
    check(name, wide[:0], limit)


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000], ids=["NaN", "-NaN"])
@pytest.mark.parametrize("name", NAMES)
def test_nan_spreads_over_its_row_only(name, bits, interpreted):
    probs = rows((2, 30))
    probs.view(torch.int32)[0, 11] = bits
    out, expected = (getattr(m, name)(probs, LIMITS[name][1][2]) for m in (kernel, reference))
    assert out[0].isnan().all()
    assert expected[0].isnan().all()
    assert torch.equal(out[1] > 0, expected[1] > 0)


def test_definition():
    """The reference against the sentence that defines it, for every prefix of a small row."""
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.2, 0.1]])
    for k, kept in ((1, [1]), (2, [1, 2, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3, 4])):
        out = renorm_prob.top_k_renorm_prob(probs, k)
        assert out.nonzero()[:, 1].tolist() == kept
        torch.testing.assert_close(out[0, kept], probs[0, kept] / probs[0, kept].sum())
    for top_p, kept in ((0.3, [1]), (0.4, [1]), (0.41, [1, 2, 3]), (0.8, [1, 2, 3])):
        assert renorm_prob.top_p_renorm_prob(probs, top_p).nonzero()[:, 1].tolist() == kept


def test_arguments():
    probs = rows((2, 5))
    with pytest.raises(ValueError, match="flatten"):
        renorm_prob.top_k_renorm_prob(probs[0], 1)
    with pytest.raises(ValueError, match="contiguous"):
        renorm_prob.top_p_renorm_prob(probs.t(), 0.5)
    with pytest.raises(ValueError, match="each of 2 rows"):
        renorm_prob.top_p_renorm_prob(probs, torch.tensor([0.5, 0.5, 0.5]))
    with pytest.raises(TypeError, match="integers"):
        renorm_prob.top_k_renorm_prob(probs, torch.tensor([0.5, 0.5]))


@triton.jit
def _one_short(p_row, V, needed, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr):
    # a bisection that stops one step early, as with `high - low > 2`
    low = tl.full([], 0, tl.int32)
    return tl.maximum(_FIND(p_row, V, needed, BY_MASS, BLOCK, P) - 1, low)


_FIND = kernel._find_last


@pytest.mark.parametrize("name", NAMES)
def test_twin_a_threshold_off_by_one_is_caught(name, interpreted, monkeypatch):
    probs = torch.full((1, 40), 0.02)
    probs[0, 20:] = torch.nextafter(probs[0, 0], torch.tensor(0.0))  # the next number below
    limit = 20 if name.startswith("top_k") else 0.39
    check(name, probs, limit)
    monkeypatch.setattr(kernel, "_find_last", _one_short)
    with pytest.raises(AssertionError):
        check(name, probs, limit)
