"""Verification rules: which drafts to keep, and which token to emit after them.

Every rule has the same guarantee: given the target's logits, what is emitted has the distribution
that plain decoding has. They differ in what they need to know of the drafts, and in how many they
keep.

* `match`: the tokens are those of plain decoding with the same seed, whatever was drafted and
  however it was drawn.
* `residual`: Leviathan et al. and Chen et al. 2023, for chains; SpecInfer and recursive rejection
  sampling for trees. Uses the distribution of the drafts, and so keeps as many as it and the
  target's overlap.
* `block`: Sun et al. 2024. A chain judged as a whole: keeps at least as many as `residual`.

A rule used on drafts that it cannot judge is a type error: `verify_block` takes chains only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from outrider.core.coins import Coins, Stream
from outrider.core.proposal import Bools, ChainDistribution, Ints, Proposal, Siblings
from outrider.core.target import TargetDistribution
from outrider.errors import check_choice

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

    def emitted(self, proposal: Proposal) -> tuple[Ints, Ints, Ints]:
        """Return the tokens that may be emitted, the rows that judged them, and how many: [B].

        Tokens and rows stand request by request. Rows are counted among the request's own: 0 is its
        root. Waits for the device; not at all for a verdict of `match`, which has waited.
        """
        path, after = self.accepted.cpu().numpy(), self.next_tokens.cpu().numpy()
        if not len(proposal.parents):
            ones = np.ones(len(after), np.int64)
            return after, ones - 1, ones
        drafts = proposal.tokens.cpu().numpy()
        kept = path >= 0
        counts = kept.sum(-1) + 1
        ends = counts.cumsum()
        is_last = np.zeros(ends[-1] if len(ends) else 0, np.bool_)
        is_last[ends - 1] = True
        tokens = np.empty(len(is_last), np.int64)
        tokens[is_last] = after
        rows = np.zeros(len(is_last), np.int64)
        if len(is_last) > len(counts):
            tokens[~is_last] = drafts[(proposal.starts[:-1, None] + path)[kept]]
            rows[np.flatnonzero(~is_last) + 1] = path[kept] + 1
        return tokens, rows, counts


def match(y: Tensor, proposal: Proposal) -> Verdict:
    """Accept each draft while it is the token that the target emits there.

    Waits for the device, once: what follows is arithmetic on a few integers of the host's.

    y: [N] the target's own token at each row, whoever drew it
    """
    if not len(proposal.parents):
        return Verdict(torch.empty(len(y), 0, dtype=y.dtype), y.cpu())
    emitted, drafts = y.cpu().numpy(), proposal.tokens.cpu().numpy()
    accepted, last = _walk(emitted[proposal.parent_rows] == drafts, proposal)
    return Verdict(torch.from_numpy(accepted), torch.from_numpy(emitted[last]))


def _walk(hits: Bools, proposal: Proposal) -> tuple[Ints, Ints]:
    """Go down each request's tree along its hits, of siblings along the first.

    Returns the draft at each depth, [B, D], -1 beyond the last; and the row where each walk ends.

    hits: [M] whether each draft is what the target emits there
    """
    at = proposal.root_rows.copy()
    depths = np.arange(proposal.max_depth)
    if proposal.is_chain:
        misses = (~hits).cumsum()
        before = np.concatenate([[0], misses])[proposal.starts[:-1]]
        reached = proposal.owners[misses == before[proposal.owners]]
        kept = np.bincount(reached, minlength=proposal.batch_size)
        return np.where(depths < kept[:, None], depths, -1), at + kept
    accepted = np.full((proposal.batch_size, len(depths)), -1)
    for depth in depths.tolist():
        level = np.flatnonzero(hits & (proposal.depths == depth + 1))
        level = level[at[proposal.owners[level]] == proposal.parent_rows[level]]
        owners, first = np.unique(proposal.owners[level], return_index=True)
        accepted[owners, depth] = proposal.places[level[first]]
        at[owners] = proposal.draft_rows[level[first]]
    return accepted, at


def verify_match(p: TargetDistribution, proposal: Proposal, coins: Coins) -> Verdict:
    """Draw the target's own token at every row, and `match` the drafts with them.

    p: one row for each root and each draft, [N, V]
    """
    return match(p.draw(coins), proposal)


def verify_residual(p: TargetDistribution, proposal: Proposal, coins: Coins) -> Verdict:
    """Accept a draft x with probability min(1, p(x)/q(x)); else draw from what q left of p.

    Siblings are tried in the order in which they were drawn, each against what the ones before
    it have left.
    """
    probs = p.probs()
    tokens, q = proposal.tokens, proposal.dense_q(probs)
    roots = torch.from_numpy(proposal.root_rows).to(probs.device)
    starts = p.positions[roots]
    accept_seeds = coins.fork(p.seeds[roots], Stream.ACCEPT, starts)
    ranks = torch.from_numpy(proposal.ranks).to(probs.device)
    walk = _Walk(proposal)
    left = probs[roots]  # [B, V] p at the walk's row, less what siblings took

    for depth in range(proposal.max_depth):
        for rank in range(int(proposal.ranks.max()) + 1):
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


def verify_block(
    p: TargetDistribution, proposal: Proposal[ChainDistribution], coins: Coins
) -> Verdict:
    """Accept the longest prefix of a chain that passes, judging the block as a whole.

    With r_0 = 1 and r_i = min(1, r_(i-1) p(x_i)/q(x_i)), the prefix of length i passes with
    probability h_i = S_i / (S_i + 1 - r_i), where S_i is the mass of (r_i p - q)+ at the next
    position; the whole chain passes with probability r_K.
    """
    if any(isinstance(claimed, Siblings) for claimed in proposal.distributions):
        raise TypeError("verify_block takes chains (PointMass or Sampled); use verify_residual")
    if not proposal.is_chain:
        raise TypeError("verify_block takes chains, and this proposal branches")
    probs = p.probs()
    q = proposal.dense_q(probs)
    batch, depth, device = proposal.batch_size, proposal.max_depth, probs.device
    roots = torch.from_numpy(proposal.root_rows).to(device)
    starts = torch.from_numpy(proposal.starts[:-1]).to(device)
    counts = torch.from_numpy(proposal.num_drafts).to(device)
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
    after = torch.where((kept < counts)[:, None] & (mass > 0), left / mass, probs[last])
    recover_seeds = coins.fork(p.seeds[roots], Stream.RECOVER, positions)
    next_tokens = coins.draw(after.log(), recover_seeds, p.positions[last])
    steps = torch.arange(depth, device=device).expand(batch, depth)
    return Verdict(torch.where(steps < kept[:, None], steps, -1), next_tokens)


VERIFY: dict[RuleName, Callable[[TargetDistribution, Proposal[Any], Coins], Verdict]] = {
    "match": verify_match,
    "residual": verify_residual,
    "block": verify_block,
}


def verify(rule: RuleName, p: TargetDistribution, proposal: Proposal[Any], coins: Coins) -> Verdict:
    """Apply the rule of that name; it must fit the proposal's distributions."""
    check_choice("rule", rule, VERIFY)
    return VERIFY[rule](p, proposal, coins)


class _Walk:
    """A walk down each request's tree, from its root, along the drafts that are accepted.

    rows: [B] the row where each walk stands
    """

    def __init__(self, proposal: Proposal) -> None:
        device = proposal.tokens.device
        self.rows = torch.from_numpy(proposal.root_rows).to(device, copy=True)
        self.owners = torch.from_numpy(proposal.owners).to(device)
        self.starts = torch.from_numpy(proposal.starts[:-1]).to(device)
        self._depths = torch.from_numpy(proposal.depths).to(device)
        self._draft_rows = torch.from_numpy(proposal.draft_rows).to(device)
        self._parent_rows = torch.from_numpy(proposal.parent_rows).to(device)
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
