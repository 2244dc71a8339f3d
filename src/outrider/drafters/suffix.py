"""Suffix lookup: what followed the longest suffix of the text where it occurred before.

Unlike an n-gram lookup it takes the longest match there is, looks at several earlier occurrences,
and lets them vote: how much they agree says how far the draft may be trusted. `lookup` has the
search, for all requests at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.core import Budget, Ints, Outcome, Outcomes, Proposal, Request
from outrider.drafters.lookup import ANCHOR, WIDTH, Texts
from outrider.drafters.options import check_number, check_whole
from outrider.drafters.shared import SharedTexts, tenant_of


class SuffixDrafter:
    """Drafts what followed the longest suffix before, as far as the occurrences agree.

    min_vote: drafts end where fewer of the occurrences agree, as a share
    min_match: tokens of the shortest match
    max_match: tokens of a match that are looked at; longer ones are not told apart
    width: how many occurrences are asked
    shared_tokens: of finished outputs, so many tokens are kept for requests of the same tenant
        whose own text has no match. 0 for none: a draft that is found there is verified faster,
        and so tells users of a tenant about each other.
    texts: of the requests
    """

    name = "suffix"

    def __init__(
        self,
        min_vote: float = 0.3,
        min_match: int = ANCHOR,
        max_match: int = 64,
        width: int = WIDTH,
        shared_tokens: int = 0,
    ) -> None:
        self._min_vote = check_number("min_vote", min_vote, 0, 1)
        self._width = check_whole("width", width, 1, WIDTH)
        min_match = check_whole("min_match", min_match, 1)
        max_match = check_whole("max_match", max_match, 1)
        if min_match > max_match:
            raise ValueError(f"need min_match <= max_match, not {min_match} and {max_match}")
        shared_tokens = check_whole("shared_tokens", shared_tokens, 0)
        self.texts = Texts(min_match, max_match)
        self._rows: dict[int, int] = {}
        self._shared = SharedTexts(shared_tokens, Texts(min_match, max_match))
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile the loops now rather than in a step."""
        row = self.texts.open()
        self.texts.extend(row, [1, 1])
        self.texts.propose(np.array([row]), np.array([1]), self._width, self._min_vote, True)
        self.texts.close(row)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all texts."""
        return self.texts.nbytes + self._shared.nbytes

    def start(self, requests: Sequence[Request]) -> None:
        """Index the prompts."""
        for request in requests:
            row = self._rows[request.id] = self.texts.open(request.id)
            self.texts.extend(row, [*request.prompt, *request.output])

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Propose what most occurrences say; in a tree, also what the first to disagree say."""
        rows = self._rows_of(requests)
        options = self._width, self._min_vote, budget.trees
        counts, found = self.texts.propose(rows, budget.max_drafts, *options)
        parts = found.tokens, counts, found.parents, found.sure
        own = Proposal.found(*parts, trees=budget.trees)
        if not self._shared:
            return own
        lost = (counts == 0) & (budget.max_drafts > 0)
        if not lost.any():
            return own
        drafts = own.drafts()
        for r in np.flatnonzero(lost).tolist():
            tenant, most = tenant_of(requests[r]), int(budget.max_drafts[r])
            drafts[r] = self._shared.draft(tenant, (self.texts, int(rows[r])), most, *options)
        return Proposal.of(drafts)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Index the emitted tokens."""
        done = Outcomes.of(outcomes)
        self.texts.extend_all(self._rows_of(done.requests), done.tokens, done.num_tokens)

    def stop(self, requests: Sequence[Request]) -> None:
        """Forget the requests, but for outputs that are to be shared."""
        for request in requests:
            row = self._rows.pop(request.id, None)
            if row is not None:
                if self._shared:
                    output = self.texts.tokens_from(row, len(request.prompt))
                    self._shared.add(tenant_of(request), output)
                self.texts.close(row)

    def _rows_of(self, requests: Sequence[Request]) -> Ints:
        rows = self._rows
        return np.array([rows[request.id] for request in requests], np.int64)
