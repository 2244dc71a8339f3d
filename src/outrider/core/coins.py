"""Randomness as a function: each coin is keyed, so a token does not depend on how it was reached.

The token at a position is drawn with the Gumbel trick, argmax(logits + G), and the noise G is a
hash of (seed, position, token id). Plain decoding, a verify pass with any number of drafts, and a
drafter that wants to guess what the target will draw all see the same G.

Positions follow SGLang: the coin that decides the token after position t is keyed by t.

*Streams.* `match` uses the TARGET stream. The other rules flip more coins for a position, and look
at positions whose drafts they then throw away; a coin seen once must not be used again. So their
streams differ by purpose and by the position at which the block started.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


class Stream(Enum):
    """What a coin is for."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


class Coins(Protocol):
    """Decides by chance. Rows with the same key get the same coin, all others independent ones."""

    def draw(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draw one token for each row, by softmax(logits).

        logits: [N, V]; seeds, positions: [N] int64 -> [N] int64
        """
        ...

    def accept(self, prob: Tensor, seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        """Say yes with probability `prob`: never at 0, always at 1.

        prob: [N]; seeds, positions, columns: [N] int64 -> [N] bool
        """
        ...

    def fork(self, seeds: Tensor, stream: Stream, starts: Tensor) -> Tensor:
        """Return the seeds of a stream for the blocks that start at these positions: [N]."""
        ...


def _rotl(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & MASK


def _scramble(k: Tensor) -> Tensor:
    return (_rotl((k * 0xCC9E2D51) & MASK, 15) * 0x1B873593) & MASK


def _mix(h: Tensor, scrambled: Tensor) -> Tensor:
    return (_rotl(h ^ scrambled, 13) * 5 + 0xE6546B64) & MASK


def _finalise(h: Tensor) -> Tensor:
    h = h ^ 16  # the length in bytes: seed 8, position 4, column 4
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


def _row_state(seeds: Tensor, positions: Tensor) -> Tensor:
    h = torch.zeros_like(seeds)
    for word in (seeds & MASK, (seeds >> 32) & MASK, positions & MASK):
        h = _mix(h, _scramble(word))
    return h


@lru_cache(maxsize=8)
def _scrambled_columns(vocab_size: int, device: torch.device) -> Tensor:
    return _scramble(torch.arange(vocab_size, device=device))


def murmur_hash32(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Hash (seed, position, column) to 32 bits, in int64: SGLang's function, bit for bit.

    The three arguments broadcast.
    """
    return _finalise(_mix(_row_state(seeds, positions), _scramble(columns)))


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return the noise of each (row, token id), [N, V] float64, as SGLang's sampler computes it.

    One value differs. A hash of 2**32 - 1 makes SGLang's uniform 1 and its noise infinite, which
    emits that token whatever its probability, a masked one included. Here the uniform stays below
    1, so a token of probability 0 is never drawn.
    """
    columns = _scrambled_columns(vocab_size, seeds.device)
    h = _finalise(_mix(_row_state(seeds, positions)[:, None], columns))
    u = (h.to(torch.float64) / MASK).clamp_(max=1 - 2.0**-33)
    # log(0) is clamped for its noise to stay finite, as in SGLang
    e = u.log_().clamp_(min=torch.finfo(torch.float64).min).neg_()
    return e.log_().neg_()


class KeyedCoins:
    """Coins by SGLang's hash: the token that SGLang's `multinomial_with_seed` would draw."""

    def draw(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draw one token for each row, by softmax(logits): argmax of logits + Gumbel noise."""
        noise = gumbel_noise(seeds, positions, logits.shape[-1])
        return noise.add_(logits).argmax(-1)

    def accept(self, prob: Tensor, seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        """Say yes with probability `prob`, by a uniform number in the open interval (0, 1)."""
        u = (murmur_hash32(seeds, positions, columns).to(torch.float64) + 0.5) / 2.0**32
        return u < prob

    def fork(self, seeds: Tensor, stream: Stream, starts: Tensor) -> Tensor:
        """Return the seeds of a stream for the blocks that start at these positions: [N]."""
        if stream is Stream.TARGET:
            return seeds
        low, high = (torch.full_like(seeds, 2 * stream.value + i) for i in (0, 1))
        # two hashes of 32 bits, 63 of them kept: seeds stay positive int64
        return murmur_hash32(seeds, starts, low) << 31 | murmur_hash32(seeds, starts, high) >> 1
