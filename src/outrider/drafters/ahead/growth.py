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
new root. What is below stays, with its cache; everything else is dropped. Where there is no such
way, a new tree begins.

A pass is short, and there are many nodes. So nothing here looks at all of them: a text keeps those
that could be read in a heap, and a node is visited when it is made, read and dropped.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from outrider.core import (
    Bools,
    Coins,
    DraftFault,
    Floats,
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
    parent: None for the root
    number: among the nodes of its tree
    depth: tokens from where the tree began to it
    score: the logarithm of the chance that the text reaches it from there
    rank: its place among its parent's children
    claimed: how sure the draft model is of it
    sequence: the draft model's cache up to it, once it was read; the root's is that of the text
    waits: whether it could be read
    """

    token: int
    parent: Node[S] | None = None
    number: int = 0
    depth: int = 0
    score: float = 0.0
    rank: int = 0
    claimed: float = 1.0
    sequence: S | None = None
    waits: bool = False
    children: list[Node[S]] = field(default_factory=list)

    def below(self) -> list[Node[S]]:
        """Return all nodes below this one, parents before children."""
        found = list(self.children)
        for node in found:
            found += node.children
        return found


@dataclass(eq=False)
class Text(Generic[K, S]):
    """A request's text, and the tree of what may come.

    sequence: the draft model's cache of the text
    root: the text's last token
    began: how long the text was where the tree began
    num_nodes: how many the tree has had since then, the first root included
    num_read: nodes below the root that were read
    frontier: nodes that wait, the likeliest first; some may have been dropped
    is_readable: whether the draft model can read the text
    """

    key: K
    request: Request
    sequence: S
    root: Node[S]
    is_readable: bool
    began: int = 0
    num_nodes: int = 1
    num_read: int = 0
    frontier: list[tuple[float, int, Node[S]]] = field(default_factory=list)

    @property
    def has_unread(self) -> bool:
        """Whether the draft model has not read all of the text itself."""
        return self.request.length > self.sequence.length

    def begin(self) -> None:
        """Begin a tree."""
        self.root, self.began = Node(self.request.last_token), self.request.length
        self.num_nodes, self.num_read, self.frontier = 1, 0, []


class Grown(NamedTuple):
    """What was added to a tree: the tokens that may follow one of its nodes.

    key: of the text
    began: how long the text was where the tree began
    parent: the node's number
    first: the number of the first token; the others' follow
    sure: how likely each is to follow
    """

    key: Any
    began: int
    parent: int
    first: int
    tokens: list[int]
    sure: list[float]


class Calibration:
    """How often a child of a node was right, by its rank and by how sure the draft model was.

    Before anything is known: a greedy child is as likely as the draft model says. With shared coins
    a token that is drawn is right wherever the two models agree, however unlikely it was to be
    drawn: its chance falls with the rank only.

    ranks: how many children a node has
    """

    def __init__(self, ranks: int) -> None:
        drawn = np.repeat(0.6 * 0.3 ** np.arange(ranks)[:, None], BINS, 1)
        greedy = np.repeat((np.arange(BINS)[None] + 0.5) / BINS, ranks, 0)
        self._rates = np.stack([drawn, greedy])
        self._seen = np.full(self._rates.shape, PRIOR)

    def of(self, claimed: Floats, greedy: Bools) -> Floats:
        """Return the chance of each child, given that its parent was right.

        claimed: [N, ranks]; greedy: [N] -> [N, ranks]
        """
        bins = np.minimum(BINS - 1, (claimed * BINS).astype(np.int64))
        rates: Floats = self._rates[
            greedy.astype(np.int64)[:, None], np.arange(bins.shape[1]), bins
        ]
        return rates

    def observe(self, rank: int, claimed: float, greedy: bool, right: bool) -> None:
        """Learn whether a child was right; what is long ago fades."""
        place = int(greedy), rank, min(BINS - 1, int(claimed * BINS))
        self._seen[place] = seen = min(MEMORY, self._seen[place] + 1)
        self._rates[place] += (right - self._rates[place]) / seen


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
        self._width, self._fan_out, self._max_nodes = width, fan_out, max_nodes
        self._min_score = math.log(min_chance) if min_chance else -math.inf
        self._texts: dict[K, Text[K, S]] = {}
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
        root, readable = Node[S](request.last_token), self._can_read(request, 0)
        text = self._texts[key] = Text(key, request, self._model.open(), root, readable)
        text.begin()

    def close(self, key: K) -> None:
        """Forget a text."""
        if (text := self._texts.pop(key, None)) is not None:
            self._drop(text, text.root.children)
            self._model.close(text.sequence)

    def _can_read(self, request: Request, since: int) -> bool:
        """Say whether the draft model can read a request. since: what is before it can be read"""
        known = max(request.tokens_from(since), default=0) < self._model.vocab_size
        return known and request.length <= self._model.max_length

    def commit(self, key: K, tokens: Sequence[int]) -> None:
        """Go down the tree as the target did. Where it has no such path, it begins anew."""
        text = self._texts[key]
        path, node, greedy = list[Node[S]](), text.root, text.request.sampling.is_greedy
        for token in tokens:
            found = None
            for child in node.children:
                right = child.token == token
                self.calibration.observe(child.rank, child.claimed, greedy, right)
                found = child if right else found
            if found is None:
                break
            path.append(found)
            node = found
        before = text.request.length
        text.request.extend(tokens, None)
        text.is_readable = text.is_readable and self._can_read(text.request, before)
        new = node if len(path) == len(tokens) else None
        self._take_over(text, path, new)
        self._drop(text, text.root.children, keep=new)
        if new is None:
            text.begin()
        else:
            text.root, new.parent, new.sequence, new.waits = new, None, None, False

    def _take_over(self, text: Text[K, S], path: Sequence[Node[S]], new: Node[S] | None) -> None:
        """Keep what was read of the path as the text's own."""
        read = [node.sequence for node in path if node.sequence is not None]
        if read:
            kept = [] if new is None else [node.sequence for node in new.below()]
            self._model.adopt(text.sequence, read[-1], [s for s in kept if s is not None])

    def _drop(
        self, text: Text[K, S], nodes: Sequence[Node[S]], keep: Node[S] | None = None
    ) -> None:
        """Give back the caches of nodes and of all below them, but for what is below one."""
        dropped = list(nodes)
        for node in dropped:
            if node is not keep:
                dropped += node.children
            node.waits = False
            if node.sequence is not None:
                self._model.close(node.sequence)
                text.num_read -= 1

    def grow(self, owner: Callable[[K], Hashable] | None = None) -> list[Grown]:
        """Make one pass. Return what was added to trees; nothing if there is nothing to do.

        owner: says whose a text is: each owner has its turn
        """
        chosen = self._choose(owner)
        if not chosen:
            return []
        segments: list[tuple[S, Sequence[int]]] = []
        complete: list[tuple[Text[K, S], Node[S]]] = []
        places: list[int] = []
        for place, (text, node) in enumerate(chosen):
            if node is text.root:
                unread = text.request.tokens_from(text.sequence.length)
                segments.append((text.sequence, unread[:MAX_CHUNK]))
                if len(unread) > MAX_CHUNK:
                    continue
            else:
                assert node.parent is not None
                above = text.sequence if node.parent is text.root else node.parent.sequence
                assert above is not None
                node.sequence = self._model.fork(above)
                segments.append((node.sequence, [node.token]))
            complete.append((text, node))
            places.append(place)
        self.passes += 1
        logits = self._model.extend(segments)
        if not complete:
            return []
        return self._branch(complete, logits if len(places) == len(chosen) else logits[places])

    def _choose(self, owner: Callable[[K], Hashable] | None) -> list[tuple[Text[K, S], Node[S]]]:
        """Take the nodes that are the likeliest to be reached, of each owner's texts in turn."""
        by_owner: dict[Hashable, list[tuple[float, int, Text[K, S]]]] = {}
        for number, text in enumerate(self._texts.values()):
            if (score := self._best_score(text)) is not None:
                whose = owner(text.key) if owner is not None else None
                by_owner.setdefault(whose, []).append((-score, number, text))
        for mine in by_owner.values():
            heapq.heapify(mine)
        chosen: list[tuple[Text[K, S], Node[S]]] = []
        while by_owner and len(chosen) < self._width:
            for whose, mine in list(by_owner.items()):
                if len(chosen) == self._width:
                    break
                _, number, text = mine[0]
                if text.has_unread:
                    chosen.append((text, text.root))
                    heapq.heappop(mine)
                else:
                    node = heapq.heappop(text.frontier)[2]
                    node.waits = False
                    text.num_read += 1
                    chosen.append((text, node))
                    if (score := self._best_score(text)) is not None:
                        heapq.heapreplace(mine, (-score, number, text))
                    else:
                        heapq.heappop(mine)
                if not mine:
                    del by_owner[whose]
        return chosen

    def _best_score(self, text: Text[K, S]) -> float | None:
        """Return the score of the node that a text would have read next; None if there is none."""
        if not text.is_readable:
            return None
        if text.has_unread:
            return 0.0
        root, frontier = text.root, text.frontier
        deepest = root.depth + self._model.max_length - text.request.length
        while frontier and not (frontier[0][2].waits and frontier[0][2].depth <= deepest):
            heapq.heappop(frontier)
        if not frontier or text.num_read >= self._max_nodes:
            return None
        score = frontier[0][2].score - root.score
        return score if score >= self._min_score else None

    def _branch(self, read: Sequence[tuple[Text[K, S], Node[S]]], logits: Tensor) -> list[Grown]:
        """Add to each node that was read the tokens that may follow it."""
        rows = Rows(
            requests=[text.request for text, _ in read],
            owners=range(len(read)),
            depths=[node.depth - text.root.depth for text, node in read],
            paths=lambda: [_path(node) for _, node in read],
        )
        guess = target_distribution(logits, rows)
        drawn = guess.ranked(self._coins, self._fan_out)
        claims = guess.logits.softmax(-1).gather(-1, drawn).cpu().numpy()
        if np.isnan(claims).any():
            raise DraftFault("the draft model's logits are not numbers")
        sure = np.clip(self.calibration.of(claims, np.array(guess.greedy)), 1e-9, 1.0).tolist()
        parts = zip(read, drawn.tolist(), claims.tolist(), sure, strict=True)
        return [self._add(text, node, *rest) for (text, node), *rest in parts]

    def _add(
        self,
        text: Text[K, S],
        node: Node[S],
        drawn: Sequence[int],
        claims: Sequence[float],
        sure: Sequence[float],
    ) -> Grown:
        """Add to a node the tokens that may follow it."""
        grown = Grown(text.key, text.began, node.number, text.num_nodes, [], [])
        ends, vocab_size = text.request.eos_token_ids, self._model.vocab_size
        for rank, token in enumerate(drawn):
            if claims[rank] <= 0.0:
                continue
            child = Node(token, node, text.num_nodes, node.depth + 1)
            child.score, child.rank = node.score + math.log(sure[rank]), rank
            child.claimed = min(1.0, claims[rank])
            text.num_nodes += 1
            node.children.append(child)
            grown.tokens.append(token)
            grown.sure.append(sure[rank])
            if token < vocab_size and token not in ends:
                child.waits = True
                heapq.heappush(text.frontier, (-child.score, child.number, child))
        return grown


def _path(node: Node[S]) -> list[int]:
    """Return the tokens from below the root to a node."""
    path: list[int] = []
    while node.parent is not None:
        path.append(node.token)
        node = node.parent
    return path[::-1]
