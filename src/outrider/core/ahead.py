"""Drafting ahead: what may come, as a tree that is made before it is known which of it does.

While the target verifies K drafts d_1 ... d_K, the outcome of the step is not known: k of them are
accepted, and a token x follows. Such an outcome is a path d_1 ... d_k x. All outcomes, and what
follows each of them, are one tree with a known text at its root. When the step is over, the tokens
that it emitted are a way down this tree, and what is below its end are the next step's drafts.

So nobody has to ask for an outcome by name, and nodes that come late are not lost: they are added
to the tree, which is walked further.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.proposal import ROOT, Draft, PointMass, chain
from outrider.errors import DraftFault

MAX_NODES = 1 << 12
"""A tree takes no more."""

ENOUGH = 512
"""Nodes from which on it is worth a look which of them are out of reach."""


@dataclass(eq=False, slots=True)
class _Node:
    number: int
    token: int
    sure: float
    children: list[_Node] = field(default_factory=list)


class AheadTree:
    """What may follow a text: a tree that grows while the text goes down it.

    Who adds nodes gives them numbers; the one that the tree began with is 0.

    began: how long the text was then, in tokens
    length: of the text where it stands now
    vocab_size: tokens beyond it are left out, with what follows them
    """

    def __init__(self, length: int, vocab_size: int = 1 << 63) -> None:
        self.began = self.length = length
        self._vocab_size = vocab_size
        self._at = _Node(0, -1, 1.0)
        self._nodes, self._enough = {0: self._at}, ENOUGH

    def add(self, parent: int, first: int, tokens: Sequence[int], sure: Sequence[float]) -> None:
        """Add what may follow a node, unless that is out of reach, or is known.

        Raises DraftFault if other nodes have these numbers.

        first: the number of the first of these tokens; the others' follow
        sure: how likely each is to follow
        """
        above = self._nodes.get(parent)
        if above is None or above.children or len(self._nodes) >= MAX_NODES:
            return
        if not self._nodes.keys().isdisjoint(range(first, first + len(tokens))):
            raise DraftFault(f"two nodes of a tree with one number, from {first} on")
        for i, token in enumerate(tokens):
            if token >= self._vocab_size:
                continue
            node = self._nodes[first + i] = _Node(first + i, token, sure[i])
            above.children.append(node)

    def follow(self, tokens: Sequence[int]) -> bool:
        """Go down as the text did. Return whether the tree has all of this way, so far."""
        for token in tokens:
            for child in self._at.children:
                if child.token == token:
                    self._at = child
                    break
            else:
                return False
            self.length += 1
        if len(self._nodes) > self._enough:
            self._forget()
        return True

    def _forget(self) -> None:
        """Drop the nodes that the text can no longer reach."""
        found = [self._at]
        for node in found:
            found += node.children
        self._nodes = {node.number: node for node in found}
        self._enough = min(2 * len(found) + ENOUGH, MAX_NODES // 2)

    @property
    def is_leaf(self) -> bool:
        """Whether nothing is known to follow where the text stands."""
        return not self._at.children

    def best(self, most: int, trees: bool) -> Draft[PointMass]:
        """Return what is the likeliest to be accepted of what may follow.

        most: so many drafts at most
        trees: whether they may branch; else it is the likeliest chain
        """
        if trees:
            return self._best_tree(most)
        tokens, sure, at = list[int](), list[float](), self._at
        while at.children and len(tokens) < most:
            at = max(at.children, key=_sure)
            tokens.append(at.token)
            sure.append(at.sure)
        return chain(tokens, confidences=sure)

    def _best_tree(self, most: int) -> Draft[PointMass]:
        kept: list[tuple[_Node, int]] = []
        reachable = [(-child.sure, child.number, child, ROOT) for child in self._at.children]
        heapq.heapify(reachable)
        while reachable and len(kept) < most:
            chance, _, node, parent = heapq.heappop(reachable)
            for child in node.children:
                heapq.heappush(reachable, (chance * child.sure, child.number, child, len(kept)))
            kept.append((node, parent))
        return Draft(
            tokens=tuple(node.token for node, _ in kept),
            parents=tuple(parent for _, parent in kept),
            distribution=PointMass(),
            confidences=tuple(node.sure for node, _ in kept),
        )


def _sure(node: _Node) -> float:
    return node.sure
