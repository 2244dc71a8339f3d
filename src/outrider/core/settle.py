"""`settle`: the one place that decides what is kept.

A verdict says which drafts the target agrees with. A request may end before the last of them: at
an end token, a stop string, or its limit. Everything else (the request's tokens, cache lengths,
logprobs, counts, the drafter's feedback) derives from the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from torch import Tensor

from outrider.core.lazy import lazy
from outrider.core.proposal import Ints, Proposal
from outrider.core.request import FinishReason, Request
from outrider.core.rules import Verdict


@dataclass(frozen=True)
class Outcome:
    """What one step did to one request.

    request: as it was before the step; `apply` extends it
    tokens: [n] the emitted tokens, n >= 1
    rows: [n] for each of them the row that judged it, among the request's rows (0 is its root).
          These are the rows whose cache entries stay: the last token has none yet.
    num_drafts: how many were proposed
    num_accepted_drafts: how many of `tokens` are drafts
    finish_reason: None if the request goes on
    hidden: [m, layers, H] the target's hidden states, m >= n, for a drafter that asks for them: the
          last n are those of `rows`, so that row -n + i led to `tokens[i]`; before them stands
          what else the target read in this step, which is the prompt. None if nobody asked, or
          if the host cannot give them.
    """

    request: Request
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    num_drafts: int
    num_accepted_drafts: int
    finish_reason: FinishReason | None
    hidden: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def num_accepted_tokens(self) -> int:
        """How many tokens the step emitted, the bonus or recovered one included."""
        return len(self.tokens)

    def apply(self) -> None:
        """Extend the request."""
        self.request.extend(self.tokens, self.finish_reason)


@dataclass(frozen=True, eq=False)
class Outcomes(Sequence[Outcome]):
    """What one step did to each request of a batch, as flat arrays; an entry is made when read.

    requests: [B] as they were before the step; `apply` extends them
    tokens, rows: [T] those of all requests, one after the other: see `Outcome`
    num_tokens, num_drafts, num_accepted_drafts: [B]
    finish_reasons: [B]
    hidden: [B], or nothing if the drafter does not ask for it
    """

    requests: Sequence[Request]
    tokens: Ints
    rows: Ints
    num_tokens: Ints
    num_drafts: Ints
    num_accepted_drafts: Ints
    finish_reasons: Sequence[FinishReason | None]
    hidden: Sequence[Tensor] = ()

    @staticmethod
    def of(outcomes: Sequence[Outcome]) -> Outcomes:
        """Return the same outcomes as flat arrays."""
        if isinstance(outcomes, Outcomes):
            return outcomes
        hidden = tuple(o.hidden for o in outcomes if o.hidden is not None)
        return Outcomes(
            requests=[o.request for o in outcomes],
            tokens=np.array([token for o in outcomes for token in o.tokens], np.int64),
            rows=np.array([row for o in outcomes for row in o.rows], np.int64),
            num_tokens=np.array([len(o.tokens) for o in outcomes], np.int64),
            num_drafts=np.array([o.num_drafts for o in outcomes], np.int64),
            num_accepted_drafts=np.array([o.num_accepted_drafts for o in outcomes], np.int64),
            finish_reasons=[o.finish_reason for o in outcomes],
            hidden=hidden if len(hidden) == len(outcomes) else (),
        )

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, r: int) -> Outcome: ...
    @overload
    def __getitem__(self, r: slice) -> Sequence[Outcome]: ...
    def __getitem__(self, r: int | slice) -> Outcome | Sequence[Outcome]:
        if isinstance(r, slice):
            return [self[i] for i in range(*r.indices(len(self)))]
        r = range(len(self))[r]
        span = slice(self.starts[r], self.starts[r + 1])
        return Outcome(
            request=self.requests[r],
            tokens=tuple(self.tokens[span].tolist()),
            rows=tuple(self.rows[span].tolist()),
            num_drafts=int(self.num_drafts[r]),
            num_accepted_drafts=int(self.num_accepted_drafts[r]),
            finish_reason=self.finish_reasons[r],
            hidden=self.hidden[r] if self.hidden else None,
        )

    @lazy
    def starts(self) -> Ints:
        """[B + 1] where each request's tokens begin, and T."""
        return np.concatenate([[0], self.num_tokens.cumsum()])

    @lazy
    def owners(self) -> Ints:
        """[T] the request of each token."""
        return np.repeat(np.arange(len(self)), self.num_tokens)

    def apply(self) -> None:
        """Extend the requests."""
        tokens, starts = self.tokens.tolist(), self.starts.tolist()
        for r, request in enumerate(self.requests):
            request.extend(tokens[starts[r] : starts[r + 1]], self.finish_reasons[r])


Keep = Callable[[Sequence[Any], Ints, Ints], "tuple[Ints, Sequence[FinishReason | None]]"]
"""Says how many of the tokens that each request may emit it does, and why it ends there, if so.

It is given the requests, their tokens one after the other, and how many each has."""


def kept_tokens(
    requests: Sequence[Request], tokens: Ints, counts: Ints
) -> tuple[Ints, Sequence[FinishReason | None]]:
    """Return how many of its tokens plain decoding would emit, and why it would end there."""
    kept, reasons, ids = [], [], tokens.tolist()
    for request, end, count in zip(
        requests, counts.cumsum().tolist(), counts.tolist(), strict=True
    ):
        mine = ids[end - count : end]
        for n in range(1, count + 1):
            if reason := request.finish_after(mine[:n]):
                break
        kept.append(n)
        reasons.append(reason)
    return np.array(kept, np.int64), reasons


def settle(
    requests: Sequence[Request],
    proposal: Proposal,
    verdict: Verdict,
    keep: Keep = kept_tokens,
) -> Outcomes:
    """Keep of each verdict what plain decoding would have emitted before the request ended.

    keep: a host that ends requests itself brings its own
    """
    tokens, rows, counts = verdict.emitted(proposal)
    kept, reasons = keep(requests, tokens, counts)
    accepted = np.minimum(counts - 1, kept)
    if (kept < counts).any():
        place = np.arange(len(tokens)) - np.repeat(counts.cumsum() - counts, counts)
        inside = place < np.repeat(kept, counts)
        tokens, rows = tokens[inside], rows[inside]
    return Outcomes(requests, tokens, rows, kept, proposal.num_drafts, accepted, reasons)
