"""A head as a draft model: its passes read tokens and the target's states side by side.

Everything else (how far a request drafts, coins, siblings, budgets) is the draft model's:
`drafters.model`. What differs is where states come from. Those of tokens that the target has read
are told by the host (`Outcome.hidden`). For drafts the head goes on from its own states; when the
target has judged them, they are read again with the target's.

If states of a request are missing (a cached prefix, a fault), the head has nothing to draft from:
the request has no drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from outrider.core import Outcome, Request
from outrider.drafters.heads.layers import Attend, HeadCache, HeadConfig, SequencePass
from outrider.drafters.model import DraftModel, ModelDrafter


class StateReader(Protocol):
    """A head: what reads states of the target, and drafts from them.

    hidden_layers: whose states: see `Drafter`
    """

    name: str
    hidden_layers: tuple[int, ...]
    config: HeadConfig

    def reduce(self, states: Tensor) -> Tensor:
        """Return what is kept of the target's states, [n, layers, H] -> [n, H]."""
        ...

    def logits(self, g: Tensor, /) -> Tensor:
        """Return logits over the target's vocabulary, [n, V]."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return its weights by name."""
        ...


class Head(StateReader, Protocol):
    """A head that drafts one token a pass, from the target's states or from its own."""

    def __call__(self, tokens: Tensor, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Read pairs of token and state. Return the states that follow, [N, H]."""
        ...


@dataclass(eq=False)
class ToldSequence:
    """One request in a head: what is cached, and the target's states that are not read yet.

    x: states of the target, reduced; the first is that of the token at position `first`
    """

    cache: HeadCache = field(default_factory=HeadCache)
    x: Tensor | None = None
    first: int = 0

    @property
    def length(self) -> int:
        """How many tokens are read."""
        return self.cache.length

    @property
    def known(self) -> int:
        """The number of tokens up to the last one whose state the target has told."""
        return 0 if self.x is None else self.first + len(self.x)

    def tell(self, first: int, x: Tensor) -> None:
        """Learn the target's states of the tokens from position `first` on."""
        if self.x is not None and first == self.known:
            x, first = torch.cat([self.x, x]), self.first
        self.x, self.first = x, first

    def next_states(self, count: int) -> Tensor:
        """Return the target's states that are to be read next, [count, H]."""
        assert self.x is not None
        start = self.cache.length - self.first
        return self.x[start : start + count]

    def drop_read(self) -> None:
        """Forget the states that are read: cached row i was made of the state at position i."""
        if self.x is not None:
            read = min(len(self.x), max(0, self.cache.length - self.first))
            self.x, self.first = self.x[read:], self.first + read


T = TypeVar("T", bound=ToldSequence)


@dataclass(eq=False)
class HeadSequence(ToldSequence):
    """One request in a head that reads pairs. Pair i is the state at i and the token after it.

    The first token has no state before it, so it is no pair: it counts as read from the start.

    own: the head's state after the last pair
    """

    own: Tensor | None = None

    @property
    def length(self) -> int:
        """How many tokens are read."""
        return self.cache.length + 1

    def pairs(self, count: int) -> Tensor:
        """Return the states beside the next tokens: the target's, or the head's own after them."""
        if self.cache.length >= self.known:
            assert self.own is not None
            assert count == 1, "drafts are read one by one"
            return self.own[None]
        return self.next_states(count)


class HeadModel:
    """Runs a head for `ModelDrafter`. The prompt is read in pieces of at most `max_catch_up`."""

    max_branches = 1 << 16

    def __init__(self, head: Head, max_unread: int = 512, max_catch_up: int = 2048) -> None:
        self.head = head
        self.vocab_size, self.max_length = head.config.vocab_size, head.config.max_length
        self.max_unread, self.max_catch_up = max_unread, max_catch_up

    def open(self, request: Request) -> HeadSequence:
        """Return an empty sequence: states are told later."""
        return HeadSequence()

    @torch.inference_mode()
    def extend(self, segments: Sequence[tuple[HeadSequence, Sequence[int]]]) -> Tensor:
        """Read tokens. Return the logits after the last one of each sequence, [B, V]."""
        self.catch_up(segments)
        own = [sequence.own for sequence, _ in segments]
        return self.head.logits(torch.stack([state for state in own if state is not None]))

    @torch.inference_mode()
    def catch_up(self, segments: Sequence[tuple[HeadSequence, Sequence[int]]]) -> None:
        """Read tokens."""
        sequences, counts = [s for s, _ in segments], [len(tokens) for _, tokens in segments]
        x = torch.cat([s.pairs(n) for s, n in zip(sequences, counts, strict=True)])
        tokens = torch.tensor([t for _, own in segments for t in own], device=x.device)
        spans = [range(s.length, s.length + n) for s, n in zip(sequences, counts, strict=True)]
        positions = torch.tensor([p for span in spans for p in span], device=x.device)
        attend = SequencePass([s.cache for s in sequences], counts)
        states = self.head(tokens, x, positions, attend)
        attend.keep()
        for sequence, mine in zip(sequences, states.split_with_sizes(counts), strict=True):
            sequence.own = mine[-1]
            sequence.drop_read()

    def fork(self, sequence: HeadSequence) -> HeadSequence:
        """Return a branch, which goes on from the head's own state."""
        return HeadSequence(cache=sequence.cache.fork(), own=sequence.own)

    def truncate(self, sequence: HeadSequence, length: int) -> None:
        """Forget the pairs beyond this length."""
        sequence.cache.truncate(max(0, length - 1))

    def close(self, sequence: HeadSequence) -> None:
        """Do nothing: the cache goes with the sequence."""


class StateDrafter(ModelDrafter[T]):
    """Drafts from the target's states, which it keeps until the head has read them."""

    def __init__(
        self,
        model: DraftModel[T],
        head: StateReader,
        vocab_size: int,
        min_survival: float,
        siblings: int,
        width: int = 0,
    ) -> None:
        super().__init__(model, vocab_size, min_survival, siblings, width)
        self.name, self.hidden_layers, self._head = head.name, head.hidden_layers, head

    @torch.inference_mode()
    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Forget the drafts, right or not, and keep the target's states of what was emitted."""
        for outcome in outcomes:
            request, sequence = outcome.request, self._states[outcome.request.id].sequence
            self._model.truncate(sequence, request.length)
            if outcome.hidden is not None:
                # the last of these states led to the last token that was emitted
                first = request.length + len(outcome.tokens) - 1 - len(outcome.hidden)
                sequence.tell(first, self._head.reduce(outcome.hidden))

    def ready(self, request: Request) -> bool:
        """Say whether the next pass can draft: few tokens are unread, and their states known."""
        return self._has_states(request) and super().ready(request)

    def catch_up(self, requests: Sequence[Request]) -> int:
        """Read some of the unread tokens of those requests whose states are known."""
        return super().catch_up([request for request in requests if self._has_states(request)])

    def _has_states(self, request: Request) -> bool:
        sequence = self._states[request.id].sequence
        return sequence.first <= sequence.cache.length and sequence.known >= request.length - 1


class HeadDrafter(StateDrafter[HeadSequence]):
    """Drafts with a head of the target, one token a pass."""

    def __init__(
        self,
        head: Head,
        vocab_size: int,
        min_survival: float = 0.3,
        siblings: int = 0,
        width: int = 0,
    ) -> None:
        super().__init__(HeadModel(head), head, vocab_size, min_survival, siblings, width)
