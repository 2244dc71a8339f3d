"""Coins inside kernels: the integers of `outrider.core.coins`, and its noise.

Regimes: seeds of one and of two words, negative ones too; positions beyond 2**31 (the hash takes
32 bits of them); the first and the last column of a vocabulary; both ends of the hash.
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from outrider.core import KeyedCoins, Stream, gumbel_noise
from outrider.core.coins import murmur_hash32
from outrider.kernels import keyed_coins, launch_options

SEEDS = [0, 1, 12345, 2**31 - 1, 2**32 - 1, 2**32, 2**40 + 7, 2**63 - 1, -1, -(2**63)]
POSITIONS = [0, 1, 17, 4096, 2**31 - 1, 2**33 + 5]
COLUMNS = [0, 1, 2, 3, 999, 151_935, 262_143]
LAUNCH = launch_options(4)
STREAMS = [Stream.DRAFT, Stream.ACCEPT, Stream.RECOVER]


def keys() -> tuple[torch.Tensor, ...]:
    grid = torch.cartesian_prod(*(torch.tensor(x) for x in (SEEDS, POSITIONS, COLUMNS)))
    return tuple(column.contiguous() for column in grid.unbind(1))


@triton.jit
def hash_kernel(seeds, positions, columns, out, uniforms, N, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    m = o < N
    seed, position = tl.load(seeds + o, m, 0), tl.load(positions + o, m, 0)
    h = keyed_coins.murmur_hash32(seed, position, tl.load(columns + o, m, 0))
    tl.store(out + o, h.to(tl.int64), m)
    tl.store(uniforms + o, keyed_coins.uniform(h), m)


@triton.jit
def gumbel_kernel(hashes, out, N, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    h = tl.load(hashes + o, o < N, 0).to(tl.uint32)
    tl.store(out + o, keyed_coins.gumbel(h), o < N)


@triton.jit
def fork_kernel(seeds, starts, out, N, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    seed, start = tl.load(seeds + o, o < N, 0), tl.load(starts + o, o < N, 0)
    tl.store(out + o, keyed_coins.fork(seed, STREAM, start), o < N)
    # scalars take the same road as blocks
    one = keyed_coins.fork(tl.load(seeds + 7), STREAM, tl.load(starts + 7))
    tl.store(out + N, one)


@triton.jit
def may_win_kernel(hashes, odds, out, N, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    h = tl.load(hashes + o, o < N, 0).to(tl.uint32)
    yes = keyed_coins.may_win(h, tl.load(odds + o, o < N, 0.0))
    tl.store(out + o, yes.to(tl.int64), o < N)


def hashed(kernel=hash_kernel):
    seeds, positions, columns = keys()
    n = len(seeds)
    out, uniforms = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.float64)
    block = triton.next_power_of_2(n)
    kernel[(1,)](seeds, positions, columns, out, uniforms, n, BLOCK=block, **LAUNCH)
    return out, uniforms


def test_hash_and_uniform_equal_core(interpreted):
    expected = murmur_hash32(*keys())
    out, uniforms = hashed()
    assert torch.equal(out, expected)
    assert torch.equal(uniforms, (expected.double() + 0.5) / 2.0**32)


def test_twin_a_wrong_rotation_is_seen(interpreted, monkeypatch):
    @triton.jit
    def mix(h, k):
        k *= 0xCC9E2D51
        h ^= ((k << 16) | (k >> 16)) * 0x1B873593
        return ((h << 13) | (h >> 19)) * 5 + 0xE6546B64

    assert torch.equal(hashed()[0], murmur_hash32(*keys()))
    monkeypatch.setattr(keyed_coins, "_mix", mix)
    assert not torch.equal(hashed()[0], murmur_hash32(*keys()))


def noise_of(hashes: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(hashes), dtype=torch.float64)
    block = triton.next_power_of_2(len(hashes))
    gumbel_kernel[(1,)](hashes, out, len(hashes), BLOCK=block, **LAUNCH)
    return out


# Noise is -log(e), e = -log(u); u is an exact quotient, rounded once, and so the same everywhere.
# A `log` is within 3 units in the last place (OpenCL's limit; CUDA's and the CPU's are closer), so
# two of them differ by at most 6 eps relative to e. That moves log(e) by 6 eps, and the outer log
# itself by 6 eps |noise|: 6 eps (1 + |noise|) in all.
NOISE_BOUND = 6 * torch.finfo(torch.float64).eps


def some_noise() -> tuple[torch.Tensor, torch.Tensor]:
    """Return hashes, and core's noise of them."""
    seeds, positions = torch.tensor([3, 2**40 + 7]), torch.tensor([5, 9])
    hashes = murmur_hash32(seeds[:, None], positions[:, None], torch.arange(500))
    return hashes.flatten(), gumbel_noise(seeds, positions, 500).flatten()


def test_noise_is_cores(interpreted):
    hashes, expected = some_noise()
    found = noise_of(hashes)
    torch.testing.assert_close(found, expected, rtol=NOISE_BOUND, atol=NOISE_BOUND)


def test_twin_noise_of_a_rounded_uniform_is_seen():
    """In float32 throughout, or from a uniform that was rounded to float32 on the way."""
    hashes, expected = some_noise()
    u = (hashes.double() / (2**32 - 1)).clamp(max=1 - 2.0**-33)
    for found in (-(-u.float().log()).log(), -(-u.float().double().log()).log()):
        assert not torch.allclose(found.double(), expected, rtol=NOISE_BOUND, atol=NOISE_BOUND)


def test_noise_is_finite_at_both_ends(interpreted):
    ends = noise_of(torch.tensor([0, 1, 2**32 - 2, 2**32 - 1]))
    assert torch.isfinite(ends).all()
    assert (ends.diff() > 0).all()
    least = -math.log(torch.finfo(torch.float64).max)
    assert ends[0].item() == pytest.approx(least, rel=NOISE_BOUND)
    # a constant rounded to float32 would be 1, and the noise infinite
    assert ends[3].item() == pytest.approx(-math.log(-math.log1p(-(2.0**-33))), rel=1e-9)


@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: s.name)
def test_fork_equals_core(interpreted, stream):
    seeds, starts, _ = keys()
    n = len(seeds)
    out = torch.empty(n + 1, dtype=torch.int64)
    fork_kernel[(1,)](seeds, starts, out, n, STREAM=stream.value, BLOCK=512, **LAUNCH)
    expected = KeyedCoins().fork(seeds, stream, starts)
    assert torch.equal(out[:n], expected)
    assert out[n] == expected[7]


def test_streams_have_cores_numbers():
    found = [keyed_coins.DRAFT.value, keyed_coins.ACCEPT.value, keyed_coins.RECOVER.value]
    assert found == [stream.value for stream in STREAMS]


def contenders(hashes: torch.Tensor, odds: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(hashes), dtype=torch.int64)
    block = triton.next_power_of_2(len(hashes))
    may_win_kernel[(1,)](hashes, odds, out, len(hashes), BLOCK=block, **LAUNCH)
    return out.bool()


def edge_of_winning() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hashes, odds about as large as they need, and whether the hash wins."""
    ends = torch.tensor([0, 1, 2**31, 2**32 - 1000, 2**32 - 3, 2**32 - 2, 2**32 - 1])
    hashes = torch.cat([ends, murmur_hash32(*keys())[:100]]).repeat_interleave(5)
    u = (hashes.double() / (2**32 - 1)).clamp(min=1e-300, max=1 - 2.0**-33)
    near = torch.tensor([0.5, 1 - 1e-6, 1 + 1e-6, 2.0, 8.0]).double().repeat(len(u) // 5)
    odds = -u.log() * near
    return hashes, odds.float(), near > 1


def test_whatever_can_win_is_let_through(interpreted):
    hashes, odds, wins = edge_of_winning()
    assert contenders(hashes, odds)[wins].all()


def test_few_others_are_let_through(interpreted):
    """Without this the test above would pass for a filter that lets everything through."""
    hashes = murmur_hash32(*keys())
    odds = torch.full(hashes.shape, 1 / 64)
    assert 0 < contenders(hashes, odds).sum() < len(hashes) / 16


def test_nothing_and_everything(interpreted):
    hashes = torch.tensor([0, 7, 2**32 - 2])
    assert contenders(hashes, torch.full((3,), torch.inf)).all()
    assert not contenders(hashes, torch.zeros(3)).any()
    assert not contenders(hashes, torch.full((3,), torch.nan)).any()
