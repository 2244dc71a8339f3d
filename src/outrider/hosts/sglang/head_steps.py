"""Drafts of a head in steps that are launched before the last one is known.

Before a head drafts, it reads what the last step emitted, with the target's states. How many tokens
that is, only the device knows. So there is a row for each that there may be; one that was not
emitted is read at position 0, where no row looks. Each pass after that reads the draft of the one
before it (`UnrolledHead`). All of it is launched at once: how many drafts there are is said before
anybody knows how sure the head is of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core import Coins, Ints
from outrider.drafters.trees import fit_vocabulary
from outrider.hosts.sglang.requests import LiveRequest
from outrider.hosts.sglang.rows import to_device
from outrider.hosts.sglang.slot_heads import FEW_ROWS, SglangHead


@dataclass(frozen=True, eq=False)
class Sampling:
    """How requests are sampled, on the device. Those that look back are not drafted for there.

    is_greedy, seed: [B]
    temperature: [B, 1]; 1 of those that are greedy
    """

    is_greedy: Tensor
    seed: Tensor
    temperature: Tensor

    @staticmethod
    def of(requests: Sequence[LiveRequest], device: Any) -> Sampling | None:
        """Return how these are sampled; None if all are greedy."""
        greedy = np.array([request.sampling.is_greedy for request in requests])
        if greedy.all():
            return None
        seeds = np.array([request.seed for request in requests])
        asked = np.array([request.sampling.temperature for request in requests])
        temperature = to_device(np.where(greedy, 1.0, asked).astype(np.float32), device)
        return Sampling(to_device(greedy, device), to_device(seeds, device), temperature[:, None])


class HeadSteps:
    """Lets a head draft on the device.

    name: that requests call the head by
    table: the host's, of slots
    vocab_size: the target's
    """

    def __init__(
        self, name: str, head: SglangHead, table: Tensor, vocab_size: int, coins: Coins
    ) -> None:
        self.name, self._head = name, head
        self._vocab_size, self._coins = vocab_size, coins
        # by req_pool_index: how many tokens the head has read
        self._num_read = torch.zeros(len(table), dtype=torch.int64, device=table.device)
        self._sampled: tuple[Sequence[LiveRequest], Sampling | None] | None = None

    def is_ready(self, requests: Sequence[LiveRequest]) -> bool:
        """Say whether the head has read enough of all texts to draft in the next step."""
        return all(self._unread(r) <= FEW_ROWS for r in requests if r.max_drafts)

    def enter(self, requests: Sequence[LiveRequest], index: Tensor) -> None:
        """Tell the device how much of the texts was read. Nothing is in flight.

        index: [B] of the requests in the host's table
        """
        for request in requests:
            # who has no drafts is not read either: its last token stands for what is to be read
            request.unread = self._unread(request) if request.max_drafts else 1
        read = np.array([request.length - request.unread for request in requests])
        self._num_read[index] = to_device(read, self._num_read.device)

    def has_read(self, requests: Sequence[LiveRequest]) -> None:
        """Note that a step is over before which the head has read all of these texts."""
        for request in requests:
            if request.max_drafts:
                self._head.open(request).length = request.length

    def _unread(self, request: LiveRequest) -> int:
        read = max(1, self._head.open(request).length)  # the first token is no pair
        return max(1, request.length - read)

    @torch.inference_mode()
    def draft(
        self,
        requests: Sequence[LiveRequest],
        widths: Ints,
        texts: Tensor,
        lines: Tensor,
        lens: Tensor,
        index: Tensor,
        longest: Ints,
        rows_of: Callable[[Ints], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Read what is unread, and draft. Returns the drafts, [B, most].

        widths: [B] how many each request gets; the largest is how many are made
        texts: [lines, L]
        lines, lens: [B] where each request's text is, and how much of it is cached
        index: [B] in the host's table
        longest: [B] the largest that `lens` may be, on the host
        rows_of: returns whose each row is, and its place, if each request has so many
        """
        self._head.raise_fault()
        counts = np.array([request.unread for request in requests])
        owner, place = rows_of(counts)
        given = texts, lines, lens, self._num_read[index], owner, place
        token, position, last = unread_rows(*given)
        states, _ = self._head.read(token, index[owner], position, counts, longest)
        x = states[last]
        self._num_read[index] = lens.long() + 1
        for request, width in zip(requests, widths.tolist(), strict=True):
            request.unread = width + 1
        most = int(widths.max())
        depths = np.arange(1, most)[:, None]
        further = lens + torch.arange(1, most, device=lens.device)[:, None]
        unrolled = self._head.unroll_from(x, index, further, longest + depths)
        sampled = self._sampled_of(requests)
        drafts = [self._draw(self._head.head.logits(x), lens, sampled)]
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

    def _sampled_of(self, requests: Sequence[LiveRequest]) -> Sampling | None:
        if self._sampled is None or self._sampled[0] is not requests:
            self._sampled = requests, Sampling.of(requests, self._num_read.device)
        return self._sampled[1]


def unread_rows(
    texts: Tensor, lines: Tensor, lens: Tensor, read: Tensor, owner: Tensor, place: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out the rows that a head reads before it drafts.

    texts, lines, lens: see `draft`
    read: [B] how many tokens were read
    owner, place: [N] of the rows, those of a request beside each other
    -> tokens and positions [N], 0 for what is not in the text yet; the row of each last token [B]
    """
    position = read[owner] + place
    position = torch.where(position <= lens[owner], position, 0)
    first = torch.searchsorted(owner, torch.arange(len(lens), device=owner.device))
    return texts[lines[owner], position].long(), position, first + lens - read
