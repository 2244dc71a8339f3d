"""Residual verification of chains in plain torch: `core.verify_residual`, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from outrider.core.coins import KeyedCoins
from outrider.core.proposal import ChainLaw, Proposal, Sampled, chain
from outrider.core.rules import Verdict
from outrider.core.rules import verify_residual as core_verify_residual
from outrider.core.target import TargetLaw


class Verified(NamedTuple):
    """How many drafts each request may keep, and the token that follows them.

    num_accepted_drafts: [B]
    next_tokens:         [B]; -1 for a request without rows
    """

    num_accepted_drafts: Tensor
    next_tokens: Tensor


@dataclass(frozen=True)
class GivenLaw(TargetLaw):
    """A law known by its probabilities: `logits` holds them."""

    def probs(self) -> Tensor:
        """Return p, [N, V]."""
        return self.logits


def verify_residual(
    p: Tensor,
    q: Tensor | None,
    drafts: Tensor,
    rows_start: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_drafts: int,
) -> Verified:
    """Accept a draft x with probability min(1, p(x)/q(x)); else draw from what q left of p."""
    law, proposal = as_core(p, q, drafts, rows_start, seeds, positions, max_drafts)
    return as_verified(core_verify_residual(law, proposal, KeyedCoins()), len(rows_start) - 1)


def as_core(
    p: Tensor,
    q: Tensor | None,
    drafts: Tensor,
    rows_start: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_drafts: int,
) -> tuple[TargetLaw, Proposal[ChainLaw]]:
    """Return the arguments of core's rules, without the requests that have no rows."""
    starts = [int(start) for start in rows_start]
    spans = [(a, b) for a, b in pairwise(starts) if b > a]
    if max((b - a - 1 for a, b in spans), default=0) > max_drafts:
        raise ValueError(f"a request has more than max_drafts={max_drafts} drafts")
    parts = []
    for i, (a, b) in enumerate(spans):
        # each request before has one row that is no draft: q has no row for it
        own = None if q is None else q[a - i : b - i - 1].double()
        tokens = drafts[a + 1 : b].tolist()
        parts.append(chain(tokens) if own is None else chain(tokens, Sampled(own)))
    law = GivenLaw(p.double(), (False,) * len(p), seeds, positions)
    return law, Proposal.of(parts)


def as_verified(verdict: Verdict, batch: int) -> Verified:
    """Return the verdict of chains, padded to the batch."""
    counts = verdict.num_accepted_drafts.new_zeros(batch)
    next_tokens = verdict.next_tokens.new_full((batch,), -1)
    counts[: len(verdict.next_tokens)] = verdict.num_accepted_drafts
    next_tokens[: len(verdict.next_tokens)] = verdict.next_tokens
    return Verified(counts, next_tokens)
