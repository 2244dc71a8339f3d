"""Prompt lookup."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
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
from outrider.drafters.lookup import TRUST


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


@settings(deadline=None)  # the first example may wait for a compiler
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


@given(st.lists(st.integers(0, 1), min_size=1, max_size=200), st.sampled_from([(1, 1), (1, 6)]))
def test_the_longest_is_found_among_many(prompt, sizes):
    drafter, made = NgramDrafter(*sizes), request(prompt)
    drafter.start([made])
    assert propose(drafter, made, 3) == naive(prompt, 3, range(sizes[0], sizes[1] + 1))


def test_a_longer_match_is_trusted_more():
    for prompt, length in (([1, 2, 3, 4, 0, 3, 4], 2), ([1, 2, 3, 4, 0, 1, 2, 3, 4], 4)):
        drafter, made = NgramDrafter(), request(prompt)
        drafter.start([made])
        proposal = drafter.propose([made], Budget((2,), "match", KeyedCoins()))
        assert proposal.confidences.tolist() == [length / (length + TRUST)] * 2


def test_memory_is_that_of_a_suffix_lookup():
    drafter, made = NgramDrafter(), request(range(32_768))
    drafter.start([made])
    assert drafter.nbytes <= 13 * 32_768


def test_a_repetition_goes_on():
    drafter, made = NgramDrafter(), request([1, 2, 3, 1, 2, 3, 1, 2])
    drafter.start([made])
    assert propose(drafter, made, 7) == [3, 1, 2, 3, 1, 2, 3]


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="need min_n <= max_n"):
        NgramDrafter(min_n=3, max_n=2)


def test_no_drafter():
    drafter, made = NoDrafter(), request([1])
    drafter.start([made])
    assert propose(drafter, made, 5) == []
    emit(drafter, made, [1])
    drafter.stop([made])
