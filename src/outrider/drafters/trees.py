"""EAGLE's dynamic tree: a model that can branch drafts where the text is the likeliest to go.

A chain goes on from its last draft, however unsure that was. A tree goes on from the drafts that
are the likeliest to be reached, of all that there are: deep where the model is sure, wide where it
is not. Each pass reads up to `width` of them for each request, side by side. How likely a draft is
is learned: with the target's own coins, a token that is drawn is right more often than the model
thinks (see `calibration`).

Only so many drafts are verified. A draft that is not among the likeliest of them now will not have
children among them: it is not read. So a tree ends by itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.core import (
    AheadTree,
    Bools,
    Budget,
    Coins,
    DraftFault,
    Floats,
    Proposal,
    Request,
    Rows,
    chain,
    target_distribution,
)
from outrider.drafters.calibration import Calibration

NO_NUMBERS = "the draft model's logits are not numbers"


class CachedLength(Protocol):
    """A draft model's handle of a sequence: it knows how many of its tokens are cached."""

    @property
    def length(self) -> int:
        """The number of cached tokens."""
        ...


S = TypeVar("S", bound=CachedLength)


class TreeModel(Protocol[S]):
    """What a draft model must do to draft trees. S: its handle of a sequence.

    vocab_size: it reads ids below this
    max_length: the longest sequence it can read
    max_branches: the most branches at once
    """

    vocab_size: int
    max_length: int
    max_branches: int

    def extend(self, segments: Sequence[tuple[S, Sequence[int]]]) -> Tensor:
        """Append tokens to sequences. Return the logits after the last token of each, [B, V]."""
        ...

    def fork(self, sequence: S) -> S:
        """Return a branch: what the sequence has is shared, what follows is its own."""
        ...

    def close(self, sequence: S) -> None:
        """Give the cache of a branch back."""
        ...


@dataclass(frozen=True)
class Place(Generic[S]):
    """A draft that could be read.

    number: among the drafts of its tree; the text's last token is 0
    path: the drafts from the text to it
    above: the sequence that ends before it; the root's is that of the text
    """

    chance: float
    number: int
    path: tuple[int, ...]
    above: S


class GrowingTree(Generic[S]):
    """The tree of a request while it grows.

    most: so many drafts will be verified
    vocab_size, depth: a draft that is beyond these cannot be read
    """

    def __init__(
        self, request: Request, sequence: S, most: int, vocab_size: int, depth: int
    ) -> None:
        self.request, self._most = request, most
        self._vocab_size, self._depth = vocab_size, depth
        self.drafts = AheadTree(request.length)
        self._places: list[tuple[float, int, Place[S]]] = []
        self._best: list[float] = []  # the chances of the likeliest drafts, a heap
        self._num_nodes = 1
        # what follows each draft that was read: the first number, tokens, claims
        self._following: dict[int, tuple[int, Sequence[int], Sequence[float]]] = {}
        self._wait(Place(1.0, 0, (), sequence))

    def _wait(self, place: Place[S]) -> None:
        heapq.heappush(self._places, (-place.chance, place.number, place))

    @property
    def promise(self) -> float:
        """The chance that the text reaches the draft that would be read next."""
        if not self._places:
            return 0.0
        chance = -self._places[0][0]
        is_among = len(self._best) < self._most or chance > self._best[0]
        return chance if is_among else 0.0

    def take(self, width: int) -> list[Place[S]]:
        """Take the likeliest drafts to read them."""
        found: list[Place[S]] = []
        while len(found) < width and self.promise > 0.0:
            found.append(heapq.heappop(self._places)[2])
        return found

    def add(
        self,
        parent: Place[S],
        sequence: S,
        tokens: Sequence[int],
        claims: Sequence[float],
        chances: Sequence[float],
    ) -> None:
        """Add what may follow a draft that was read.

        sequence: it ends with the draft
        claims: how sure the model is of each token
        chances: that each is right, if the draft is
        """
        first, ends = self._num_nodes, self.request.eos_token_ids
        self.drafts.add(parent.number, first, tokens, chances)
        self._following[parent.number] = first, tokens, claims
        for number, (token, right) in enumerate(zip(tokens, chances, strict=True), first):
            chance, path = parent.chance * right, (*parent.path, token)
            if token < self._vocab_size and token not in ends and len(path) <= self._depth:
                self._wait(Place(chance, number, path, sequence))
            heapq.heappush(self._best, chance)
            if len(self._best) > self._most:
                heapq.heappop(self._best)
        self._num_nodes += len(tokens)

    def teach(self, calibration: Calibration) -> None:
        """Tell which drafts were right: the request has gone on."""
        number, greedy = 0, self.request.sampling.is_greedy
        for token in self.request.tokens_from(self.drafts.began):
            if number not in self._following:
                return
            first, tokens, claims = self._following[number]
            for rank, claimed in enumerate(claims):
                calibration.observe(rank, min(1.0, claimed), greedy, tokens[rank] == token)
            if token not in tokens:
                return
            number = first + tokens.index(token)


class TreeDrafting(Generic[S]):
    """Drafts trees for many requests, one pass at a time for all of them.

    vocab_size: of the target's logits
    width: how many drafts a pass reads for a request, and how many tokens may follow each
    """

    def __init__(self, model: TreeModel[S], vocab_size: int, width: int) -> None:
        self._model, self._vocab_size, self._width = model, vocab_size, width
        self._calibration = Calibration(width)
        self._trees: dict[int, GrowingTree[S]] = {}

    def propose(
        self, sequences: Sequence[tuple[Request, S]], budget: Budget, least: float
    ) -> Proposal:
        """Draft as far as passes pay.

        sequences: of the requests, in the order of the budget; what is unread of them is read
        least: a request whose likeliest draft has a smaller chance needs no further pass
        """
        model, branches = self._model, list[S]()
        self.forget([request for request, _ in sequences])
        limits = budget.max_drafts.tolist()
        for (request, sequence), most in zip(sequences, limits, strict=True):
            depth, unread = model.max_length - request.length, request.tokens_from(sequence.length)
            if most and depth >= 0 and max(unread) < model.vocab_size:
                tree = GrowingTree(request, sequence, most, model.vocab_size, depth)
                self._trees[request.id] = tree
        growing = [self._trees[r.id] for r, _ in sequences if r.id in self._trees]
        try:
            while places := self._next(growing, budget, least, model.max_branches - len(branches)):
                segments: list[tuple[S, list[int]]] = []
                for tree, place in places:
                    if place.path:
                        branches.append(model.fork(place.above))
                        segments.append((branches[-1], [place.path[-1]]))
                    else:
                        unread = tree.request.tokens_from(place.above.length)
                        segments.append((place.above, unread))
                logits = fit_vocabulary(model.extend(segments), self._vocab_size)
                self._branch(places, [sequence for sequence, _ in segments], logits, budget.coins)
        finally:
            for branch in branches:
                model.close(branch)
        drafts = [
            self._trees[request.id].drafts.best(most, trees=True)
            if request.id in self._trees
            else chain(())
            for (request, _), most in zip(sequences, limits, strict=True)
        ]
        return Proposal.of(drafts)

    def forget(self, requests: Sequence[Request]) -> None:
        """Drop the trees of requests, and learn which of their drafts were right."""
        for request in requests:
            if (tree := self._trees.pop(request.id, None)) is not None:
                tree.teach(self._calibration)

    def _next(
        self, trees: Sequence[GrowingTree[S]], budget: Budget, least: float, room: int
    ) -> list[tuple[GrowingTree[S], Place[S]]]:
        """Return the drafts that the next pass reads, `room` at most; none if it does not pay."""
        eager = [tree for tree in trees if tree.promise > 0.0 and tree.promise >= least]
        if sum(tree.promise for tree in eager) < budget.min_gain:
            return []
        found = [(tree, place) for tree in eager for place in tree.take(self._width)]
        return found[:room]

    def _branch(
        self,
        places: Sequence[tuple[GrowingTree[S], Place[S]]],
        sequences: Sequence[S],
        logits: Tensor,
        coins: Coins,
    ) -> None:
        """Add to trees what may follow the drafts that were read."""
        requests, paths = [tree.request for tree, _ in places], [place.path for _, place in places]
        rows = Rows(requests, range(len(places)), [len(path) for path in paths], lambda: paths)
        tokens, claims, greedy = likely_tokens(logits, rows, coins, self._width)
        if np.isnan(claims).any():
            raise DraftFault(NO_NUMBERS)
        chances = self._calibration.of(claims, greedy).tolist()
        columns = zip(places, sequences, tokens, claims.tolist(), chances, strict=True)
        for (tree, place), sequence, *following in columns:
            count = sum(claim > 0.0 for claim in following[1])  # the coins cannot draw the others
            tree.add(place, sequence, *(column[:count] for column in following))


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Return the logits of the target's vocabulary: padding dropped, or -inf added."""
    missing = vocab_size - logits.shape[-1]
    if not missing:
        return logits
    return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)


def likely_tokens(
    logits: Tensor, rows: Rows, coins: Coins, count: int
) -> tuple[list[list[int]], Floats, Bools]:
    """Return what may follow each row, how sure the model is of it, and which rows are greedy.

    A row whose logits are not numbers is sure of nothing: NaN.

    logits: [N, V] of a draft model
    count: of tokens, the one first that the target would draw if it thought the same
    """
    guess = target_distribution(logits, rows)
    drawn = guess.ranked(coins, count)
    claims = guess.logits.softmax(-1).gather(-1, drawn).cpu().numpy()
    return drawn.tolist(), claims, np.array(guess.greedy)
