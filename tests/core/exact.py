"""What a rule emits, by enumeration: the shipped code, run once for each way its coins can fall.

A verify pass covers many requests, so all ways are tried in one pass: each copy of the request
has a script for its coins, and its mass is the probability of that script.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core import (
    Draft,
    Proposal,
    Request,
    Rows,
    Sampled,
    SamplingParams,
    Siblings,
    Stream,
    TargetDistribution,
    Verdict,
    chain,
    settle,
    target_distribution,
)

Context = tuple[int, ...]
Model = Callable[[Context], Tensor]
Rule = Callable[[TargetDistribution, Proposal, "ScriptedCoins"], Verdict]
TOLERANCE = 1e-12


def table(vocab_size: int, seed: int, zeros: bool = False) -> Model:
    """Return a model that has a fixed, arbitrary distribution for every context."""
    known: dict[Context, Tensor] = {}

    def probs(context: Context) -> Tensor:
        if context not in known:
            g = torch.Generator().manual_seed(hash((seed, context)) % 2**31)
            weights = torch.rand(vocab_size, generator=g, dtype=torch.float64) ** 2 + 0.01
            if zeros:
                weights[torch.randint(vocab_size, (1,), generator=g)] = 0
            known[context] = weights / weights.sum()
        return known[context]

    return probs


@dataclass
class ScriptedCoins:
    """Coins that fall as told. The seed of a request says which script it follows.

    draws: [S, R] the token of each of a request's rows that is drawn, in order
    accepts: [S, C] the answer for each column
    mass: [S] the probability that the coins fall so
    """

    draws: Tensor
    accepts: Tensor
    mass: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # a coin that is never asked must not count: all its answers lead to the same outcome
        self.mass = torch.full((len(self.accepts),), 0.5 ** self.accepts.shape[1]).double()

    def draw(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        # the rows of a request stand together: its first is drawn by its first script, and so on
        _, counts = torch.unique_consecutive(seeds, return_counts=True)
        turns = torch.cat([torch.arange(int(n)) for n in counts])
        tokens = self.draws[seeds, turns]
        probs = logits.softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        self.mass.scatter_reduce_(0, seeds, probs, "prod")
        return tokens

    def accept(self, prob: Tensor, seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        answers = self.accepts[seeds, columns]
        self.mass[seeds] *= 2 * torch.where(answers, prob, 1 - prob)
        return answers

    def fork(self, seeds: Tensor, stream: Stream, starts: Tensor) -> Tensor:
        return seeds


def scripts(vocab_size: int, draws: int, accepts: int, copies: int) -> ScriptedCoins:
    """Return every way that so many coins can fall, for each of the copies in turn."""
    tokens = torch.tensor(list(itertools.product(range(vocab_size), repeat=draws)))
    answers = torch.tensor(list(itertools.product((False, True), repeat=accepts)))
    answers = answers.reshape(2**accepts, accepts)
    pairs = tokens.repeat_interleave(len(answers), 0), answers.repeat(len(tokens), 1)
    return ScriptedCoins(pairs[0].repeat(copies, 1), pairs[1].repeat(copies, 1))


def row_logits(p: Model, proposal: Proposal) -> Tensor:
    return torch.stack([p(path).log() for path in proposal.paths()])


def step_distribution(
    rule: Rule,
    p: Model,
    drafts: list[tuple[Draft, float]],
    vocab_size: int,
    length: int,
    all_rows: bool = False,
) -> Tensor:
    """Return how likely the first `length` tokens are, [V] * length, the target finishing alone.

    all_rows: whether the rule draws at every row and asks nothing else, as `match` does
    """
    k = max(len(draft.tokens) for draft, _ in drafts)
    draws, accepts = (k + 1, 0) if all_rows else (1, k + 1)
    coins = scripts(vocab_size, draws, accepts, copies=len(drafts))
    each = len(coins.mass) // len(drafts)
    sampling = SamplingParams(temperature=1.0, max_tokens=1000)
    requests = [Request(s, (0,), sampling, seed=s) for s in range(len(coins.mass))]
    proposal = Proposal.of([draft for draft, _ in drafts for _ in range(each)])
    target = target_distribution(row_logits(p, proposal), Rows.of(requests, proposal))
    outcomes = settle(requests, proposal, rule(target, proposal, coins))

    found: Counter[Context] = Counter()
    weights = torch.tensor([weight for _, weight in drafts], dtype=torch.float64).repeat_interleave(
        each
    )
    for outcome, mass in zip(outcomes, (coins.mass * weights).tolist(), strict=True):
        found[outcome.tokens] += mass
    out = torch.zeros([vocab_size] * length, dtype=torch.float64)
    for tokens, mass in found.items():
        if mass > 0:
            _finish(p, tokens, length, mass, out)
    return out


def _finish(p: Model, tokens: Context, length: int, mass: float, out: Tensor) -> None:
    if len(tokens) >= length:
        out[tokens[:length]] += mass
        return
    for token, prob in enumerate(p(tokens).tolist()):
        _finish(p, (*tokens, token), length, mass * prob, out)


def target_sequences(p: Model, vocab_size: int, length: int) -> Tensor:
    out = torch.zeros([vocab_size] * length, dtype=torch.float64)
    _finish(p, (), length, 1.0, out)
    return out


def assert_exact(rule: Rule, p: Model, drafts: list, vocab_size: int, length: int, **kw) -> None:
    assert abs(sum(weight for _, weight in drafts) - 1) < TOLERANCE
    found = step_distribution(rule, p, drafts, vocab_size, length, **kw)
    error = (found - target_sequences(p, vocab_size, length)).abs().max().item()
    assert error < TOLERANCE, f"max |found - p| = {error:.3g}"


# Ways to draft, each with all drafts it can make and their probabilities.


def sampled_chains(q: Model, vocab_size: int, length: Callable[[Context], bool] | int) -> list:
    """Chains drawn from q. `length` is K, or says of the drafts so far whether to go on."""
    go_on = length if callable(length) else lambda drafts: len(drafts) < length
    found: list[tuple[Draft, float]] = []

    def grow(tokens: Context, mass: float) -> None:
        if not go_on(tokens):
            rows = [q(tokens[:i]) for i in range(len(tokens))]
            drawn = Sampled(torch.stack(rows) if rows else torch.zeros(0, vocab_size))
            found.append((Draft(tokens, tuple(range(-1, len(tokens) - 1)), drawn), mass))
            return
        for token, prob in enumerate(q(tokens).tolist()):
            if prob > 0:
                grow((*tokens, token), mass * prob)

    grow((), 1.0)
    return found


def greedy_chain(q: Model, k: int) -> list:
    tokens: Context = ()
    for _ in range(k):
        tokens = (*tokens, int(q(tokens).argmax()))
    return [(chain(tokens), 1.0)]


def sibling_trees(q: Model, parents: tuple[int, ...], replacement: bool) -> list:
    """Trees of this shape whose siblings are drawn from q in order."""
    found: list[tuple[Draft, float]] = []

    def grow(tokens: Context, rows: tuple[Tensor, ...], mass: float) -> None:
        i = len(tokens)
        if i == len(parents):
            found.append((Draft(tokens, parents, Siblings(torch.stack(rows), replacement)), mass))
            return
        path, node = (), parents[i]
        while node != -1:
            path, node = (tokens[node], *path), parents[node]
        probs = q(path).clone()
        if not replacement:
            probs[[tokens[j] for j in range(i) if parents[j] == parents[i]]] = 0
            probs = probs / probs.sum()
        for token, prob in enumerate(probs.tolist()):
            if prob > 0:
                grow((*tokens, token), (*rows, q(path)), mass * prob)

    grow((), (), 1.0)
    return found
