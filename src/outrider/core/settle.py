"""`settle`: the one place that decides what is kept.

A verdict says which drafts the target agrees with. A request may end before the last of them: at
an end token, a stop string, or its limit. Everything else (the request's tokens, cache lengths,
logprobs, counts, the drafter's feedback) derives from the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from outrider.core.proposal import Law, Proposal
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


Keep = Callable[[Any, Sequence[int]], "tuple[int, FinishReason | None]"]
"""Says of a request and the tokens it may emit how many it does, and why it ends there, if so."""


def kept_tokens(request: Request, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
    """Return how many of the tokens plain decoding would emit, and why it would end there."""
    for count in range(1, len(tokens) + 1):
        if reason := request.finish_after(tokens[:count]):
            return count, reason
    return len(tokens), None


def settle(
    requests: Sequence[Request],
    proposal: Proposal[Law],
    verdict: Verdict,
    keep: Keep = kept_tokens,
) -> tuple[Outcome, ...]:
    """Keep of each verdict what plain decoding would have emitted before the request ended.

    keep: a host that ends requests itself brings its own
    """
    outcomes = []
    for r, (tokens, rows) in enumerate(verdict.emitted(proposal)):
        kept, reason = keep(requests[r], tokens)
        outcomes.append(
            Outcome(
                request=requests[r],
                tokens=tuple(tokens[:kept]),
                rows=tuple(rows[:kept]),
                num_drafts=proposal.num_drafts[r],
                num_accepted_drafts=min(len(tokens) - 1, kept),
                finish_reason=reason,
            )
        )
    return tuple(outcomes)
