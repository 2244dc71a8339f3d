"""The steps that were launched and are not settled yet, in the order of their launches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.core import Ints
from outrider.serving.table import RequestTable
from outrider.serving.values import Launched, PrefillLaunch


class InFlight(deque[Launched | PrefillLaunch]):
    """Launched steps: the oldest is settled first.

    ended: when the last decode step was settled; None if a prefill came after it
    """

    ended: float | None = None

    def note_settled(self, ended: float) -> None:
        """Note that a decode step was settled at this time."""
        self.ended = ended

    def begin_prefill(self) -> None:
        """Get ready for a prefill. Drop prefills whose first tokens ended all of their requests.

        No decode step follows that would ask for those tokens.
        """
        self.ended = None
        while self and isinstance(first := self[0], PrefillLaunch):
            if not all(req.finished() for req in first.reqs):
                break
            self.popleft()

    def only_decode(self) -> Launched | None:
        """Return the decode step in flight, if there is one and nothing else."""
        return self[0] if len(self) == 1 and isinstance(self[0], Launched) else None

    def max_cached(self, reqs: Sequence[Any], table: RequestTable) -> Ints:
        """Return how many tokens of each request may be cached after these steps, [B]."""
        more = Counter[str]()
        for launched in self:
            if isinstance(launched, Launched):  # the token after a prompt counts, known or not
                counts = launched.num_drafts().tolist()
                for request, count in zip(launched.requests, counts, strict=True):
                    more[request.req.rid] += 1 + count
        return np.array([table.max_length(req) - 1 + more[req.rid] for req in reqs], np.int64)
