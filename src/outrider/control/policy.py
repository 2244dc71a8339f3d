"""Which drafts to verify: those with the highest goodput (tokens per second), or none.

The *survival* of a draft is the probability that it and all drafts above it are accepted. Survival
never rises from a parent to its child. Taking drafts by falling survival therefore takes every
chain and every tree from its root. With B requests and the m best drafts, a step emits
B + (sum of their survivals) tokens and takes T(B + m) seconds. T is a staircase, so every m is
compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.core import Floats, Ints, Proposal

LEAST_SURVIVAL = 0.02
"""Drafts that are less likely to be accepted are never verified."""

NO_INDICES: Ints = np.empty(0, np.int64)
"""No drafts, or no requests."""


@dataclass(frozen=True, eq=False)
class Choice:
    """Which drafts of a batch to verify, and what the step is expected to do.

    nodes: [m] indices of the drafts in the proposal, in rising order
    tokens: expected tokens of the step
    seconds: expected time of the step
    """

    nodes: Ints
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def choose(proposal: Proposal, survival: Floats, seconds: Floats, margin: float = 0.0) -> Choice:
    """Return the drafts with the highest goodput.

    The result is the same on every rank that is given the same numbers. Of equal survivals the
    earlier place goes first, then the earlier request. Of equal goodputs the fewest rows win.

    survival: [M] of each draft; never above its parent's
    seconds: [at least B + 1] time of a step with so many rows; its length limits the rows
    margin: share by which drafting must beat plain decoding
    """
    batch = proposal.batch_size
    if not len(survival):
        return Choice(NO_INDICES, float(batch), float(seconds[batch]))
    order = np.lexsort((proposal.owners, proposal.places, -survival))[: len(seconds) - batch - 1]
    tokens, goodput = goodputs(survival[order], batch, seconds)
    best = int(goodput.argmax())
    if goodput[best] <= goodput[0] * (1 + margin):
        best = 0
    nodes = order[:best]
    nodes.sort()
    return Choice(nodes, float(tokens[best]), float(seconds[batch + best]))


def best_goodput(survival: Floats, batch: int, seconds: Floats) -> Any:
    """Return the highest goodput that drafts of these survivals can reach, [...].

    survival: [..., M]; seconds: [..., at least B + 1], as of `choose`
    """
    falling = -np.sort(-survival)[..., : seconds.shape[-1] - batch - 1]
    best: Any = goodputs(falling, batch, seconds)[1].max(-1)
    return best


def goodputs(falling: Floats, batch: int, seconds: Floats) -> tuple[Floats, Floats]:
    """Return the tokens, and the tokens per second, of a step with 0, 1, ... of these drafts."""
    tokens = np.empty((*falling.shape[:-1], falling.shape[-1] + 1))
    tokens[..., 0] = batch
    np.add(falling.cumsum(-1), batch, out=tokens[..., 1:])
    return tokens, tokens / np.maximum(seconds[..., batch : batch + tokens.shape[-1]], 1e-12)


CANDIDATES = 8
"""Numbers of drafts that are compared where some request may not gain from them."""


@dataclass(frozen=True, eq=False)
class Spread:
    """How many drafts each request gets in a step, and what the step is expected to do.

    num_drafts: [B]
    goodput: tokens per second
    """

    num_drafts: Ints
    goodput: float


def spread(
    survival: Floats,
    seconds: Floats,
    spare: Floats,
    slowdown: float | None,
    margin: float = 0.0,
) -> Spread:
    """Return the numbers of drafts with the highest goodput that slow no request down too much.

    A request that is expected to emit e tokens in a step may wait e times as long as in a plain
    one, and longer by the share `slowdown`.

    survival: [B, K] of each draft; never above its parent's
    seconds: [at least B + 1] time of a step with so many rows; its length limits the rows
    spare: [B] tokens a step that requests may lose; below 0 for those that have emitted less than
        plain decoding would have lately
    slowdown: None for no limit
    margin: share by which drafts must beat plain decoding
    """
    batch, depth = survival.shape
    flat = survival.ravel()
    likely = np.flatnonzero(flat > LEAST_SURVIVAL)
    order = likely[np.argsort(-flat[likely], kind="stable")]
    most = min(len(order), len(seconds) - batch - 1)
    goodput = goodputs(flat[order[:most]], batch, seconds)[1]
    best = int(goodput.argmax())
    found = Spread(_counts(order[:best], depth, batch), float(goodput[best]))
    times = seconds[batch : batch + most + 1] / seconds[batch]
    if slowdown is not None and times[best] > 1 + slowdown:
        found = _fair(survival, order, times, spare, slowdown)
        found = Spread(found.num_drafts, found.goodput / float(seconds[batch]))
    if found.goodput <= goodput[0] * (1 + margin):
        return Spread(_counts(order[:0], depth, batch), float(goodput[0]))
    return found


def _counts(drafts: Ints, depth: int, batch: int) -> Ints:
    """Return how many of these drafts each request has."""
    return np.bincount(drafts // max(1, depth), minlength=batch)


def _fair(survival: Floats, order: Ints, times: Floats, spare: Floats, slowdown: float) -> Spread:
    """Return the best numbers of drafts among some that slow no request down too much.

    Each request first gets as many drafts as it needs to make up for the longer step. The other
    rows go to the drafts that are most likely to be accepted.

    order: the drafts by falling survival
    times: [M + 1] time of a step with so many drafts, in plain steps; there may be M of them
    """
    batch, depth = survival.shape
    # only these are ever verified: of each request the first ones
    falling, kept = survival.ravel()[order], np.zeros(survival.size)
    kept[order] = falling
    survival = kept.reshape(survival.shape)
    # evenly spaced, from as many as take no longer than any request may wait, to as many as all of
    # them could make up for
    longest = (1 + slowdown) * max(1.0, float((1.0 + survival.sum(1) + spare).min()))
    ends = np.searchsorted(times, [1 + slowdown, longest], "right") - 1
    counts = np.unique(np.linspace(ends[0], ends[1], CANDIDATES).astype(np.int64))
    before = np.zeros_like(survival)
    survival[:, :-1].cumsum(1, out=before[:, 1:])
    needed = (times[counts] / (1 + slowdown))[:, None] - 1.0 - spare
    needed[times[counts] <= 1 + slowdown] = 0.0
    is_needed = before < needed[..., None]  # [C, B, K]
    is_possible = (before[:, -1] + survival[:, -1] >= needed).all(1)
    is_needed = is_needed.reshape(len(counts), -1)[:, order]
    left = counts - is_needed.sum(1)
    is_taken = is_needed | ((~is_needed).cumsum(1) <= left[:, None])
    tokens = batch + (is_taken * falling).sum(1)
    goodput = np.where(is_possible & (left >= 0), tokens / times[counts], 0.0)
    best = int(goodput.argmax())
    return Spread(_counts(order[is_taken[best]], depth, batch), float(goodput[best]))
