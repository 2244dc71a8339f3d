"""The target's distribution: each transform against Transformers' own, and along paths."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import (
    ROOT,
    TRANSFORMS,
    Draft,
    KeyedCoins,
    PointMass,
    Proposal,
    Request,
    Rows,
    SamplingParams,
    chain,
    target_distribution,
    transformed,
)
from outrider.errors import NoToken

V = 11


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def request(i: int = 0, output: tuple[int, ...] = (), **params) -> Request:
    made = Request(i, (1, 2, 3), SamplingParams(**params), seed=i)
    made.output.extend(output)
    return made


def distribution(requests, proposal, values):
    return target_distribution(values, Rows.of(requests, proposal))


def plain(values, **params):
    """Return the logits of one request at its last token."""
    return distribution([request(**params)], Proposal.empty(1), values).logits


processors = pytest.importorskip("transformers.generation.logits_process")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"top_k": 3}, lambda: processors.TopKLogitsWarper(3)),
        ({"top_k": 50}, lambda: processors.TopKLogitsWarper(V)),
        ({"top_p": 0.7}, lambda: processors.TopPLogitsWarper(0.7)),
        ({"top_p": 0.01}, lambda: processors.TopPLogitsWarper(0.01)),
        ({"min_p": 0.2}, lambda: processors.MinPLogitsWarper(0.2)),
        ({"temperature": 0.6}, lambda: processors.TemperatureLogitsWarper(0.6)),
        ({"repetition_penalty": 1.4}, lambda: processors.RepetitionPenaltyLogitsProcessor(1.4)),
    ],
)
def test_transform_is_that_of_transformers(params, warper, seed):
    values = logits(1, seed)
    expected = warper()(torch.tensor([[1, 2, 3]]), values.clone())
    torch.testing.assert_close(plain(values, **({"temperature": 1.0} | params)), expected)


def test_order_is_that_of_transformers():
    """Truncations act on what the ones before them have left."""
    values = logits(1, 7)
    found = plain(values, temperature=0.8, top_k=5, top_p=0.8, min_p=0.1)
    expected = values.clone()
    for warper in (
        processors.TemperatureLogitsWarper(0.8),
        processors.TopKLogitsWarper(5),
        processors.TopPLogitsWarper(0.8),
        processors.MinPLogitsWarper(0.1),
    ):
        expected = warper(torch.tensor([[1]]), expected)
    torch.testing.assert_close(found, expected)


def test_input_is_left_alone():
    values = logits(1)
    before = values.clone()
    plain(values, temperature=0.5, top_k=2, repetition_penalty=2.0, logit_bias={1: 5.0})
    assert torch.equal(values, before)


@given(st.floats(0.01, 1.0), st.integers(0, 10_000))
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, seed):
    values = logits(1, seed).double()
    kept = torch.isfinite(plain(values, temperature=1.0, top_p=top_p)[0])
    p = values[0].softmax(-1)
    assert p[kept].sum() >= top_p - 1e-9
    assert p[kept].sum() - p[kept].min() < top_p + 1e-9
    assert kept.all() or p[~kept].max() <= p[kept].min()


def test_greedy_ignores_what_only_reorders_nothing():
    """At temperature 0 truncation cannot matter, but penalties and bias do."""
    values = logits(1, 3)
    best = int(values.argmax())
    assert distribution(
        [request(top_k=1, top_p=0.1, min_p=0.9)], Proposal.empty(1), values
    ).probs()[0, best]
    biased = distribution([request(logit_bias={best: -math.inf})], Proposal.empty(1), values)
    assert biased.probs()[0, best] == 0
    assert biased.probs().sum() == 1


def test_greedy_rows_flip_no_coin():
    values = logits(1, 3)
    assert distribution([request()], Proposal.empty(1), values).draw(None).item() == values.argmax()


def test_penalties_advance_along_each_path():
    """A row inside a block has plain decoding's distribution after the drafts that lead to it."""
    params = {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
    }
    draft = Draft((4, 5, 4, 6), (ROOT, 0, 1, 0), PointMass())
    values = logits(5)
    block = distribution([request(output=(7,), **params)], Proposal.of([draft]), values)
    paths = [(), (4,), (4, 5), (4, 5, 4), (4, 6)]
    for row, path in enumerate(paths):
        alone = request(output=(7, *path), **params)
        expected = distribution([alone], Proposal.empty(1), values[row : row + 1])
        assert torch.equal(block.logits[row], expected.logits[0])
        assert block.positions[row] == expected.positions[0]


def test_penalties_by_hand():
    values = torch.zeros(1, V)
    values[0, 1], values[0, 4], values[0, 5] = 2.0, -2.0, 1.0
    found = distribution(
        [
            request(
                output=(4, 4),
                temperature=1.0,
                repetition_penalty=2.0,
                frequency_penalty=0.5,
                presence_penalty=0.25,
            )
        ],
        Proposal.empty(1),
        values,
    ).logits[0]
    assert found[1] == 1.0  # in the prompt: halved
    assert found[4] == -4.0 - 2 * 0.5 - 0.25  # in the output, twice
    assert found[5] == 1.0  # never seen


def test_grammar_sees_each_path():
    asked = []

    def only_the_next(output):
        asked.append(tuple(output))
        allowed = torch.zeros(V, dtype=torch.bool)
        allowed[(output[-1] if output else 0) + 1] = True
        return allowed

    found = distribution([request(grammar=only_the_next)], Proposal.of([chain((1, 2))]), logits(3))
    assert found.logits.argmax(-1).tolist() == [1, 2, 3]
    assert asked == [(), (1,), (1, 2)]


def test_requests_in_a_batch_do_not_mix():
    """Each request's rows have the distribution that they have alone."""
    params = [
        {},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5, "presence_penalty": 1.0},
        {"temperature": 1.3, "min_p": 0.3, "logit_bias": {2: 4.0}},
        {"temperature": 1.0, "grammar": lambda output: torch.arange(V) % 2 == 0},
    ]
    requests = [request(i, (8, i), **p) for i, p in enumerate(params)]
    proposal = Proposal.of([chain((9,) * i) for i in range(len(params))])
    values = logits(proposal.num_rows)
    together = distribution(requests, proposal, values)
    for i, alone in enumerate(requests):
        start = proposal.root_rows[i]
        own = slice(start, start + proposal.num_drafts[i] + 1)
        expected = distribution([alone], Proposal.of([chain((9,) * i)]), values[own])
        assert torch.equal(together.logits[own], expected.logits)
        assert torch.equal(together.probs()[own], expected.probs())
        assert together.positions[own].tolist() == [4 + d for d in range(i + 1)]
        assert together.seeds[own].tolist() == [i] * (i + 1)


@pytest.mark.parametrize("temperature", [[0.0], [1.0], [0.0, 1.0]], ids=["greedy", "drawn", "both"])
def test_ranked_is_what_would_be_drawn_if_all_before_it_were_impossible(temperature):
    kinds = [SamplingParams(temperature=temperature[r % len(temperature)]) for r in range(6)]
    requests = [Request(r, (1, 2), params, seed=r) for r, params in enumerate(kinds)]
    guess = target_distribution(logits(6), Rows(requests, range(6), [0] * 6, lambda: [()] * 6))
    found, coins = guess.ranked(KeyedCoins(), 4), KeyedCoins()
    for rank in range(4):
        assert torch.equal(found[:, rank], guess.draw(coins))
        impossible = guess.logits.scatter(-1, found[:, rank, None], -math.inf)
        guess = replace(guess, logits=impossible)
    assert guess.ranked(coins, 99).shape == (6, V)


ASKED = {
    "temperature": [0.0, 0.7, 1.0], "top_k": [0, 2], "top_p": [1.0, 0.8], "min_p": [0.0, 0.2],
    "repetition_penalty": [1.0, 1.2], "frequency_penalty": [0.0, -0.3],
    "presence_penalty": [0.0, 0.4], "logit_bias": [{}, {3: 1.0}],
    "grammar": [None, lambda _: torch.arange(V) > 4],
}  # fmt: skip


def test_what_is_known_of_a_request_before_its_logits():
    """Raw: no transform changes them. Looks back: a transform asks for the path to the row."""
    values = logits(1)
    for params in product(*ASKED.values()):
        asked, paths = request(output=(4, 4), **dict(zip(ASKED, params, strict=True))), []
        rows = Rows([asked], [0], [0], lambda paths=paths: paths.append(()) or [()])
        changed = values
        for transform in TRANSFORMS:
            changed = transform(changed, rows)
        assert transformed(values, rows).equal(changed), params
        assert asked.sampling.is_raw == changed.equal(values), params
        assert asked.sampling.looks_back == bool(paths), params


def test_one_position_further_the_coins_are_the_next():
    """The same requests, one token later: greedy rows flip none, the others that of the place."""
    requests = [request(0), request(1, temperature=1.0), request(2, temperature=0.7, top_k=4)]
    first, second = (Rows(requests, range(3), [depth] * 3, lambda: [()] * 3) for depth in (0, 1))
    later = logits(3, seed=1)
    found = target_distribution(logits(3), first).after(transformed(later, first))
    expected = target_distribution(later, second)
    assert found.draw(KeyedCoins()).equal(expected.draw(KeyedCoins()))
    assert found.positions.equal(expected.positions)
    assert found.logits.equal(expected.logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.0, math.nan, 1.0], "NaN"),
        ([-math.inf] * 3, "all are ruled out"),
        ([-math.inf, 1.0, 0.0], None),
    ],
)
def test_rows_without_a_token(temperature, values, said):
    """NaN, or nothing left, raises where a token is to be emitted, and nowhere else."""
    request = Request(0, (1,), SamplingParams(temperature=temperature), 0)
    rows = Rows([request], [0, 0], [0, 1], lambda: [(), (1,)])
    p = target_distribution(torch.tensor([[0.0, 1.0, 2.0], values]), rows)
    p.check([0])
    if said is None:
        p.check([0, 1])
    else:
        with pytest.raises(NoToken, match=said):
            p.check([0, 1])


def test_an_infinite_logit():
    """It is the largest for a greedy request; no distribution has it."""
    for temperature, fails in ((0.0, False), (1.0, True)):
        request = Request(0, (1,), SamplingParams(temperature=temperature), 0)
        p = target_distribution(
            torch.tensor([[0.0, math.inf]]), Rows([request], [0], [0], lambda: [()])
        )
        if fails:
            with pytest.raises(NoToken, match="infinity"):
                p.check([0])
        else:
            p.check([0])


def test_a_function_of_the_request_changes_the_logits_of_each_row_after_its_own_path():
    asked = []

    def process(output, values):
        asked.append(tuple(output))
        return values + len(output)

    requests = [request(0, output=(4,), process=process), request(1)]
    proposal = Proposal.of([chain([5, 6]), chain([])])
    values = logits(proposal.num_rows)
    found = distribution(requests, proposal, values).logits
    assert asked == [(4,), (4, 5), (4, 5, 6)]
    changed = values + torch.tensor([1.0, 2.0, 3.0, 0.0])[:, None]
    assert torch.equal(found, changed)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"process": lambda output, values: None}, "process returned NoneType: return logits"),
        ({"process": lambda output, values: values[:3]}, r"process returned a tensor of shape"),
        ({"grammar": lambda output: [True]}, "grammar returned list: return a mask"),
        ({"grammar": lambda output: torch.ones(V)}, r"grammar returned torch.float32"),
    ],
)
def test_what_a_function_of_a_request_returns_is_checked(options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        distribution([request(**options)], Proposal.of([chain([])]), logits(1))
