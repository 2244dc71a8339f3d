"""Verification rules: which drafts to keep, and which token to emit after them.

Every rule has the same guarantee: given the target's logits, what is emitted follows the law that
plain decoding follows. They differ in what they need to know of the drafts, and in how many they
keep.

* `match`: the tokens are those of plain decoding with the same seed, whatever was drafted. Any law.
* `residual`: Leviathan et al. and Chen et al. 2023, for chains; SpecInfer and recursive rejection
  sampling for trees. Uses the law of the drafts, and so keeps as many as the two laws overlap.
* `block`: Sun et al. 2024. A chain judged as a whole: keeps at least as many as `residual`.

A rule that a law does not fit is a type error: `verify_block` takes chains only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.core.coins import Coins, Stream
from outrider.core.proposal import ChainLaw, Law, Proposal, Siblings
from outrider.core.target import TargetLaw
from outrider.errors import Unsupported

RuleName = Literal["match", "residual", "block"]


@dataclass(frozen=True)
class Verdict:
    """Which drafts each request may keep, and the token that follows them.

    accepted: [B, D] int64 index of the draft kept at each depth, among the request's drafts;
              -1 beyond the last
    next_tokens: [B] int64 the token after the last kept draft: the *bonus* token after a full
              acceptance, else the *recovered* one
    """

    accepted: Tensor
    next_tokens: Tensor

    @property
    def num_accepted_drafts(self) -> Tensor:
        """[B] how many drafts each request may keep."""
        return (self.accepted >= 0).sum(-1)

    def emitted(self, proposal: Proposal[Law]) -> list[tuple[list[int], list[int]]]:
        """Return for each request the tokens it may emit, and the rows that judged them.

        Rows are counted among the request's own: 0 is its root. Waits for the device.
        """
        drafts = proposal.tokens.tolist()
        emitted = []
        numbers = zip(self.accepted.tolist(), self.next_tokens.tolist(), strict=True)
        for start, (accepted, next_token) in zip(proposal.starts, numbers, strict=False):
            path = [i for i in accepted if i >= 0]
            tokens = [*(drafts[start + i] for i in path), next_token]
            emitted.append((tokens, [0, *(i + 1 for i in path)]))
        return emitted


def match(y: Tensor, proposal: Proposal[Law]) -> Verdict:
    """Accept each draft while it is the token that the target emits there.

    y: [N] the target's own token at each row, whoever drew it
    """
    matches = y[list(proposal.parent_rows)] == proposal.tokens
    walk = _Walk(proposal)
    for depth in range(proposal.max_depth):
        walk.descend(depth, matches)
    return walk.verdict(y[walk.rows])


def verify_match(p: TargetLaw, proposal: Proposal[Law], coins: Coins) -> Verdict:
    """Draw the target's own token at every row, and `match` the drafts with them.

    p: one row for each root and each draft, [N, V]
    """
    return match(p.draw(coins), proposal)


def verify_residual(p: TargetLaw, proposal: Proposal[Law], coins: Coins) -> Verdict:
    """Accept a draft x with probability min(1, p(x)/q(x)); else draw from what q left of p.

    Siblings are tried in the order in which they were drawn, each against what the ones before
    it have left.
    """
    probs = p.probs()
    tokens, q = proposal.tokens, proposal.dense_q(probs)
    roots = list(proposal.root_rows)
    starts = p.positions[roots]
    accept_seeds = coins.fork(p.seeds[roots], Stream.ACCEPT, starts)
    ranks = torch.tensor(proposal.ranks, device=probs.device)
    walk = _Walk(proposal)
    left = probs[roots]  # [B, V] the target's law at the walk's row, less what siblings took

    for depth in range(proposal.max_depth):
        for rank in range(max(proposal.ranks) + 1):
            # this sibling of each request that stands at its parent; one that has moved does not
            i = (walk.children(depth) & (ranks == rank)).nonzero().squeeze(-1)
            r, x = walk.owners[i], tokens[i]
            p_x, q_x = left[r, x], q[i, x]
            ratio = torch.where(q_x > 0, p_x / q_x, 0.0).clamp(max=1.0)
            positions = p.positions[walk.rows[r]]
            yes = coins.accept(ratio, accept_seeds[r], positions, i - walk.starts[r])
            left[r] = _residual(left[r], q[i])
            walk.move(depth, i[yes])
            left[r[yes]] = probs[walk.rows[r[yes]]]
    recover_seeds = coins.fork(p.seeds[roots], Stream.RECOVER, starts)
    return walk.verdict(coins.draw(left.log(), recover_seeds, p.positions[walk.rows]))


def verify_block(p: TargetLaw, proposal: Proposal[ChainLaw], coins: Coins) -> Verdict:
    """Accept the longest prefix of a chain that passes, judging the block as a whole.

    With r_0 = 1 and r_i = min(1, r_(i-1) p(x_i)/q(x_i)), the prefix of length i passes with
    probability h_i = S_i / (S_i + 1 - r_i), where S_i is the mass of (r_i p - q)+ at the next
    position; the whole chain passes with probability r_K.
    """
    if any(isinstance(law, Siblings) for law in proposal.laws):
        raise TypeError("verify_block takes chains (PointMass or Sampled); use verify_residual")
    if not proposal.is_chain:
        raise TypeError("verify_block takes chains, and this proposal branches")
    probs = p.probs()
    q = proposal.dense_q(probs)
    batch, depth, device = proposal.batch_size, proposal.max_depth, probs.device
    roots = torch.tensor(proposal.root_rows, device=device)
    starts = torch.tensor(proposal.starts[:-1], device=device)
    counts = torch.tensor(proposal.num_drafts, device=device)
    positions = p.positions[roots]
    seeds = coins.fork(p.seeds[roots], Stream.ACCEPT, positions)

    r = probs.new_ones(batch)
    kept = torch.zeros(batch, dtype=torch.int64, device=device)
    left = _next_residual(probs, q, roots, starts, counts, r, 0)
    for i in range(1, depth + 1):
        alive = (i <= counts).nonzero().squeeze(-1)
        draft = starts[alive] + i - 1
        x = proposal.tokens[draft]
        p_x, q_x = probs[roots[alive] + i - 1, x], q[draft, x]
        r[alive] = torch.where(q_x > 0, r[alive] * p_x / q_x, 0.0).clamp(max=1.0)
        scaled = _next_residual(probs, q, roots, starts, counts, r, i)
        mass = scaled.sum(-1)
        h = torch.where(mass > 0, mass / (mass + (1 - r)), (r == 1).to(r.dtype))
        h = torch.where(counts == i, r, h)[alive]
        columns = torch.full_like(alive, i)
        yes = alive[coins.accept(h, seeds[alive], positions[alive] + i, columns)]
        kept[yes] = i
        left[yes] = scaled[yes]

    last = roots + kept
    mass = left.sum(-1, keepdim=True)
    law = torch.where((kept < counts)[:, None] & (mass > 0), left / mass, probs[last])
    recover_seeds = coins.fork(p.seeds[roots], Stream.RECOVER, positions)
    next_tokens = coins.draw(law.log(), recover_seeds, p.positions[last])
    steps = torch.arange(depth, device=device).expand(batch, depth)
    return Verdict(torch.where(steps < kept[:, None], steps, -1), next_tokens)


VERIFY: dict[RuleName, Callable[[TargetLaw, Proposal[Any], Coins], Verdict]] = {
    "match": verify_match,
    "residual": verify_residual,
    "block": verify_block,
}


def verify(rule: RuleName, p: TargetLaw, proposal: Proposal[Any], coins: Coins) -> Verdict:
    """Apply the rule of that name; it must fit the proposal's law."""
    if rule not in VERIFY:
        raise Unsupported(f"rule {rule!r}", fix=f"choose one of {', '.join(VERIFY)}")
    return VERIFY[rule](p, proposal, coins)


class _Walk:
    """A walk down each request's tree, from its root, along the drafts that are accepted.

    rows: [B] the row where each walk stands
    """

    def __init__(self, proposal: Proposal[Law]) -> None:
        device = proposal.tokens.device
        self.rows = torch.tensor(proposal.root_rows, device=device)
        self.owners = torch.tensor(proposal.owners, dtype=torch.int64, device=device)
        self.starts = torch.tensor(proposal.starts[:-1], device=device)
        self._depths = torch.tensor(proposal.depths, device=device)
        self._draft_rows = torch.tensor(proposal.draft_rows, dtype=torch.int64, device=device)
        self._parent_rows = torch.tensor(proposal.parent_rows, dtype=torch.int64, device=device)
        shape = (proposal.batch_size, proposal.max_depth)
        self._accepted = torch.full(shape, -1, dtype=torch.int64, device=device)

    def children(self, depth: int) -> Tensor:
        """Return which drafts are children of where their request's walk stands, [M] bool."""
        return (self._depths == depth + 1) & (self._parent_rows == self.rows[self.owners])

    def move(self, depth: int, drafts: Tensor) -> None:
        """Go down to these drafts, at most one for each request."""
        owners = self.owners[drafts]
        self.rows[owners] = self._draft_rows[drafts]
        self._accepted[owners, depth] = drafts - self.starts[owners]

    def descend(self, depth: int, accepted: Tensor) -> None:
        """Go down to each walk's first accepted child, if it has one. accepted: [M] bool."""
        drafts = (self.children(depth) & accepted).nonzero().squeeze(-1)
        none = len(self.owners)
        first = torch.full_like(self.rows, none)
        first.scatter_reduce_(0, self.owners[drafts], drafts, "amin")
        self.move(depth, first[first < none])

    def verdict(self, next_tokens: Tensor) -> Verdict:
        """Return the verdict, given the token that follows each walk's end, [B]."""
        return Verdict(self._accepted, next_tokens)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """Return norm((p - q)+), or p where nothing is left: then rejecting had probability 0."""
    left = (p - q).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, p)


def _next_residual(
    probs: Tensor, q: Tensor, roots: Tensor, starts: Tensor, counts: Tensor, r: Tensor, i: int
) -> Tensor:
    """Return (r p - q)+ at the position after draft i, 0 where the chain ends there: [B, V]."""
    left = probs.new_zeros(len(r), probs.shape[-1])
    alive = (i < counts).nonzero().squeeze(-1)
    p_next, q_next = probs[roots[alive] + i], q[starts[alive] + i]
    left[alive] = (r[alive][:, None] * p_next - q_next).clamp(min=0)
    return left
