"""Coins: keyed, open at both ends, and those of SGLang."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import KeyedCoins, Stream, coins, gumbel_noise, murmur_hash32

MASK = 0xFFFFFFFF


def reference_hash(seed: int, position: int, column: int) -> int:
    """MurmurHash3 (x86, 32 bits) of the 16 bytes, in Python integers, after its public text."""
    h = 0
    for k in (seed & MASK, seed >> 32, position, column):
        k = (k * 0xCC9E2D51) & MASK
        k = ((k << 15) | (k >> 17)) & MASK
        h ^= (k * 0x1B873593) & MASK
        h = ((h << 13) | (h >> 19)) & MASK
        h = (h * 5 + 0xE6546B64) & MASK
    h ^= 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


def column(value: int) -> torch.Tensor:
    return torch.tensor([value])


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**18))
def test_hash_is_murmur3(seed, position, token):
    found = murmur_hash32(column(seed), column(position), column(token))
    assert found.item() == reference_hash(seed, position, token)


def test_noise_is_sglangs():
    """The formula of SGLang's multinomial_with_seed, -log(-log(h / (2^32 - 1))) in float64."""
    seeds, positions = torch.tensor([1, 2**40 + 7]), torch.tensor([5, 9])
    noise = gumbel_noise(seeds, positions, 1000)
    h = murmur_hash32(seeds[:, None], positions[:, None], torch.arange(1000))
    expected = -(-(h.double() / MASK).log()).log()
    assert torch.equal(noise, expected)


def test_coin_depends_on_its_key_only():
    draw = KeyedCoins().draw
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(6), torch.arange(6) * 3
    together = draw(logits, seeds, positions)
    alone = [draw(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))


def answers_of_coin(accept, prob: float, size: int = 64) -> float:
    """Return how often a coin says yes, over `size` equally spread hashes, the ends included."""
    hashes = (torch.arange(size, dtype=torch.int64) * (2**32 // size)).clone()
    hashes[-1] = MASK
    zeros = torch.zeros(size, dtype=torch.int64)
    original = coins.murmur_hash32
    coins.murmur_hash32 = lambda *_: hashes
    try:
        return accept(torch.full((size,), prob, dtype=torch.float64), zeros, zeros, zeros)
    finally:
        coins.murmur_hash32 = original


def assert_fair(accept) -> None:
    for prob in (0.0, 0.25, 0.5, 0.75, 1.0):
        assert answers_of_coin(accept, prob).double().mean().item() == prob


def test_accept_is_fair_and_open():
    """Never at 0, always at 1, whatever the hash."""
    assert_fair(KeyedCoins().accept)


@pytest.mark.parametrize("closed", ["both ends", "zero"])
def test_twin_closed_interval(closed):
    """`coin <= p` accepts a token of probability 0 when the coin is 0."""
    top = MASK if closed == "both ends" else 2**32

    def accept(prob, seeds, positions, columns):
        return coins.murmur_hash32(seeds, positions, columns).double() / top <= prob

    with pytest.raises(AssertionError):
        assert_fair(accept)


@pytest.mark.parametrize("extreme", [0, MASK])
def test_zero_probability_is_never_drawn(monkeypatch, extreme):
    """SGLang's own noise is infinite at the largest hash, and then beats any logit, -inf too."""
    vocab = 8
    monkeypatch.setattr(coins, "_finalise", lambda h: torch.full_like(h, extreme))
    logits = torch.full((1, vocab), -torch.inf)
    logits[0, 3] = -50.0
    assert KeyedCoins().draw(logits, column(1), column(2)).item() == 3
    assert torch.isfinite(gumbel_noise(column(1), column(2), vocab)).all()


def test_streams_differ():
    fork = KeyedCoins().fork
    seeds, starts = torch.arange(100), torch.full((100,), 17)
    assert torch.equal(fork(seeds, Stream.TARGET, starts), seeds)
    forked = [fork(seeds, s, starts) for s in (Stream.DRAFT, Stream.ACCEPT, Stream.RECOVER)]
    forked.append(fork(seeds, Stream.ACCEPT, starts + 1))
    everything = torch.cat([seeds, *forked])
    assert len(everything.unique()) == len(everything)
    assert (everything >= 0).all()
