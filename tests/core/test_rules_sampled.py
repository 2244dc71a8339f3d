"""The whole loop with real coins, many seeds: chi-square against the target's distribution.

The loop runs several steps, so a coin used twice across steps shows too.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from exact import Model, table, target_sequences
from scipy import stats
from torch import Tensor

from outrider.core import (
    ROOT,
    Budget,
    Draft,
    KeyedCoins,
    Outcome,
    PointMass,
    Proposal,
    Request,
    Sampled,
    SamplingParams,
    Siblings,
    Stream,
    chain,
    step,
)

V, LENGTH, RUNS = 3, 4, 3000
P, Q = table(V, 5), table(V, 105)


class TableHost:
    """Plays a target whose distribution is a table."""

    def __init__(self, p: Model) -> None:
        self.p = p

    def forward(self, requests: Sequence[Request], proposal: Proposal) -> Tensor:
        paths = zip(proposal.row_owners, proposal.paths(), strict=True)
        return torch.stack([self.p((*requests[r].output, *path)).log() for r, path in paths])

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        pass


class TableDrafter:
    """Draws from q, as told: a chain, or pairs of siblings."""

    name = "table"

    def __init__(self, q: Model, kind: str) -> None:
        self.q, self.kind = q, kind
        self.generator = torch.Generator().manual_seed(0)

    def start(self, requests):
        pass

    observe = stop = start

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        if self.kind == "siblings":
            pairs = zip(requests, budget.max_drafts, strict=True)
            return Proposal.of([self.siblings(r) if k else chain(()) for r, k in pairs])
        positions = torch.tensor([request.position for request in requests])
        seeds = torch.tensor([request.seed for request in requests])
        seeds = budget.draft_seeds(seeds, positions)
        tokens: list[list[int]] = [[] for _ in requests]
        rows = []
        for i in range(max(budget.max_drafts)):
            contexts = [(*r.output, *t) for r, t in zip(requests, tokens, strict=True)]
            rows.append(torch.stack([self.q(context) for context in contexts]))
            argmax = self.kind == "argmax"
            drawn = rows[-1].argmax(-1) if argmax else self.draw(rows[-1], seeds, positions + i)
            for t, token in zip(tokens, drawn.tolist(), strict=True):
                t.append(token)
        kept = [t[:k] for t, k in zip(tokens, budget.max_drafts, strict=True)]
        probs = [
            torch.stack([row[r] for row in rows[: len(t)]]) if t else None
            for r, t in enumerate(kept)
        ]
        return Proposal.of([self.label(t, q) for t, q in zip(kept, probs, strict=True)])

    def draw(self, q: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return KeyedCoins().draw(q.log(), seeds, positions)

    def label(self, tokens: list[int], q: Tensor | None) -> Draft:
        return chain(tokens) if self.kind == "argmax" or q is None else chain(tokens, Sampled(q))

    def siblings(self, request: Request) -> Draft:
        q = self.q(tuple(request.output))
        tokens = torch.multinomial(q, 2, generator=self.generator).tolist()
        return Draft(tuple(tokens), (ROOT, ROOT), Siblings(q.expand(2, -1), replacement=False))


def sample(drafter, rule, coins, k=2, p=P, length=LENGTH, runs=RUNS) -> list[tuple[int, ...]]:
    """Emit so many tokens for each of many seeds."""
    sampling = SamplingParams(temperature=1.0, max_tokens=length)
    requests = [Request(i, (0,), sampling, seed=7919 * i + 1) for i in range(runs)]
    host, active = TableHost(p), requests
    while active:
        room = tuple(min(k, max(1, request.remaining - 1)) for request in active)
        done = step(host, drafter, active, Budget(room, rule, coins))
        for outcome in done.outcomes:
            outcome.apply()
        active = [request for request in active if not request.finish_reason]
    return [tuple(request.output) for request in requests]


def p_value(samples: list[tuple[int, ...]], p: Model = P) -> float:
    length, v = len(samples[0]), len(p(()))
    expected = (target_sequences(p, v, length) * len(samples)).flatten()
    index = torch.tensor(samples) @ torch.tensor([v**i for i in reversed(range(length))])
    counts = torch.bincount(index, minlength=v**length)
    # rare sequences are counted together: chi-square wants some of each
    order = expected.argsort()
    rare = order[: int((expected[order].cumsum(0) < 40).sum())]
    common = order[len(rare) :]
    seen = [*counts[common].tolist(), *([counts[rare].sum().item()] if len(rare) else [])]
    hoped = [*expected[common].tolist(), *([expected[rare].sum().item()] if len(rare) else [])]
    return stats.chisquare(seen, hoped).pvalue


EXACT = [
    ("match", "sampled"),
    ("match", "argmax"),
    ("match", "siblings"),
    ("residual", "sampled"),
    ("residual", "argmax"),
    ("residual", "siblings"),
    ("block", "sampled"),
    ("block", "argmax"),
]


@pytest.mark.parametrize(("rule", "kind"), EXACT)
def test_distribution(rule, kind):
    assert p_value(sample(TableDrafter(Q, kind), rule, KeyedCoins())) > 1e-3


def test_match_does_not_depend_on_the_drafts():
    ways = [("sampled", 0), ("sampled", 1), ("sampled", 3), ("argmax", 2), ("siblings", 2)]
    runs = [sample(TableDrafter(Q, kind), "match", KeyedCoins(), k) for kind, k in ways]
    assert all(run == runs[0] for run in runs)


class FailsWithDrafts(TableHost):
    """Its model raises for some rows that plain decoding never has."""

    def forward(self, requests, proposal):
        if proposal.num_drafts.any():
            raise ValueError("no such text")
        return super().forward(requests, proposal)


def test_drafts_that_cannot_be_verified_are_withdrawn(caplog):
    requests = [Request(i, (0,), SamplingParams(temperature=1.0), seed=i) for i in range(8)]
    drafter, budget = TableDrafter(Q, "sampled"), Budget((2,) * 8, "match", KeyedCoins())
    done = step(FailsWithDrafts(P), drafter, requests, budget)
    assert done.withdrawn
    assert "no such text" in caplog.text
    plain = step(TableHost(P), drafter, requests, Budget((0,) * 8, "match", KeyedCoins()))
    assert [o.tokens for o in done.outcomes] == [o.tokens for o in plain.outcomes]
    assert not plain.withdrawn


def test_an_error_of_plain_decoding_is_raised():
    class Fails(TableHost):
        def forward(self, requests, proposal):
            raise ValueError("no such text")

    request = Request(0, (0,), SamplingParams(temperature=1.0), seed=0)
    for drafts in (0, 2):
        budget = Budget((drafts,), "match", KeyedCoins())
        with pytest.raises(ValueError, match="no such text"):
            step(Fails(P), TableDrafter(Q, "sampled"), [request], budget)


# A draft that is often rejected, and leaves many tokens to recover from.
STEEP = torch.tensor([0.50, 0.28, 0.12, 0.06, 0.03, 0.01], dtype=torch.float64)
FLAT = torch.tensor([0.10, 0.08, 0.20, 0.22, 0.20, 0.20], dtype=torch.float64)


def test_shared_coins_help():
    """A draft drawn with the target's coins is accepted with at least (1 - TV) / (1 + TV)."""
    p, q = STEEP, 0.8 * STEEP + 0.2 * FLAT
    requests = [Request(i, (0,), SamplingParams(temperature=1.0), seed=i) for i in range(RUNS)]
    budget = Budget((1,) * RUNS, "match", KeyedCoins())
    done = step(TableHost(lambda _: p), TableDrafter(lambda _: q, "sampled"), requests, budget)
    accepted = sum(outcome.num_accepted_drafts for outcome in done.outcomes) / RUNS
    tv = 0.5 * (p - q).abs().sum().item()
    assert accepted > (1 - tv) / (1 + tv) - 0.03
    assert accepted > 2 * (p * q).sum().item()  # what independent draws would have


# Biased twins


class ReusedDraftNoise(KeyedCoins):
    """Recovers with the noise that drew the draft."""

    def fork(self, seeds, stream, starts):
        return seeds if stream is not Stream.ACCEPT else super().fork(seeds, stream, starts)


class ReusedAcrossBlocks(KeyedCoins):
    """Keys coins by position alone: `block` has looked at those of positions beyond its cut."""

    def fork(self, seeds, stream, starts):
        return super().fork(seeds, stream, torch.zeros_like(starts))


class ArgmaxAsSampled(TableDrafter):
    """Drafts the most likely token, and claims to have drawn it."""

    def label(self, tokens, q):
        return chain(tokens) if q is None else chain(tokens, Sampled(q))


class Modest(TableDrafter):
    """Draws from q, and claims nothing."""

    def label(self, tokens, q):
        return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), PointMass())


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_twin_reused_draft_noise(rule):
    drafter = TableDrafter(lambda _: STEEP, "sampled")
    flat = {"p": lambda _: FLAT, "length": 1, "k": 1, "runs": 16000}
    assert p_value(sample(drafter, rule, KeyedCoins(), **flat), flat["p"]) > 1e-3
    assert p_value(sample(drafter, rule, ReusedDraftNoise(), **flat), flat["p"]) < 1e-9


def test_twin_coins_reused_across_blocks():
    assert p_value(sample(TableDrafter(Q, "sampled"), "block", ReusedAcrossBlocks(), k=3)) < 1e-6


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_twin_argmax_as_sampled(rule):
    assert p_value(sample(ArgmaxAsSampled(Q, "argmax"), rule, KeyedCoins())) < 1e-9


def test_claiming_nothing_is_safe():
    """The other way round is exact: a drawn draft may be called a PointMass."""
    assert p_value(sample(Modest(Q, "sampled"), "residual", KeyedCoins())) > 1e-3
