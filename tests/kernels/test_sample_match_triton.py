"""Sampling and matching in Triton: the tokens of `core`, integer for integer.

What each regime would catch:

* one row, V = 7: a tile larger than the row; V = 1000 and 5000: several tiles, several splits
* mixed rows: a parameter read from the wrong row, a filter that leaks into its neighbours
* coarse logits (few distinct values): ties at the k-th token, at the boundary of top-p, at the top
* zeros of both signs: they are equal as logits and differ as bits
* saturated rows, masked rows, rows of -inf: infinities that meet in a difference
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from outrider.core import (
    ROOT,
    Draft,
    KeyedCoins,
    PointMass,
    Proposal,
    Request,
    Rows,
    SamplingParams,
    chain,
    target_distribution,
)
from outrider.core import match as core_match
from outrider.kernels import keyed_coins, sample_match
from outrider.kernels.sample_match import DeviceCoins, reference
from outrider.kernels.sample_match import triton as kernel

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "greedy, with filters": {"temperature": 0.0, "top_k": 3, "top_p": 0.3, "min_p": 0.2},
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 4},
    "top-k of all": {"top_k": 10**6},
    "top-k of one": {"top_k": 1, "temperature": 1.5},
    "top-p": {"top_p": 0.8},
    "small top-p": {"top_p": 0.05},
    "min-p": {"min_p": 0.1},
    "top-k, top-p": {"top_k": 5, "top_p": 0.7},
    "everything": {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
}

FEW = ["greedy", "plain", "top-k", "top-p", "everything"]


def noise(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def parameters(rows: list[dict], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return the parameters of rows: temperature, top_k, top_p, min_p, seeds, positions."""
    full = [OFF | row for row in rows]
    floats = {name: torch.tensor([row[name] for row in full]) for name in OFF}
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(0, 2**62, (len(rows),), generator=generator)
    positions = torch.randint(0, 5000, (len(rows),), generator=generator)
    return (*floats.values(), seeds, positions)


def assert_reference(logits: torch.Tensor, columns: tuple[torch.Tensor, ...]) -> torch.Tensor:
    found = kernel.sample(logits, *columns)
    assert found.tolist() == reference.sample(logits, *columns).tolist()
    return found


@pytest.mark.parametrize("vocab", [1, 7, 1000, 5000])
def test_mixed_rows(interpreted, vocab):
    rows = list(SAMPLINGS.values())
    together = assert_reference(noise(len(rows), vocab, seed=1), parameters(rows))
    assert len(set(together.tolist())) > 3 or vocab == 1


def test_one_row(interpreted):
    for row in SAMPLINGS.values():
        assert_reference(noise(1, 7), parameters([row]))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_reference_is_core(name):
    """In core top-p adds float32 masses: these rows have none within 1e-5 of the boundary."""
    params = OFF | SAMPLINGS[name]
    logits, columns = noise(20, 300, seed=2), parameters([params] * 20)
    requests = [
        Request(i, (1,) * (position + 1), SamplingParams(**params), seed=seed)
        for i, (seed, position) in enumerate(zip(*(c.tolist() for c in columns[4:]), strict=True))
    ]
    expected = target_distribution(logits, Rows.of(requests, Proposal.empty(20))).draw(KeyedCoins())
    assert sample_match.sample(logits, *columns).tolist() == expected.tolist()


def test_whole_vocabulary(interpreted):
    """151,936 tokens: 38 splits for the first row, some twenty passes of one program for the other.

    The smallest of these logits decide nothing, so a flat row makes the far end count.
    """
    vocab = 151_936
    logits = torch.stack([noise(vocab, scale=0.1), noise(vocab, seed=3, scale=2.0)])
    found = assert_reference(logits, parameters([{}, {"top_k": 1000, "top_p": 0.9}], seed=4))
    assert found[0] > 100_000


@pytest.mark.parametrize("name", SAMPLINGS)
def test_ties(interpreted, name):
    """Few distinct values: the k-th has equals, and top-p ends among equals."""
    logits = (noise(2, 60, seed=5) / 2).round()
    assert_reference(logits, parameters([SAMPLINGS[name]] * 2, seed=6))


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 4), (0.51, 5), (0.0625, 1)])
def test_equals_are_kept_from_the_lowest_id(interpreted, top_p, kept):
    """Eight equal tokens, and masses that are exact: no rounding hides the boundary."""
    rows = 3 * kept
    found = assert_reference(torch.zeros(rows, 8), parameters([{"top_p": top_p}] * rows))
    assert 0 in found
    assert found.max() == kept - 1


def test_zeros_of_both_signs_are_equal(interpreted):
    logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0]]).repeat(10, 1)
    found = assert_reference(logits, parameters([{"top_k": 1}] * 10))
    assert set(found.tolist()) == {0, 1, 3, 4}


def test_greedy_takes_the_lowest_of_equals(interpreted):
    logits = torch.full((2, 9000), -1.0)
    logits[:, [4095, 4096, 8999]] = 2.0
    logits[1, 4095] = -2.0
    assert assert_reference(logits, parameters([SAMPLINGS["greedy"]] * 2)).tolist() == [4095, 4096]


@pytest.mark.parametrize("name", FEW)
def test_infinite_and_extreme_rows(interpreted, name):
    logits = noise(6, 50, seed=7)
    logits[0], logits[0, 30] = -math.inf, 1.0  # all masked but one
    logits[1], logits[1, 30] = -1e30, 1e30  # saturated
    logits[2, ::2] = -math.inf
    logits[3] = -math.inf
    logits[4, ::3] = math.nan  # counts as -inf
    logits[5, 20:] -= 1e4
    found = assert_reference(logits, parameters([SAMPLINGS[name]] * 6))
    assert found[:2].tolist() == [30, 30]
    assert found[2] % 2 == 1
    assert found[3] == 0
    assert found[4] % 3 > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(interpreted, dtype):
    rows = [SAMPLINGS[name] for name in FEW]
    assert_reference(noise(len(rows), 300, seed=8).to(dtype), parameters(rows))


def test_strided_rows(interpreted):
    padded = noise(2 * len(FEW), 320, seed=9)
    logits = padded[::2, 3:303]
    columns = parameters([SAMPLINGS[name] for name in FEW])
    assert torch.equal(assert_reference(logits, columns), kernel.sample(logits.clone(), *columns))


def test_no_rows(interpreted):
    assert kernel.sample(torch.zeros(0, 7), *parameters([])).tolist() == []


def rows_of_top_p() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    return noise(12, 12, seed=10, scale=1.0), parameters([{"top_p": 0.6}] * 12)


exact_mass = kernel._mass_before


@triton.jit
def too_much_before(p_row, V, t, largest, x, token, BLOCK: tl.constexpr):
    mass = exact_mass(p_row, V, t, largest, x, token, BLOCK)
    return tl.where(token < V, mass * 1.3, mass)


@triton.jit
def too_strict(h, odds):
    return keyed_coins.may_win(h, odds * 0.3)


def test_twin_wrong_mass(interpreted, monkeypatch):
    """A boundary that is off by a token must not pass."""
    assert_reference(*rows_of_top_p())
    monkeypatch.setattr(kernel, "_mass_before", too_much_before)
    with pytest.raises(AssertionError):
        assert_reference(*rows_of_top_p())


def test_twin_filter_that_is_too_strict(interpreted, monkeypatch):
    """Tokens that could have won must not be ruled out."""
    monkeypatch.setattr(kernel, "may_win", too_strict)
    with pytest.raises(AssertionError):
        assert_reference(noise(8, 5000, seed=11, scale=1.0), parameters([{}] * 8))


# Matching


def random_tree(size: int, generator: torch.Generator) -> Draft:
    """Return a tree over two tokens: many drafts match, and many siblings are equal."""
    parents = [int(torch.randint(-1, i, (), generator=generator)) for i in range(size)]
    tokens = torch.randint(0, 2, (size,), generator=generator).tolist()
    return Draft(tuple(tokens), tuple(parents), PointMass())


def layout(proposal: Proposal) -> tuple[torch.Tensor, ...]:
    """Return the drafts and parents of each row, and where each request's rows start."""
    drafts = torch.full((proposal.num_rows,), -7)
    drafts[list(proposal.draft_rows)] = proposal.tokens
    parents = torch.full((proposal.num_rows,), -1)
    parents[list(proposal.draft_rows)] = torch.tensor(proposal.parents, dtype=torch.int64) + 1
    return drafts, parents, torch.tensor([*proposal.root_rows, proposal.num_rows])


PROPOSALS = {
    "one row": Proposal.empty(1),
    "no drafts": Proposal.empty(3),
    "ragged chains": Proposal.of([chain(t) for t in ((1, 0, 1), (), (1,), (0, 0, 0, 0, 0))]),
    "equal siblings": Proposal.of([Draft((1, 1, 0, 1), (ROOT, ROOT, 0, 1), PointMass())]),
}
GENERATOR = torch.Generator().manual_seed(12)
for n in (3, 8, 40, 100):
    PROPOSALS[f"trees of {n}"] = Proposal.of([random_tree(n, GENERATOR) for _ in range(6)])


def assert_core_match(proposal: Proposal, y: torch.Tensor, rows: tuple[torch.Tensor, ...]) -> None:
    expected = core_match(y, proposal)
    for found in (
        kernel.match(y, *rows, proposal.max_depth),
        sample_match.match(y, *rows, proposal.max_depth),
    ):
        shifted = torch.where(expected.accepted >= 0, expected.accepted + 1, -1)
        assert torch.equal(found.accepted, shifted)
        assert torch.equal(found.num_accepted_drafts, expected.num_accepted_drafts)
        assert torch.equal(found.next_tokens, expected.next_tokens)


@pytest.mark.parametrize("name", PROPOSALS)
def test_match_is_cores(interpreted, name):
    proposal = PROPOSALS[name]
    for _ in range(3):
        y = torch.randint(0, 2, (proposal.num_rows,), generator=GENERATOR)
        assert_core_match(proposal, y, layout(proposal))


def test_match_accepts_a_whole_chain(interpreted):
    """Deeper than one tile of rows."""
    proposal = Proposal.of([chain(range(70))])
    y = torch.arange(71)
    assert_core_match(proposal, y, layout(proposal))
    assert kernel.match(y, *layout(proposal), 70).num_accepted_drafts.item() == 70


def test_match_stops_at_the_depth_that_is_asked_for(interpreted):
    rows = layout(Proposal.of([chain(range(9))]))
    for match in (kernel.match, reference.match):
        found = match(torch.arange(10), *rows, 4)
        assert found.accepted.tolist() == [[1, 2, 3, 4]]
        assert found.next_tokens.tolist() == [4]


def test_match_of_padding(interpreted):
    """Requests without rows, as a captured graph pads a batch: nothing is kept or emitted."""
    drafts, parents, starts = layout(PROPOSALS["ragged chains"])
    starts = torch.cat([starts, starts[-1:], starts[-1:]])
    y = torch.ones(len(drafts), dtype=torch.int64)
    for match in (kernel.match, reference.match):
        found = match(y, drafts, parents, starts, 5)
        assert found.next_tokens.tolist() == [1, 1, 1, 1, -1, -1]
        assert found.num_accepted_drafts.tolist() == [1, 0, 1, 0, 0, 0]


def test_twin_parents_off_by_one(interpreted):
    """Parents counted among drafts instead of rows must not pass."""
    proposal = PROPOSALS["trees of 40"]
    drafts, parents, starts = layout(proposal)
    with pytest.raises(AssertionError):
        assert_core_match(proposal, drafts.new_ones(len(drafts)), (drafts, parents - 1, starts))


# What is refused


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"logits": torch.zeros(3, 7, dtype=torch.float64)}, "float32, bfloat16 or float16"),
        ({"logits": torch.zeros(7, 3).t()}, r"call \.contiguous"),
        ({"logits": torch.zeros(7)}, r"\[N, V\]"),
        ({"top_k": torch.zeros(3)}, "top_k must be a contiguous"),
        ({"seeds": torch.zeros(2, dtype=torch.int64)}, "seeds must be a contiguous"),
    ],
)
def test_wrong_arguments_are_refused(change, error):
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    good = {"logits": torch.zeros(3, 7), **dict(zip(names, parameters([{}] * 3), strict=True))}
    assert len(sample_match.sample(**good)) == 3
    with pytest.raises((TypeError, ValueError), match=error):
        sample_match.sample(**(good | change))


def test_device_coins_are_keyed_coins(interpreted, monkeypatch):
    monkeypatch.setenv("OUTRIDER_KERNELS", "triton")
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 1000, generator=g) * 3
    seeds, positions = torch.arange(5) + 2**40, torch.arange(5) * 7
    found = DeviceCoins().draw(logits, seeds, positions)
    assert torch.equal(found, KeyedCoins().draw(logits, seeds, positions))
    assert not torch.equal(found, DeviceCoins().draw(logits, seeds + 1, positions))
