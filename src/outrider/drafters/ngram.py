"""Prompt lookup: if the last few tokens occurred before, what followed them may follow again."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core import Budget, Law, Outcome, Proposal, Request, chain


class _Index:
    """Where each n-gram of one sequence last ended, kept up to date token by token."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._tokens: list[int] = []
        # for each n-gram the position after it, of its last occurrence and of the one before
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for n in self._sizes:
                if n <= end:
                    gram = tuple(self._tokens[end - n :])
                    self._ends[gram] = (end, self._ends.get(gram, (0, 0))[0])

    def continuation(self, count: int) -> list[int]:
        """Return what followed the longest n-gram at the end when it occurred before."""
        end = len(self._tokens)
        for n in reversed(self._sizes):
            if n <= end:
                start = self._ends[tuple(self._tokens[end - n :])][1]
                if start:
                    # a copy that reaches the end goes on with itself, as a repetition would
                    period = end - start
                    return [self._tokens[start + i % period] for i in range(count)]
        return []


class NgramDrafter:
    """Drafts by looking the last tokens up in the prompt and the output. Costs microseconds.

    min_n, max_n: the shortest and longest n-gram to look up, in tokens
    """

    name = "ngram"

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError("need 1 <= min_n <= max_n")
        self._sizes = range(min_n, max_n + 1)
        self._indices: dict[int, _Index] = {}

    def start(self, requests: Sequence[Request]) -> None:
        """Index the prompts."""
        for request in requests:
            index = self._indices[request.id] = _Index(self._sizes)
            index.extend(request.prompt)
            index.extend(request.output)

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal[Law]:
        """Propose what followed the last tokens before."""
        return Proposal.of(
            [
                chain(self._indices[request.id].continuation(count))
                for request, count in zip(requests, budget.max_drafts, strict=True)
            ]
        )

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Index the emitted tokens."""
        for outcome in outcomes:
            self._indices[outcome.request.id].extend(outcome.tokens)

    def stop(self, requests: Sequence[Request]) -> None:
        """Forget the requests."""
        for request in requests:
            self._indices.pop(request.id, None)
