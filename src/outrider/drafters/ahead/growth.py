"""A draft model that never waits: it grows, best first, a tree of what may come of each text.

Every pass reads the nodes that the texts are the likeliest to reach, of all texts together, and
adds to each the tokens that may follow it. Where the draft model is sure, the tree becomes long;
where it is not, it branches. So the share of outcomes that each depth gets (SSD's *fan-out*) need
not be set: it follows from the chances.

Under the rule `match` the target's coins are known, and the tree is grown with them: the first
child of a node is what the target would draw if it thought as the draft model does, the next ones
what it would draw if the first were impossible. So the token after the last accepted draft is
foreseen at temperature 1 too.

When the target has emitted tokens, they are walked down the tree. The node where they end is the
new root. What is below stays, with its cache; everything else is dropped.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from outrider.core import (
    AheadTree,
    Coins,
    Draft,
    DraftFault,
    PointMass,
    Request,
    Rows,
    target_distribution,
)
from outrider.drafters.model import CachedLength

S = TypeVar("S", bound=CachedLength)
K = TypeVar("K", bound=Hashable)

MAX_CHUNK = 512
"""The most tokens of a text that one pass reads: others do not wait long for a long prompt."""

BINS = 10
"""Ranges of confidence that are told apart."""

PRIOR, MEMORY = 8.0, 512.0
"""How many observations a chance counts for before the first one, and at most."""


class BranchingModel(Protocol[S]):
    """A causal language model whose sequences can branch. S: its handle of a sequence.

    vocab_size: it reads ids below this
    max_length: the longest sequence it can read
    """

    vocab_size: int
    max_length: int

    def open(self) -> S:
        """Return a new, empty sequence."""
        ...

    def extend(self, segments: Sequence[tuple[S, Sequence[int]]]) -> Tensor:
        """Append tokens to sequences. Return the logits after the last token of each, [B, V]."""
        ...

    def close(self, sequence: S) -> None:
        """Give a sequence's cache back."""
        ...

    def fork(self, sequence: S) -> S:
        """Return a branch: what the sequence has is shared, what follows is its own."""
        ...

    def adopt(self, sequence: S, branch: S, others: Sequence[S]) -> None:
        """Go on as a branch did. others: branches of the branch, which stay good"""
        ...


@dataclass(eq=False)
class Node(Generic[S]):
    """A token that may come.

    token: its id
    depth: tokens from the root to it
    sure: how likely it is to follow its parent
    chance: how likely the text is to reach it from the root
    rank: its place among its parent's children
    claimed: how sure the draft model is of it
    sequence: the draft model's cache up to it, once it was read; the root's is that of the text
    """

    token: int
    depth: int = 0
    sure: float = 1.0
    chance: float = 1.0
    rank: int = 0
    claimed: float = 1.0
    sequence: S | None = None
    children: list[Node[S]] = field(default_factory=list)

    def below(self) -> Iterator[Node[S]]:
        """Yield all nodes below this one, parents before children."""
        found = list(self.children)
        for node in found:
            found += node.children
        return iter(found)


@dataclass(eq=False)
class Text(Generic[S]):
    """A request's text, and the tree of what may come.

    sequence: the draft model's cache of the text
    root: the text's last token
    """

    request: Request
    sequence: S
    root: Node[S]
    num_read: int = 0

    @property
    def unread(self) -> int:
        """How many tokens of the text itself the draft model has not read."""
        return self.request.length - self.sequence.length


class Calibration:
    """How often a child of a node was right, by its rank and by how sure the draft model was.

    Before anything is known: a greedy child is as likely as the draft model says. With shared coins
    a token that is drawn is right wherever the two models agree, however unlikely it was to be
    drawn: its chance falls with the rank only.

    ranks: how many children a node has
    """

    def __init__(self, ranks: int) -> None:
        bins = [(b + 0.5) / BINS for b in range(BINS)]
        self._rates = {
            True: [list(bins) for _ in range(ranks)],
            False: [[0.6 * 0.3**rank] * BINS for rank in range(ranks)],
        }
        self._seen = {kind: [[PRIOR] * BINS for _ in range(ranks)] for kind in (True, False)}

    def of(self, rank: int, claimed: float, greedy: bool) -> float:
        """Return the chance of a child, given that its parent was right."""
        return self._rates[greedy][rank][_bin(claimed)]

    def observe(self, rank: int, claimed: float, greedy: bool, right: bool) -> None:
        """Learn whether a child was right; what is long ago fades."""
        rates, seen, b = self._rates[greedy][rank], self._seen[greedy][rank], _bin(claimed)
        seen[b] = min(MEMORY, seen[b] + 1)
        rates[b] += (right - rates[b]) / seen[b]


def _bin(claimed: float) -> int:
    return min(BINS - 1, int(claimed * BINS))


class Growth(Generic[K, S]):
    """Grows the trees of all texts.

    model: reads them
    coins: of the target
    width: the most nodes that one pass reads
    fan_out: how many tokens may follow a node
    max_nodes: of a tree, the most that are read
    min_chance: nodes that are less likely to be reached are not read
    passes: how many were made
    """

    def __init__(
        self,
        model: BranchingModel[S],
        coins: Coins,
        width: int = 8,
        fan_out: int = 3,
        max_nodes: int = 128,
        min_chance: float = 0.01,
    ) -> None:
        if min(width, fan_out, max_nodes) < 1 or not 0 <= min_chance <= 1:
            raise ValueError("need width, fan_out, max_nodes >= 1 and 0 <= min_chance <= 1")
        self._model, self._coins = model, coins
        self._width, self._fan_out = width, fan_out
        self._max_nodes, self._min_chance = max_nodes, min_chance
        self._texts: dict[K, Text[S]] = {}
        self.calibration = Calibration(fan_out)
        self.passes = 0

    @property
    def names(self) -> list[K]:
        """The keys of all texts."""
        return list(self._texts)

    def length(self, key: K) -> int:
        """Return how many tokens a text has; 0 if there is none of this name."""
        return self._texts[key].request.length if key in self._texts else 0

    def open(self, key: K, request: Request) -> None:
        """Begin a tree. request: changed by `commit` only"""
        self.close(key)
        self._texts[key] = Text(request, self._model.open(), Node(request.last_token))

    def close(self, key: K) -> None:
        """Forget a text."""
        if (text := self._texts.pop(key, None)) is not None:
            self._drop(text.root)
            self._model.close(text.sequence)

    def commit(self, key: K, tokens: Sequence[int]) -> None:
        """Go down the tree as the target did. Where it has no such path, it begins anew."""
        text = self._texts[key]
        path, node, greedy = list[Node[S]](), text.root, text.request.sampling.is_greedy
        for token in tokens:
            for child in node.children:
                right = child.token == token
                self.calibration.observe(child.rank, child.claimed, greedy, right)
            found = next((child for child in node.children if child.token == token), None)
            if found is None:
                break
            path.append(found)
            node = found
        text.request.extend(tokens, None)
        was_foreseen = len(path) == len(tokens)
        new = path[-1] if was_foreseen else Node[S](tokens[-1])
        self._take_over(text, path, new if was_foreseen else None)
        self._drop(text.root, keep=new)
        text.root, reached = new, max(new.chance, 1e-9)
        new.depth, new.sequence = 0, None
        text.num_read = 0
        for parent in (new, *new.below()):
            text.num_read += parent.sequence is not None
            for child in parent.children:
                child.depth = parent.depth + 1
                child.chance = min(1.0, child.chance / reached)

    def _take_over(self, text: Text[S], path: Sequence[Node[S]], new: Node[S] | None) -> None:
        """Keep what was read of the path as the text's own."""
        read = [node.sequence for node in path if node.sequence is not None]
        if read:
            kept = [] if new is None else [n.sequence for n in new.below()]
            self._model.adopt(text.sequence, read[-1], [s for s in kept if s is not None])

    def _drop(self, root: Node[S], keep: Node[S] | None = None) -> None:
        """Give back the caches of a tree, but for what is below one of its nodes."""
        nodes = [root]
        for node in nodes:
            if node is not keep:
                nodes += node.children
            if node.sequence is not None:
                self._model.close(node.sequence)

    def grow(self, owner: Callable[[K], Hashable] | None = None) -> list[K]:
        """Make one pass. Return the texts whose trees have grown; none if there is nothing to do.

        owner: says whose a text is: each owner has its turn
        """
        chosen = self._choose(owner)
        if not chosen:
            return []
        segments: list[tuple[S, Sequence[int]]] = []
        complete: list[tuple[Text[S], Node[S], Sequence[Node[S]]]] = []
        places: list[int] = []
        for place, (text, path) in enumerate(chosen):
            node = path[-1]
            if node is text.root:
                unread = text.request.tokens_from(text.sequence.length)
                segments.append((text.sequence, unread[:MAX_CHUNK]))
                if len(unread) > MAX_CHUNK:
                    continue
            else:
                above = text.sequence if len(path) == 2 else path[-2].sequence
                assert above is not None
                node.sequence = self._model.fork(above)
                segments.append((node.sequence, [node.token]))
                text.num_read += 1
            complete.append((text, node, path[1:]))
            places.append(place)
        self.passes += 1
        logits = self._model.extend(segments)
        if complete:
            self._branch(complete, logits[places])
        keys = {id(text): key for key, text in self._texts.items()}
        return list(dict.fromkeys(keys[id(text)] for text, _, _ in complete))

    def _choose(self, owner: Callable[[K], Hashable] | None) -> list[tuple[Text[S], list[Node[S]]]]:
        """Return the unread nodes that are the likeliest to be reached, each with its path."""
        by_owner: dict[Hashable, list[tuple[float, int, Text[S], list[Node[S]]]]] = {}
        number = 0
        for key, text in self._texts.items():
            if not self._can_read(text):
                continue
            mine = by_owner.setdefault(owner(key) if owner is not None else None, [])
            for path in self._unread(text):
                number += 1
                mine.append((-path[-1].chance, number, text, path))
        for mine in by_owner.values():
            heapq.heapify(mine)
        chosen: list[tuple[Text[S], list[Node[S]]]] = []
        while by_owner and len(chosen) < self._width:
            for whose in list(by_owner):
                if not by_owner[whose]:
                    del by_owner[whose]
                elif len(chosen) < self._width:
                    chosen.append(heapq.heappop(by_owner[whose])[2:])
        return chosen

    def _can_read(self, text: Text[S]) -> bool:
        unread = text.request.tokens_from(text.sequence.length)
        fits = text.request.length <= self._model.max_length
        return fits and max(unread, default=0) < self._model.vocab_size

    def _unread(self, text: Text[S]) -> Iterator[list[Node[S]]]:
        """Yield the paths to nodes that could be read now: their parents are."""
        if text.unread:
            yield [text.root]
            return
        if text.num_read >= self._max_nodes:
            return
        room = self._model.max_length - text.request.length
        paths = [[text.root]]
        for path in paths:
            for child in path[-1].children:
                if child.sequence is not None:
                    paths.append([*path, child])
                elif child.chance >= self._min_chance and child.depth <= room:
                    ends = child.token in text.request.eos_token_ids
                    if not ends and child.token < self._model.vocab_size:
                        yield [*path, child]

    def _branch(
        self, read: Sequence[tuple[Text[S], Node[S], Sequence[Node[S]]]], logits: Tensor
    ) -> None:
        """Add to each node that was read the tokens that may follow it."""
        requests = [text.request for text, _, _ in read]
        paths = [tuple(node.token for node in path) for _, _, path in read]
        rows = Rows(requests, range(len(read)), [len(path) for path in paths], lambda: paths)
        guess = target_distribution(logits, rows)
        every = guess.logits.softmax(-1)
        for rank in range(self._fan_out):
            drawn = guess.draw(self._coins)
            claims = every.gather(-1, drawn[:, None])[:, 0].tolist()
            if any(math.isnan(claimed) for claimed in claims):
                raise DraftFault("the draft model's logits are not numbers")
            parts = zip(read, drawn.tolist(), claims, guess.greedy, strict=True)
            for (_, node, _), token, claimed, greedy in parts:
                if claimed > 0.0:
                    sure = self.calibration.of(rank, claimed, greedy)
                    place = node.depth + 1, sure, node.chance * sure
                    node.children.append(Node(token, *place, rank, min(1.0, claimed)))
            guess = replace(guess, logits=guess.logits.scatter(-1, drawn[:, None], -math.inf))

    def tree(self, key: K, most: int = 128) -> AheadTree:
        """Return the likeliest part of a text's tree."""
        text = self._texts[key]
        nodes = sorted(text.root.below(), key=lambda node: (-node.chance, node.depth))[:most]
        nodes.sort(key=lambda node: node.depth)
        above = {id(child): node for node in (text.root, *nodes) for child in node.children}
        place = {id(text.root): -1} | {id(node): i for i, node in enumerate(nodes)}
        draft = Draft(
            tokens=tuple(node.token for node in nodes),
            parents=tuple(place[id(above[id(node)])] for node in nodes),
            distribution=PointMass(),
            confidences=tuple(min(1.0, node.sure) for node in nodes),
        )
        return AheadTree(text.request.length, draft)
