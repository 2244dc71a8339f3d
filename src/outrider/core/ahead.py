"""Drafting ahead: what may come, as a tree that is made before it is known which of it does.

While the target verifies K drafts d_1 ... d_K, the outcome of the step is not known: k of them are
accepted, and a token x follows. Such an outcome is a path d_1 ... d_k x. All outcomes, and what
follows each of them, are one tree with a known text at its root. When the step is over, the tokens
that it emitted are a way down this tree, and what is below its end are the next step's drafts.

So nobody has to ask for an outcome by name, and a tree that comes late is not lost: it is walked
further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.lazy import lazy
from outrider.core.proposal import ROOT, Draft, PointMass, likeliest, survival


@dataclass(frozen=True)
class AheadTree:
    """What may follow a text.

    length: of the text, in tokens
    draft: what may follow it, as a tree
    """

    length: int
    draft: Draft

    @lazy
    def _children(self) -> dict[tuple[int, int], int]:
        edges = zip(self.draft.parents, self.draft.tokens, strict=True)
        return {edge: node for node, edge in enumerate(edges)}

    def below(self, tokens: Sequence[int]) -> Draft[PointMass] | None:
        """Return what may follow once the text has gone on with these tokens.

        None if the tree does not have them: the text went another way.
        """
        end = ROOT
        for token in tokens:
            found = self._children.get((end, token))
            if found is None:
                return None
            end = found
        if end == ROOT:
            return self.draft.keep(range(len(self.draft.tokens)))
        place = {end: ROOT}
        for node, parent in enumerate(self.draft.parents):
            if parent in place:
                place[node] = len(place) - 1
        del place[end]
        nodes = list(place)
        return Draft(
            tokens=tuple(self.draft.tokens[node] for node in nodes),
            parents=tuple(place.get(self.draft.parents[node], ROOT) for node in nodes),
            distribution=PointMass(),
            confidences=tuple(self.draft.sure[node] for node in nodes),
        )


def best_part(draft: Draft, most: int, trees: bool) -> Draft[PointMass]:
    """Return the part of a tree that is the likeliest to be accepted, of at most so many drafts.

    trees: whether it may branch; else it is the likeliest chain
    """
    reached = survival(draft.parents, draft.sure)
    if trees:
        return draft.keep(likeliest(reached, most))
    best: dict[int, int] = {}
    for node, parent in enumerate(draft.parents):
        if parent not in best or reached[node] > reached[best[parent]]:
            best[parent] = node
    nodes, end = list[int](), ROOT
    while end in best and len(nodes) < most:
        end = best[end]
        nodes.append(end)
    return draft.keep(nodes)
