"""What a drafter proposes, and the law by which it was drawn.

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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from outrider.errors import DraftFault

ROOT = -1
"""The parent of a draft that follows the request's last token."""


@dataclass(frozen=True)
class PointMass:
    """Nothing is claimed about how the drafts were found: each is verified as a certainty.

    The safe law. It holds for n-grams, greedy drafts, and any other draft that does not depend on
    the coins of the verifier's `residual` and `block` rules.
    """

    def dense(self, tokens: Tensor, parents: Sequence[int], like: Tensor) -> Tensor:
        """Return q, [K, V]: row i is the law of draft i given the drafts before it."""
        return torch.nn.functional.one_hot(tokens, like.shape[-1]).to(like.dtype)


@dataclass(frozen=True)
class Sampled:
    """Draft i of a chain was drawn from `q[i]`, given the drafts before it.

    The chain may end at any draft for reasons found in the drafts so far. A draft must not be
    dropped for being what it is, though: that would change its law.

    q: [K, V] probabilities
    """

    q: Tensor

    def dense(self, tokens: Tensor, parents: Sequence[int], like: Tensor) -> Tensor:
        """Return q, [K, V]: row i is the law of draft i given the drafts before it."""
        return self.q.to(like.dtype)


@dataclass(frozen=True)
class Siblings:
    """The children of each node were drawn from one `q`, in order, and the shape chosen before.

    q: [K, V] probabilities; row i is the law of draft i before any sibling was drawn, so siblings
       have equal rows (`expand` makes that free)
    replacement: whether a sibling could be drawn again; if not, q without the earlier siblings,
       renormalised, is the law of the next
    """

    q: Tensor
    replacement: bool

    def dense(self, tokens: Tensor, parents: Sequence[int], like: Tensor) -> Tensor:
        """Return q, [K, V]: row i is the law of draft i given the drafts before it."""
        q = self.q.to(like.dtype)
        if self.replacement:
            return q
        q = q.clone()
        for i, parent in enumerate(parents):
            q[i, tokens[[j for j in range(i) if parents[j] == parent]]] = 0
        return q / q.sum(-1, keepdim=True)


Law = PointMass | Sampled | Siblings
ChainLaw = PointMass | Sampled
L_co = TypeVar("L_co", bound=Law, covariant=True)


@dataclass(frozen=True)
class Draft(Generic[L_co]):
    """The drafts of one request.

    tokens:  [K] token ids, parents before children
    parents: [K] index of each draft's parent among `tokens`, or ROOT
    confidences: [K] how sure the drafter is of each draft, given those before it, from 0 to 1; or
             nothing, if it cannot say. They decide how many drafts are verified, and nothing else.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    law: L_co
    confidences: tuple[float, ...] = ()

    def keep(self, nodes: Sequence[int]) -> Draft[PointMass]:
        """Return these drafts alone, in this order; each one's parent must be among them.

        Nothing is claimed of them any more: a draft left out for what it is would change its law.
        """
        place = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        return Draft(
            tokens=tuple(self.tokens[node] for node in nodes),
            parents=tuple(place[self.parents[node]] for node in nodes),
            law=PointMass(),
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
    tokens: Sequence[int], law: Sampled, *, confidences: Sequence[float] = ()
) -> Draft[Sampled]: ...
def chain(
    tokens: Sequence[int], law: ChainLaw | None = None, *, confidences: Sequence[float] = ()
) -> Draft[Any]:
    """Return a chain of drafts; without a law, nothing is claimed about them."""
    parents = tuple(range(-1, len(tokens) - 1))
    claimed = PointMass() if law is None else law
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


def unite(drafts: Sequence[Draft[Law]]) -> tuple[Draft[PointMass], list[list[int]]]:
    """Join several drafts for one request into a tree that has each of their paths once.

    Returns the tree and, for each of the drafts, where its tokens are in it. The first draft's come
    first, in their order. A token is as sure as the surest says.
    """
    tokens: list[int] = []
    parents: list[int] = []
    sure: list[float] = []
    known: dict[tuple[int, int], int] = {}
    places: list[list[int]] = []
    for draft in drafts:
        mine: list[int] = []
        for token, parent, confidence in zip(draft.tokens, draft.parents, draft.sure, strict=True):
            above = ROOT if parent == ROOT else mine[parent]
            node = known.setdefault((above, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(above)
                sure.append(confidence)
            sure[node] = max(sure[node], confidence)
            mine.append(node)
        places.append(mine)
    return Draft(tuple(tokens), tuple(parents), PointMass(), tuple(sure)), places


@dataclass(frozen=True)
class Proposal(Generic[L_co]):
    """The drafts of a batch of requests: a forest, one tree for each, with the law of each.

    tokens:     [M] int64, request by request, parents before children
    num_drafts: [B]
    parents:    [M] index of each draft's parent *among its request's drafts*, or ROOT
    laws:       [B]
    confidences: [M] how sure the drafter is of each draft; 1 where it does not say
    """

    tokens: Tensor
    num_drafts: tuple[int, ...]
    parents: tuple[int, ...]
    laws: tuple[L_co, ...]
    confidences: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        total = sum(self.num_drafts)
        if not self.confidences:
            object.__setattr__(self, "confidences", (1.0,) * total)
        if len(self.confidences) != total or not all(0 <= c <= 1 for c in self.confidences):
            raise DraftFault(f"{total} drafts need as many confidences, from 0 to 1")
        if self.tokens.shape != (total,) or len(self.parents) != total:
            raise DraftFault(f"{total} drafts announced, {tuple(self.tokens.shape)} given")
        if len(self.laws) != len(self.num_drafts) or any(k < 0 for k in self.num_drafts):
            raise DraftFault("each request needs one law and a number of drafts >= 0")
        for start, count, law in zip(self.starts, self.num_drafts, self.laws, strict=False):
            parents = self.parents[start : start + count]
            if any(not ROOT <= parent < i for i, parent in enumerate(parents)):
                raise DraftFault("a parent must come before its child")
            if isinstance(law, Sampled) and parents != tuple(range(-1, count - 1)):
                raise DraftFault("Sampled is the law of a chain; a tree's is Siblings or PointMass")
            if isinstance(law, (Sampled, Siblings)) and len(law.q) != count:
                raise DraftFault(f"{count} drafts with {len(law.q)} rows of q")

    @staticmethod
    def of(drafts: Sequence[Draft[L_co]]) -> Proposal[L_co]:
        """Return the proposal made of each request's drafts."""
        tokens = [token for draft in drafts for token in draft.tokens]
        return Proposal(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            num_drafts=tuple(len(draft.tokens) for draft in drafts),
            parents=tuple(parent for draft in drafts for parent in draft.parents),
            laws=tuple(draft.law for draft in drafts),
            confidences=tuple(confidence for draft in drafts for confidence in draft.sure),
        )

    @staticmethod
    def unclaimed(
        tokens: Sequence[int], num_drafts: Sequence[int], parents: Sequence[int]
    ) -> Proposal[PointMass]:
        """Return drafts of which nothing is claimed: those of all requests one after the other."""
        laws = (PointMass(),) * len(num_drafts)
        ids = torch.tensor(list(tokens), dtype=torch.int64)
        return Proposal(ids, tuple(num_drafts), tuple(parents), laws)

    @staticmethod
    def empty(batch_size: int) -> Proposal[PointMass]:
        """Return the proposal that drafts nothing: plain decoding."""
        return Proposal.of([chain(())] * batch_size)

    @staticmethod
    def join(parts: Sequence[tuple[Sequence[int], Proposal[L_co]]]) -> Proposal[L_co]:
        """Return one proposal made of several, each with the places of its requests in the whole.

        The places of all parts together are 0, 1, ..., B - 1.
        """
        where = {r: (part, i) for rs, part in parts for i, r in enumerate(rs)}
        return Proposal.pick([where[r] for r in range(len(where))])

    @staticmethod
    def pick(chosen: Sequence[tuple[Proposal[L_co], int]]) -> Proposal[L_co]:
        """Return a proposal in which each request has the drafts of some request of another."""
        spans = [(part, slice(part.starts[i], part.starts[i + 1])) for part, i in chosen]
        tokens = [part.tokens[span] for part, span in spans]
        return Proposal(
            tokens=torch.cat(tokens),
            num_drafts=tuple(part.num_drafts[i] for part, i in chosen),
            parents=tuple(parent for part, span in spans for parent in part.parents[span]),
            laws=tuple(part.laws[i] for part, i in chosen),
            confidences=tuple(sure for part, span in spans for sure in part.confidences[span]),
        )

    def drafts(self) -> list[Draft[L_co]]:
        """Return the drafts of each request. Waits for the device."""
        tokens, found = self.tokens.tolist(), []
        for start, end, law in zip(self.starts, self.starts[1:], self.laws, strict=False):
            span = slice(start, end)
            found.append(
                Draft(tuple(tokens[span]), self.parents[span], law, self.confidences[span])
            )
        return found

    def to(self, device: torch.device) -> Proposal[L_co]:
        """Return the proposal with its tokens on this device."""
        if self.tokens.device == device:
            return self
        return replace(self, tokens=self.tokens.to(device))

    @property
    def batch_size(self) -> int:
        """B, the number of requests."""
        return len(self.num_drafts)

    @property
    def num_rows(self) -> int:
        """N = M + B: a row for each draft and one for each root."""
        return len(self.parents) + self.batch_size

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """[B + 1] where each request's drafts begin, and M."""
        starts = [0]
        for count in self.num_drafts:
            starts.append(starts[-1] + count)
        return tuple(starts)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[M] the number of drafts on the path to each draft, itself included."""
        depths: list[int] = []
        for start, parent in zip(self._owner_starts, self.parents, strict=True):
            depths.append(1 if parent == ROOT else depths[start + parent] + 1)
        return tuple(depths)

    @property
    def is_chain(self) -> bool:
        """Whether no request's drafts branch."""
        return not any(self.ranks)

    @property
    def max_depth(self) -> int:
        """D, the most drafts that one request can have accepted."""
        return max(self.depths, default=0)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """[M] the request of each draft."""
        return tuple(r for r, count in enumerate(self.num_drafts) for _ in range(count))

    @cached_property
    def _owner_starts(self) -> tuple[int, ...]:
        return tuple(self.starts[r] for r in self.owners)

    @cached_property
    def root_rows(self) -> tuple[int, ...]:
        """[B] the row of each request's last token."""
        return tuple(start + r for r, start in enumerate(self.starts[:-1]))

    @cached_property
    def draft_rows(self) -> tuple[int, ...]:
        """[M] the row of each draft."""
        return tuple(i + r + 1 for i, r in enumerate(self.owners))

    @cached_property
    def parent_rows(self) -> tuple[int, ...]:
        """[M] the row whose logits judge each draft."""
        return tuple(
            self.root_rows[r] + 1 + parent
            for r, parent in zip(self.owners, self.parents, strict=True)
        )

    @cached_property
    def row_owners(self) -> tuple[int, ...]:
        """[N] the request of each row."""
        return tuple(r for r, count in enumerate(self.num_drafts) for _ in range(count + 1))

    @cached_property
    def row_depths(self) -> tuple[int, ...]:
        """[N] how far each row lies beyond its request's last token."""
        depths = [0] * self.num_rows
        for row, depth in zip(self.draft_rows, self.depths, strict=True):
            depths[row] = depth
        return tuple(depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """[M] each draft's place among its siblings, from 0."""
        seen: dict[int, int] = {}
        ranks = []
        for row in self.parent_rows:
            ranks.append(seen.get(row, 0))
            seen[row] = ranks[-1] + 1
        return tuple(ranks)

    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each row, the draft tokens from the root to it: [N] of differing length.

        Reads the tokens, so it waits for the device: only what looks back needs it (penalties,
        grammars).
        """
        tokens = self.tokens.tolist()
        paths: list[tuple[int, ...]] = [()] * self.num_rows
        for i, (row, parent_row) in enumerate(zip(self.draft_rows, self.parent_rows, strict=True)):
            paths[row] = (*paths[parent_row], tokens[i])
        return tuple(paths)

    def dense_q(self, like: Tensor) -> Tensor:
        """Return q, [M, V]: row i is the law of draft i given the drafts before it.

        like: [.., V] gives the vocabulary and the type
        """
        q = like.new_zeros((len(self.parents), like.shape[-1]))
        for start, end, law in zip(self.starts[:-1], self.starts[1:], self.laws, strict=True):
            q[start:end] = law.dense(self.tokens[start:end], self.parents[start:end], like)
        return q
