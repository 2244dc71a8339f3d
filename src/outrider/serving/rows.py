"""How the rows of a pass are shared out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from outrider.core import Budget, Coins, Ints
from outrider.serving.logits import max_rows
from outrider.serving.values import Members


def share_rows(wanted: Ints, max_rows: int) -> tuple[Ints, int]:
    """Return how many drafts each request may have, and how many requests have fewer than wanted.

    Each request has one row for its last token. If all drafts do not fit, all requests get the same
    share of the rows.

    wanted: the most drafts of each request
    """
    count = len(wanted)
    if count + int(wanted.sum()) <= max_rows:
        return wanted, 0
    room = max(0, max_rows // count - 1)
    return np.minimum(wanted, room), int((wanted > room).sum())


def drafts_in(room: Ints, cached: Ints) -> Ints:
    """Return for how many drafts requests have slots, beside their next tokens in two steps.

    room: for how many tokens each has slots
    cached: how many of its tokens may be cached before the step
    """
    drafts: Ints = np.maximum(room - cached - 2, 0)
    return drafts


@dataclass(frozen=True)
class RowBudget:
    """Shares the rows of a pass out.

    limit: the most rows that the engine has room for
    vocab_size, logit_bytes: of the target's logits
    coins: to draw drafts with
    trees: whether drafts may branch
    """

    limit: int
    vocab_size: int
    logit_bytes: int
    coins: Coins
    trees: bool

    def max_rows(self, num_penalties: int = 0) -> int:
        """Return how many rows a pass may have, if its batch has so many kinds of penalties."""
        return min(self.limit, max_rows(self.vocab_size, self.logit_bytes, num_penalties))

    def share(
        self, members: Members, max_rows: int, room: Ints | None = None
    ) -> tuple[Budget, Counter[str]]:
        """Return how many drafts each request may have, and how many have fewer than wanted: why.

        The last token needs no draft beside it: a request that may emit n more has n - 1 drafts.

        max_rows: of the pass
        room: [B] for how many tokens each request of the batch has slots; None if for any step
        """
        columns = members.columns
        emitted = np.array([len(request.output) for request in members.requests], np.int64)
        left = columns.max_tokens[members.places] - emitted - 1
        wanted = np.maximum(np.minimum(columns.max_drafts[members.places], left), 0)
        fitting = wanted
        if room is not None:
            fitting = np.minimum(wanted, drafts_in(room[members.places], members.lens))
        drafts, cut = share_rows(fitting, max_rows)
        cuts = +Counter(rows=cut, slots=int((fitting < wanted).sum()))
        return Budget(drafts, "match", self.coins, trees=self.trees), cuts
