"""What a drafter proposes, and the distribution that it was drawn from.

A proposal covers a batch. Each request has its own number of drafts, zero included, and its
drafts form a tree whose root is the request's last token; a chain is a tree without branches.
The tokens may live on a device; the shape (how many, which parent) is known to the host, so that
a step can be laid out without waiting for the device.

*Rows.* The target sees one row for each request's last token (its root) and one for each draft.
Row order is request by request, root first:

    request 0: root, draft, draft | request 1: root | request 2: root, draft ...

The logits of a row are the target's opinion of what follows that row's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeVar

from outrider.core.lazy import lazy
from outrider.errors import DraftFault

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ROOT = -1
"""The parent of a draft that follows the request's last token."""


@dataclass(frozen=True)
class PointMass:
    """Nothing is claimed about how the drafts were found: each is verified as a certainty.

    The safe claim. It holds for n-grams, greedy drafts, and any other draft that does not depend on
    the coins of the verifier's `residual` and `block` rules.
    """

    def dense(self, tokens: Tensor, parents: Sequence[int], like: Tensor) -> Tensor:
        """Return q, [K, V]: row i is the distribution of draft i given those before it."""
        return torch.nn.functional.one_hot(tokens, like.shape[-1]).to(like.dtype)


@dataclass(frozen=True)
class Sampled:
    """Draft i of a chain was drawn from `q[i]`, given the drafts before it.

    The chain may end at any draft for reasons found in the drafts so far. A draft must not be
    dropped for being what it is, though: that would change its distribution.

    q: [K, V] probabilities
    """

    q: Tensor

    def dense(self, tokens: Tensor, parents: Sequence[int], like: Tensor) -> Tensor:
        """Return q, [K, V]: row i is the distribution of draft i given those before it."""
        return self.q.to(like.dtype)


@dataclass(frozen=True)
class Siblings:
    """The children of each node were drawn from one `q`, in order, and the shape chosen before.

    q: [K, V] probabilities; row i is the distribution of draft i before any sibling was drawn, so
       siblings have equal rows (`expand` makes that free)
    replacement: whether a sibling could be drawn again; if not, q without the earlier siblings,
       renormalised, is the distribution of the next
    """

    q: Tensor
    replacement: bool

    def dense(self, tokens: Tensor, parents: Sequence[int], like: Tensor) -> Tensor:
        """Return q, [K, V]: row i is the distribution of draft i given those before it."""
        q = self.q.to(like.dtype)
        if self.replacement:
            return q
        q = q.clone()
        for i, parent in enumerate(parents):
            q[i, tokens[[j for j in range(i) if parents[j] == parent]]] = 0
        return q / q.sum(-1, keepdim=True)


DraftDistribution = PointMass | Sampled | Siblings
ChainDistribution = PointMass | Sampled
D_co = TypeVar("D_co", bound=DraftDistribution, covariant=True, default=DraftDistribution)


@dataclass(frozen=True)
class Draft(Generic[D_co]):
    """The drafts of one request.

    tokens:  [K] token ids, parents before children
    parents: [K] index of each draft's parent among `tokens`, or ROOT
    distribution: how the drafts were drawn: `PointMass()` claims nothing and always holds
    confidences: [K] how sure the drafter is of each draft, given those before it, from 0 to 1; or
             nothing, if it cannot say. They decide how many drafts are verified, and nothing else.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    distribution: D_co
    confidences: tuple[float, ...] = ()

    def keep(self, nodes: Sequence[int]) -> Draft[PointMass]:
        """Return these drafts alone, in this order; each one's parent must be among them.

        Nothing is claimed of them any more: leaving a draft out for what it is would change its
        distribution.
        """
        place = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        return Draft(
            tokens=tuple(self.tokens[node] for node in nodes),
            parents=tuple(place[self.parents[node]] for node in nodes),
            distribution=PointMass(),
            confidences=tuple(self.sure[node] for node in nodes),
        )

    @property
    def sure(self) -> tuple[float, ...]:
        """[K] the confidences; 1 where the drafter does not say."""
        return self.confidences or (1.0,) * len(self.tokens)


@overload
def chain(tokens: Sequence[int], *, confidences: Sequence[float] = ()) -> Draft[PointMass]: ...
@overload
def chain(
    tokens: Sequence[int], distribution: Sampled, *, confidences: Sequence[float] = ()
) -> Draft[Sampled]: ...
def chain(
    tokens: Sequence[int],
    distribution: ChainDistribution | None = None,
    *,
    confidences: Sequence[float] = (),
) -> Draft[Any]:
    """Return a chain of drafts, each of which follows the one before it.

    tokens: [K] token ids
    distribution: how they were drawn; without it, nothing is claimed about them
    confidences: [K] how sure the drafter is of each, from 0 to 1; or nothing
    """
    parents = tuple(range(-1, len(tokens) - 1))
    claimed = PointMass() if distribution is None else distribution
    return Draft(tuple(tokens), parents, claimed, tuple(confidences))


def survival(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    """Return the chance of each draft that it and all above it are accepted.

    chances: of each, given that all above it are
    """
    found: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        found.append(chance if parent == ROOT else chance * found[parent])
    return found


def likeliest(survival: Sequence[float], most: int) -> list[int]:
    """Return the drafts that are the likeliest to be accepted, in their order.

    Each one's parent is among them: it comes before it, and is at least as likely.
    """
    return sorted(sorted(range(len(survival)), key=lambda node: -survival[node])[:most])


@dataclass(frozen=True, eq=False)
class Proposal(Generic[D_co]):
    """The drafts of a batch of requests: a forest, one tree and one distribution for each.

    The shape is flat arrays for the whole batch: nothing in it is an object for each request, so
    that a step over many requests costs the host little more than one over few. `drafts` is the
    view of them that is easy to read.

    tokens:     [M] int64, request by request, parents before children
    num_drafts: [B] int64
    parents:    [M] int64 index of each draft's parent *among its request's drafts*, or ROOT
    distributions: [B] how each request's drafts were drawn
    confidences: [M] how sure the drafter is of each draft; 1 where it does not say
    """

    tokens: Tensor
    num_drafts: Ints
    parents: Ints
    distributions: tuple[D_co, ...]
    confidences: Floats = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        # any sequence of numbers will do
        for name, kind in (("num_drafts", np.int64), ("parents", np.int64)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), kind))
        total, sure = int(self.num_drafts.sum()), np.asarray(self.confidences, np.float64)
        object.__setattr__(self, "confidences", sure if sure.size else np.ones(max(0, total)))
        if (
            self.confidences.shape != (total,)
            or not ((self.confidences >= 0) & (self.confidences <= 1)).all()
        ):
            raise DraftFault(f"{total} drafts need as many confidences, from 0 to 1")
        if self.tokens.shape != (total,) or self.parents.shape != (total,):
            raise DraftFault(f"{total} drafts announced, {tuple(self.tokens.shape)} given")
        if len(self.distributions) != len(self.num_drafts) or (self.num_drafts < 0).any():
            raise DraftFault("each request needs one distribution and a number of drafts >= 0")
        if ((self.parents < ROOT) | (self.parents >= self.places)).any():
            raise DraftFault("a parent must come before its child")
        if set(map(type, self.distributions)) != {PointMass}:
            self._check_distributions()

    def _check_distributions(self) -> None:
        starts = self.starts
        for start, end, claimed in zip(starts, starts[1:], self.distributions, strict=False):
            if isinstance(claimed, Sampled) and (self.ranks[start:end] > 0).any():
                raise DraftFault("Sampled is for chains; a tree is Siblings or PointMass")
            if isinstance(claimed, (Sampled, Siblings)) and len(claimed.q) != end - start:
                raise DraftFault(f"{end - start} drafts with {len(claimed.q)} rows of q")

    @staticmethod
    def of(drafts: Sequence[Draft[D_co]]) -> Proposal[D_co]:
        """Return the proposal made of each request's drafts."""
        tokens = [token for draft in drafts for token in draft.tokens]
        return Proposal(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            num_drafts=np.array([len(draft.tokens) for draft in drafts], np.int64),
            parents=np.array([parent for draft in drafts for parent in draft.parents], np.int64),
            distributions=tuple(draft.distribution for draft in drafts),
            confidences=np.array([sure for draft in drafts for sure in draft.sure], np.float64),
        )

    @staticmethod
    def unclaimed(
        tokens: Sequence[int] | Ints,
        num_drafts: Sequence[int] | Ints,
        parents: Sequence[int] | Ints,
        confidences: Sequence[float] | Floats = (),
    ) -> Proposal[PointMass]:
        """Return drafts of which nothing is claimed: those of all requests one after the other."""
        return Proposal(
            tokens=torch.from_numpy(np.asarray(tokens, np.int64)),
            num_drafts=np.asarray(num_drafts, np.int64),
            parents=np.asarray(parents, np.int64),
            distributions=(PointMass(),) * len(num_drafts),
            confidences=np.asarray(confidences, np.float64),
        )

    @staticmethod
    def found(
        tokens: Ints, num_drafts: Ints, parents: Ints, confidences: Floats, *, trees: bool = True
    ) -> Proposal[PointMass]:
        """Return the same as `unclaimed`, unchecked: of arrays that a lookup of ours made.

        trees: whether drafts may branch
        """
        claimed = (PointMass(),) * len(num_drafts)
        made = _checked(torch.from_numpy(tokens), num_drafts, parents, claimed, confidences)
        if not trees:
            made.__dict__["is_chain"] = True
        return made

    @staticmethod
    @lru_cache(maxsize=512)
    def empty(batch_size: int) -> Proposal[PointMass]:
        """Return the proposal that drafts nothing: plain decoding."""
        return Proposal.unclaimed((), np.zeros(batch_size, np.int64), ())

    @staticmethod
    def join(parts: Sequence[tuple[Sequence[int], Proposal[D_co]]]) -> Proposal[D_co]:
        """Return one proposal made of several, each with the places of its requests in the whole.

        The places of all parts together are 0, 1, ..., B - 1.
        """
        order = np.concatenate([np.asarray(rs, np.int64) for rs, _ in parts])
        counts = np.concatenate([part.num_drafts for _, part in parts])
        back = np.argsort(order)
        # where the drafts of each request begin, in the parts put together
        begins = (counts.cumsum() - counts)[back]
        source = _ranges(begins, counts[back])
        claimed = [one for _, part in parts for one in part.distributions]
        return _checked(
            torch.cat([part.tokens for _, part in parts])[torch.from_numpy(source)],
            counts[back],
            np.concatenate([part.parents for _, part in parts])[source],
            tuple(claimed[i] for i in back.tolist()),
            np.concatenate([part.confidences for _, part in parts])[source],
        )

    def take(self, nodes: Ints) -> Proposal[PointMass]:
        """Return these drafts alone, in this order; each one's parent must be among them.

        Nothing is claimed of them any more: leaving a draft out for what it is would change its
        distribution.

        nodes: [m] which drafts of the whole batch, in rising order
        """
        nothing = (PointMass(),) * self.batch_size
        if len(nodes) == len(self.parents):  # all of them: the layout stays as well
            whole: Proposal[PointMass] = object.__new__(Proposal)
            whole.__dict__.update(self.__dict__, distributions=nothing)
            return whole
        owners = self.owners[nodes]
        counts = np.bincount(owners, minlength=self.batch_size)
        if self.is_chain:  # the first drafts of each chain: their parents stay where they are
            parents = self.parents[nodes]
        else:
            starts = counts.cumsum() - counts
            place = np.full(len(self.parents) + 1, ROOT)  # the last entry is the root's
            place[nodes] = np.arange(len(nodes)) - starts[owners]
            parents = place[self.above[nodes]]
        tokens = _pick(self.tokens, nodes)
        made = _checked(tokens, counts, parents, nothing, self.confidences[nodes])
        made.__dict__["owners"] = owners
        if self.is_chain:
            made.__dict__["is_chain"] = True
        return made

    def drafts(self) -> list[Draft[D_co]]:
        """Return the drafts of each request. Waits for the device."""
        tokens, parents, sure = self.tokens.tolist(), self.parents.tolist(), self.confidences
        found, starts, sure = [], self.starts.tolist(), sure.tolist()
        for start, end, claimed in zip(starts, starts[1:], self.distributions, strict=False):
            own = slice(start, end)
            found.append(Draft(tuple(tokens[own]), tuple(parents[own]), claimed, tuple(sure[own])))
        return found

    def to(self, device: torch.device) -> Proposal[D_co]:
        """Return the proposal with its tokens on this device."""
        if self.tokens.device == device:
            return self
        moved = copy(self)  # with the layout that was worked out
        object.__setattr__(moved, "tokens", self.tokens.to(device, non_blocking=True))
        return moved

    @property
    def batch_size(self) -> int:
        """B, the number of requests."""
        return len(self.num_drafts)

    @property
    def num_rows(self) -> int:
        """N = M + B: a row for each draft and one for each root."""
        return len(self.parents) + self.batch_size

    @lazy
    def starts(self) -> Ints:
        """[B + 1] where each request's drafts begin, and M."""
        starts = np.zeros(self.batch_size + 1, np.int64)
        np.cumsum(self.num_drafts, out=starts[1:])
        return starts

    @lazy
    def owners(self) -> Ints:
        """[M] the request of each draft."""
        return np.arange(self.batch_size).repeat(self.num_drafts)

    @lazy
    def places(self) -> Ints:
        """[M] the index of each draft among its request's."""
        return np.arange(len(self.parents)) - self.starts[self.owners]

    @lazy
    def above(self) -> Ints:
        """[M] the index of each draft's parent among all drafts; M for the root."""
        inside = self.starts[self.owners] + self.parents
        return np.where(self.parents == ROOT, len(self.parents), inside)

    @lazy
    def is_chain(self) -> bool:
        """Whether no request's drafts branch."""
        return bool((self.parents == self.places - 1).all())

    @lazy
    def depths(self) -> Ints:
        """[M] the number of drafts on the path to each draft, itself included."""
        if self.is_chain:
            return self.places + 1
        root = len(self.parents)
        up, depths, at = np.append(self.above, root), np.ones(root, np.int64), self.above
        while (inside := at != root).any():
            depths += inside
            at = up[at]
        return depths

    @lazy
    def max_depth(self) -> int:
        """D, the most drafts that one request can have accepted."""
        lengths = self.num_drafts if self.is_chain else self.depths
        return int(lengths.max(initial=0))

    @lazy
    def root_rows(self) -> Ints:
        """[B] the row of each request's last token."""
        return self.starts[:-1] + np.arange(self.batch_size)

    @lazy
    def draft_rows(self) -> Ints:
        """[M] the row of each draft."""
        return np.arange(1, len(self.parents) + 1) + self.owners

    @lazy
    def parent_rows(self) -> Ints:
        """[M] the row whose logits judge each draft."""
        return self.root_rows[self.owners] + 1 + self.parents

    @lazy
    def row_owners(self) -> Ints:
        """[N] the request of each row."""
        return np.repeat(np.arange(self.batch_size), self.num_drafts + 1)

    @lazy
    def row_depths(self) -> Ints:
        """[N] how far each row lies beyond its request's last token."""
        depths = np.zeros(self.num_rows, np.int64)
        depths[self.draft_rows] = self.depths
        return depths

    @lazy
    def ranks(self) -> Ints:
        """[M] each draft's place among its siblings, from 0."""
        order = np.argsort(self.parent_rows, kind="stable")
        rows = self.parent_rows[order]
        ranks = np.empty(len(rows), np.int64)
        ranks[order] = np.arange(len(rows)) - np.searchsorted(rows, rows)
        return ranks

    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each row, the draft tokens from the root to it: [N] of differing length.

        Reads the tokens, so it waits for the device: only what looks back needs it (penalties,
        grammars).
        """
        tokens = self.tokens.tolist()
        paths: list[tuple[int, ...]] = [()] * self.num_rows
        rows = zip(self.draft_rows.tolist(), self.parent_rows.tolist(), strict=True)
        for token, (row, parent_row) in zip(tokens, rows, strict=True):
            paths[row] = (*paths[parent_row], token)
        return tuple(paths)

    def dense_q(self, like: Tensor) -> Tensor:
        """Return q, [M, V]: row i is the distribution of draft i given those before it.

        like: [.., V] gives the vocabulary and the type
        """
        q = like.new_zeros((len(self.parents), like.shape[-1]))
        parents, starts = self.parents.tolist(), self.starts.tolist()
        for start, end, claimed in zip(starts, starts[1:], self.distributions, strict=False):
            q[start:end] = claimed.dense(self.tokens[start:end], parents[start:end], like)
        return q


def _checked(
    tokens: Tensor,
    num_drafts: Ints,
    parents: Ints,
    distributions: tuple[D_co, ...],
    confidences: Floats,
) -> Proposal[D_co]:
    """Return a proposal made of parts of one that has been checked: it is not checked again."""
    made: Proposal[D_co] = object.__new__(Proposal)
    made.__dict__.update(
        tokens=tokens,
        num_drafts=num_drafts,
        parents=parents,
        distributions=distributions,
        confidences=confidences,
    )
    return made


def _pick(tokens: Tensor, nodes: Ints) -> Tensor:
    """Return these of the tokens. On the host, numpy does it in a fraction of torch's time."""
    if tokens.device.type == "cpu":
        return torch.from_numpy(tokens.numpy()[nodes])
    return tokens[torch.from_numpy(nodes)]


def _ranges(begins: Ints, counts: Ints) -> Ints:
    """Return begin, begin + 1, ... (count of them) for each pair, one after the other."""
    ends = counts.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(begins - (ends - counts), counts)
