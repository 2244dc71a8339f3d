"""Drafts of a head in steps that are launched before the last one is known.

Before a head drafts, it reads what the last step emitted, with the target's states. How many tokens
that is, only the device knows. So there is one row per possible token; unused rows are parked at
position 0, which attention never reads. Each pass after that reads the draft of the one before it
(`Unrolled`). All of it is launched at once: the number of drafts is chosen before it is known how
sure the head is of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.core import Coins, Ints, Request
from outrider.drafters.trees import fit_vocabulary
from outrider.drafters.unrolled import Unrolled
from outrider.serving.device import TextEnds, to_device


@dataclass(frozen=True, eq=False)
class Sampling:
    """How requests are sampled, on the device. For those that look back it does not draft.

    is_greedy, seed: [B]
    temperature: [B, 1]; 1 of those that are greedy
    """

    is_greedy: Tensor
    seed: Tensor
    temperature: Tensor

    @staticmethod
    def of(requests: Sequence[Request], device: Any) -> Sampling | None:
        """Return how these are sampled; None if all are greedy."""
        greedy = np.array([request.sampling.is_greedy for request in requests])
        if greedy.all():
            return None
        seeds = np.array([request.seed for request in requests])
        asked = np.array([request.sampling.temperature for request in requests])
        temperature = to_device(np.where(greedy, 1.0, asked).astype(np.float32), device)
        return Sampling(to_device(greedy, device), to_device(seeds, device), temperature[:, None])


class HeadModel(Protocol):
    """A head whose states and keys are in the engine's slots.

    few_rows: sequences with at most so many unread tokens can be drafted for on the device
    """

    few_rows: int

    def num_read(self, request: Request) -> int:
        """Return how many tokens of a request the head has read."""
        ...

    def note_read(self, request: Request) -> None:
        """Note that the head has read all of a request."""
        ...

    def raise_fault(self) -> None:
        """Raise if the target's states could not be read."""
        ...

    def read(
        self, tokens: Tensor, lines: Tensor, positions: Tensor, counts: Ints, ends: Ints
    ) -> tuple[Tensor, Tensor]:
        """Read tokens. Return the states that follow, and their slots."""
        ...

    def unroll_from(self, x: Tensor, lines: Tensor, positions: Tensor, ends: Ints) -> Unrolled:
        """Begin to read on from these states."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of states."""
        ...


class HeadSteps:
    """Lets a head draft on the device.

    name: that requests call the head by
    table: the engine's, of slots
    vocab_size: the target's
    """

    def __init__(
        self, name: str, head: HeadModel, table: Tensor, vocab_size: int, coins: Coins
    ) -> None:
        self.name, self._head = name, head
        self._vocab_size, self._coins = vocab_size, coins
        # by row of the table: how many tokens the head has read
        self._num_read = torch.zeros(len(table), dtype=torch.int64, device=table.device)
        # how many tokens of each request it may have to read before it drafts next
        self._unread: dict[int, int] = {}
        self._sampled: tuple[Sequence[Request], Sampling | None] | None = None

    def is_ready(self, requests: Sequence[Any]) -> bool:
        """Say whether all that is unread can be read before drafting.

        What a head has not read for long, the CPU lets it catch up with.
        """
        few = self._head.few_rows
        return all(self._unread_of(r) <= few for r in requests if r.max_drafts)

    def enter(self, requests: Sequence[Any], index: Tensor) -> None:
        """Tell the device how much of the texts was read. Nothing is in flight.

        index: [B] the requests' rows in the engine's table
        """
        # requests without drafts are not read: their last token stands for what is to be read
        unread = [self._unread_of(r) if r.max_drafts else 1 for r in requests]
        self._unread = {r.id: count for r, count in zip(requests, unread, strict=True)}
        read = np.array([request.length for request in requests]) - unread
        self._num_read[index] = to_device(read, self._num_read.device)

    def has_entered(self, requests: Sequence[Any]) -> bool:
        """Say whether the device knows how much of these texts was read."""
        return all(request.id in self._unread for request in requests)

    def note_read(self, requests: Sequence[Any]) -> None:
        """Note that a step is over before which the head has read all of these texts."""
        for request in requests:
            if request.max_drafts:
                self._head.note_read(request)

    def _unread_of(self, request: Request) -> int:
        read = max(1, self._head.num_read(request))  # the first token is no pair
        return max(1, request.length - read)

    @torch.inference_mode()
    def draft(self, ends: TextEnds) -> Tensor:
        """Read what is unread, and draft. Returns the drafts, [B, K]."""
        self._head.raise_fault()
        requests, lens, index = ends.requests, ends.lens, ends.index
        counts = np.array([self._unread[request.id] for request in requests])
        layout = ends.layouts.of(counts - 1)
        read, owner = self._num_read[index], layout.owner
        token, position, last = unread_rows(ends.texts, ends.lines, lens, read, owner, layout.place)
        states, _ = self._head.read(token, index[owner], position, counts, ends.longest)
        x = states[last]
        self._num_read[index] = lens.long() + 1
        for request, count in zip(requests, ends.num_drafts.tolist(), strict=True):
            self._unread[request.id] = count + 1
        depths = np.arange(1, ends.width)[:, None]
        further = lens + torch.arange(1, ends.width, device=lens.device)[:, None]
        unrolled = self._head.unroll_from(x, index, further, ends.longest + depths)
        sampled = self._sampling_of(requests)
        drafts = [self._draw(self._head.logits(x), lens, sampled)]
        for at in further:
            drafts.append(self._draw(unrolled.read(drafts[-1]), at, sampled))
        return torch.stack(drafts, 1)

    def _draw(self, logits: Tensor, at: Tensor, sampled: Sampling | None) -> Tensor:
        """Return what the target would emit if it thought the same, [B].

        at: [B] the positions that the logits are of
        """
        logits = fit_vocabulary(logits, self._vocab_size)
        best = logits.argmax(-1)
        if sampled is None:
            return best
        drawn = self._coins.draw(logits.float() / sampled.temperature, sampled.seed, at.long())
        return torch.where(sampled.is_greedy, best, drawn)

    def _sampling_of(self, requests: Sequence[Request]) -> Sampling | None:
        if self._sampled is None or self._sampled[0] is not requests:
            self._sampled = requests, Sampling.of(requests, self._num_read.device)
        return self._sampled[1]


def unread_rows(
    texts: Tensor, lines: Tensor, lens: Tensor, read: Tensor, owner: Tensor, place: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out the rows that a head reads before it drafts.

    texts, lines, lens: see `TextEnds`
    read: [B] how many tokens were read
    owner, place: [N] of the rows, those of a request beside each other
    -> tokens and positions [N], 0 for what is not in the text yet; the row of each last token [B]
    """
    position = read[owner] + place
    position = torch.where(position <= lens[owner], position, 0)
    first = torch.searchsorted(owner, torch.arange(len(lens), device=owner.device))
    return texts[lines[owner], position].long(), position, first + lens - read
