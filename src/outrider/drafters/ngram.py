"""Prompt lookup: if the last few tokens occurred before, what followed them may follow again."""

from __future__ import annotations

from outrider.drafters.options import check_whole
from outrider.drafters.suffix import SuffixDrafter


class NgramDrafter(SuffixDrafter):
    """Drafts by looking the last tokens up in the prompt and the output. Costs microseconds.

    A suffix lookup of short matches that asks one occurrence: the latest of the longest.

    min_n, max_n: the shortest and longest n-gram to look up, in tokens
    """

    name = "ngram"

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        min_n, max_n = check_whole("min_n", min_n, 1), check_whole("max_n", max_n, 1)
        if min_n > max_n:
            raise ValueError(f"need min_n <= max_n, not {min_n} and {max_n}")
        super().__init__(min_match=min_n, max_match=max_n, width=1)
