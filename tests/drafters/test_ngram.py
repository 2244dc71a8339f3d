"""Prompt lookup."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import (
    Budget,
    KeyedCoins,
    Proposal,
    Request,
    SamplingParams,
    Verdict,
    chain,
    settle,
)
from outrider.drafters import NgramDrafter, NoDrafter


def propose(drafter, request, k):
    return drafter.propose([request], Budget((k,), "match", KeyedCoins())).tokens.tolist()


def request(prompt):
    return Request(0, tuple(prompt), SamplingParams(max_tokens=1000), 0)


def emit(drafter, made, tokens):
    (outcome,) = settle(
        [made],
        Proposal.of([chain(tokens[:-1])]),
        Verdict(torch.arange(len(tokens) - 1)[None], torch.tensor(tokens[-1:])),
    )
    drafter.observe([outcome])
    outcome.apply()


def naive(tokens, k, sizes=range(2, 5)):
    """The longest n-gram at the end that occurred before, its last earlier occurrence."""
    for n in reversed(sizes):
        gram = tokens[-n:]
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) >= n and tokens[end - n : end] == gram:
                grown = list(tokens)
                for i in range(k):
                    grown.append(grown[end + i])
                return grown[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8),
    st.integers(0, 6),
)
def test_same_as_a_search(prompt, steps, k):
    drafter, made = NgramDrafter(), request(prompt)
    drafter.start([made])
    for tokens in steps:
        assert propose(drafter, made, k) == naive(made.tokens_from(0), k)
        emit(drafter, made, tokens)
    assert propose(drafter, made, k) == naive(made.tokens_from(0), k)
    drafter.stop([made])
    drafter.stop([made])  # twice does no harm


def test_a_repetition_goes_on():
    drafter, made = NgramDrafter(), request([1, 2, 3, 1, 2, 3, 1, 2])
    drafter.start([made])
    assert propose(drafter, made, 7) == [3, 1, 2, 3, 1, 2, 3]


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="min_n"):
        NgramDrafter(min_n=3, max_n=2)


def test_no_drafter():
    drafter, made = NoDrafter(), request([1])
    drafter.start([made])
    assert propose(drafter, made, 5) == []
    emit(drafter, made, [1])
    drafter.stop([made])
