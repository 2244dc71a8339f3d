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
import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from outrider.core import Coins, Request, Rows
from outrider.drafters.calibration import Calibration
from outrider.drafters.trees import NO_NUMBERS, CachedLength, likely_tokens

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=CachedLength)
K = TypeVar("K", bound=Hashable)

MAX_CHUNK = 512
"""The most tokens of a text that one pass reads: others do not wait long for a long prompt."""


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
    """A token that was read, and the tokens that may follow it.

    token: its id
    number: among the nodes of its tree
    depth: tokens from where the tree began to it
    score: the logarithm of the chance that the text reaches it from there
    parent: None for the root
    sequence: the draft model's cache up to it; the root's is that of the text
    tokens, claims, scores: of each child: its id, how sure the draft model is of it, its score
    first: the number of the first child; the others' follow
    read: children that were read, by their places
    is_live: whether the text can reach what is below it
    """

    token: int
    number: int = 0
    depth: int = 0
    score: float = 0.0
    parent: Node[S] | None = None
    sequence: S | None = None
    tokens: Sequence[int] = ()
    claims: Sequence[float] = ()
    scores: Sequence[float] = ()
    first: int = 0
    read: dict[int, Node[S]] = field(default_factory=dict)
    is_live: bool = True

    def child(self, place: int) -> Node[S]:
        """Return a child that was not read."""
        number, score = self.first + place, self.scores[place]
        return Node(self.tokens[place], number, self.depth + 1, score, self)

    def below(self) -> list[Node[S]]:
        """Return all nodes below this one, parents before children."""
        found = list(self.read.values())
        for node in found:
            found += node.read.values()
        return found


@dataclass(eq=False)
class Text(Generic[K, S]):
    """A request's text, and the tree of what may come.

    sequence: the draft model's cache of the text
    is_readable: whether the draft model can read the text
    root: the text's last token
    began: how long the text was where the tree began
    num_nodes: how many the tree has had since then, the first root and all children included
    num_read: nodes below the root
    frontier: children that could be read, the likeliest first: (-score, number, parent, place).
        Some of them may have been dropped.
    """

    key: K
    request: Request
    sequence: S
    is_readable: bool
    root: Node[S] = field(init=False)
    began: int = 0
    num_nodes: int = 1
    num_read: int = 0
    frontier: list[tuple[float, int, Node[S], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a tree."""
        self.root, self.began = Node(self.request.last_token), self.request.length
        self.num_nodes, self.num_read, self.frontier = 1, 0, []

    @property
    def has_unread(self) -> bool:
        """Whether the draft model has not read all of the text itself."""
        return self.request.length > self.sequence.length


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


class Growth(Generic[K, S]):
    """Grows the trees of all texts.

    model: reads them
    coins: of the target
    width: the most nodes that one pass reads
    fan_out: how many tokens may follow a node
    max_nodes: of a tree, the most that are read
    min_chance: nodes that are less likely to be reached are not read
    passes: how many were made
    faulty: texts that the last pass failed at, and why: they are forgotten
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
        self.faulty: dict[K, str] = {}
        self._suspects: dict[K, None] = {}  # a pass failed that had these, in order

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
        self._texts[key] = Text(key, request, self._model.open(), self._can_read(request, 0))

    def close(self, key: K) -> None:
        """Forget a text."""
        if (text := self._texts.pop(key, None)) is not None:
            self._drop(text, None)
            self._model.close(text.sequence)

    def _can_read(self, request: Request, since: int) -> bool:
        """Say whether the draft model can read a request. since: what is before it can be read"""
        known = max(request.tokens_from(since), default=0) < self._model.vocab_size
        return known and request.length <= self._model.max_length

    def commit(self, key: K, tokens: Sequence[int]) -> None:
        """Go down the tree as the target did. Where it has no such path, it begins anew."""
        text = self._texts[key]
        new, walked, read = self._walk(text, tokens)
        before = text.request.length
        text.request.extend(tokens, None)
        text.is_readable = text.is_readable and self._can_read(text.request, before)
        keep = new if walked == len(tokens) else None
        if read is not None:  # what was read of the path becomes the text's own
            kept = [] if keep is None else [node.sequence for node in keep.below()]
            self._model.adopt(text.sequence, read, [s for s in kept if s is not None])
        self._drop(text, keep)
        if keep is None:
            text.begin()
            return
        text.root, keep.parent, keep.sequence = keep, None, None
        if len(text.frontier) > 4 * self._max_nodes * self._fan_out:
            text.frontier = [entry for entry in text.frontier if _waits(entry)]
            heapq.heapify(text.frontier)

    def _walk(self, text: Text[K, S], tokens: Sequence[int]) -> tuple[Node[S], int, S | None]:
        """Return where tokens lead to, how many the tree has, and the last cache on the way."""
        node, read, greedy = text.root, None, text.request.sampling.is_greedy
        for walked, token in enumerate(tokens):
            found = None
            for place, other in enumerate(node.tokens):
                right = other == token
                self.calibration.observe(place, node.claims[place], greedy, right)
                found = place if right else found
            if found is None:
                return node, walked, read
            node = node.read.get(found) or node.child(found)
            read = node.sequence if node.sequence is not None else read
        return node, len(tokens), read

    def _drop(self, text: Text[K, S], keep: Node[S] | None) -> None:
        """Give back the caches of a tree, but for what is below one of its nodes."""
        dropped = [text.root]
        for node in dropped:
            if node.sequence is not None:
                self._model.close(node.sequence)
                text.num_read -= 1
            if node is not keep:
                dropped += node.read.values()
                node.is_live, node.parent, node.read = False, None, {}

    def grow(self, owner: Callable[[K], Hashable] | None = None) -> list[Grown]:
        """Make one pass. Return what was added to trees; nothing if there is nothing to do.

        If it fails, its texts begin anew, each in passes of its own. One that fails there is
        forgotten: see `faulty`.

        owner: says whose a text is: each owner has its turn
        """
        self.faulty = {}
        chosen = self._choose_suspect() or self._choose(owner)
        if not chosen:
            return []
        try:
            return self._read(chosen)
        except Exception as error:
            self._suspect({text.key: text.request for text, _ in chosen}, error)
            return []

    def _choose_suspect(self) -> list[tuple[Text[K, S], Node[S]]]:
        """Return the next part of a text that has to be read alone; nothing if there is none."""
        while self._suspects:
            text = self._texts.get(next(iter(self._suspects)))
            if text is not None and text.is_readable and text.has_unread:
                return [(text, text.root)]
            del self._suspects[next(iter(self._suspects))]
        return []

    def _suspect(self, requests: dict[K, Request], error: Exception) -> None:
        """Forget the text that a pass failed at; if there are several, let each begin anew."""
        if len(requests) == 1:
            (key,) = requests
            self.close(key)
            self.faulty[key] = repr(error)
            return
        logger.warning("a pass failed; its %d texts begin anew: %r", len(requests), error)
        for key, request in requests.items():
            self.open(key, request)
            self._suspects[key] = None

    def _read(self, chosen: Sequence[tuple[Text[K, S], Node[S]]]) -> list[Grown]:
        """Make a pass over these nodes."""
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
                parent = node.parent
                above = text.sequence if parent is text.root or parent is None else parent.sequence
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
                    _, _, parent, place = heapq.heappop(text.frontier)
                    parent.read[place] = node = parent.child(place)
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
        while frontier and not (_waits(frontier[0]) and frontier[0][2].depth < deepest):
            heapq.heappop(frontier)
        if not frontier or text.num_read >= self._max_nodes:
            return None
        score = -frontier[0][0] - root.score
        return score if score >= self._min_score else None

    def _branch(self, read: Sequence[tuple[Text[K, S], Node[S]]], logits: Tensor) -> list[Grown]:
        """Add to each node that was read the tokens that may follow it."""
        rows = Rows(
            requests=[text.request for text, _ in read],
            owners=range(len(read)),
            depths=[node.depth - text.root.depth for text, node in read],
            paths=lambda: [_path(node) for _, node in read],
        )
        tokens, claims, greedy = likely_tokens(logits, rows, self._coins, self._fan_out)
        if (broken := np.isnan(claims).any(-1)).any():
            self.faulty = {read[row][0].key: NO_NUMBERS for row in np.flatnonzero(broken).tolist()}
            claims[broken] = 0.0
        sure = self.calibration.of(claims, greedy)
        columns = tokens, claims.tolist(), sure.tolist(), np.log(sure).tolist()
        grown = [self._add(*part) for part in zip(read, *columns, strict=True)]
        for key in self.faulty:
            self.close(key)
        return [one for one in grown if one.key not in self.faulty] if self.faulty else grown

    def _add(
        self,
        read: tuple[Text[K, S], Node[S]],
        tokens: list[int],
        claims: list[float],
        sure: list[float],
        logs: list[float],
    ) -> Grown:
        """Add to a node the tokens that may follow it, the likeliest first."""
        text, node = read
        while claims and claims[-1] <= 0.0:  # the coins cannot draw it
            tokens.pop(), claims.pop(), sure.pop()
        node.tokens, node.claims, node.first = tokens, claims, text.num_nodes
        node.scores = [node.score + log for log in logs]
        text.num_nodes += len(tokens)
        ends, vocab_size = text.request.eos_token_ids, self._model.vocab_size
        for place, token in enumerate(tokens):
            if token < vocab_size and token not in ends:
                entry = -node.scores[place], node.first + place, node, place
                heapq.heappush(text.frontier, entry)
        return Grown(text.key, text.began, node.number, node.first, tokens, sure)


def _waits(entry: tuple[float, int, Node[S], int]) -> bool:
    """Say whether a child of a frontier could be read."""
    _, _, parent, place = entry
    return parent.is_live and place not in parent.read


def _path(node: Node[S]) -> list[int]:
    """Return the tokens from below the root to a node."""
    path: list[int] = []
    while node.parent is not None:
        path.append(node.token)
        node = node.parent
    return path[::-1]
