"""Do two engines sample from one distribution? Chi-square on the first tokens of many answers.

An answer is looked at in several ways: its first token, its first two, and so on, and each later
token alone. For each prompt and each way, a two-sample chi-square test asks whether both engines'
answers can come from one distribution. For each way, the statistics of all prompts are added up to
one more test: a bias that is everywhere, and too small to be seen in one place, shows there. All
p-values are multiplied by the number of tests (Bonferroni).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from outrider.clients import Answer

__all__ = [
    "LENGTH",
    "Cell",
    "DistributionResult",
    "DistributionTest",
    "compare_distributions",
    "detectable",
]

LENGTH = 4
"""Tokens of a sampled answer: those after the first come from verified drafts."""

SIGNIFICANT = 0.001
"""A corrected p-value below this is called a difference: one false alarm in 1,000 audits."""

POWER = 0.9
"""The chance with which a distance that counts as detectable is found."""

LEAST_EXPECTED = 5.0
"""Outcomes that are expected less often are counted together: chi-square wants some of each."""

Outcome = tuple[str, ...]
TOKEN_WAYS: dict[str, slice] = {
    "first token": slice(0, 1),
    **{f"first {n} tokens": slice(0, n) for n in range(2, LENGTH + 1)},
    **{f"token {n}": slice(n - 1, n) for n in range(2, LENGTH + 1)},
}
WORD_WAYS = {"first word": 1, "first 2 words": 2}


@dataclass(frozen=True)
class Cell:
    """How often an outcome came. outcome: None for all the rare ones together."""

    outcome: Outcome | None
    plain: int
    speculative: int


@dataclass(frozen=True)
class DistributionTest:
    """One test.

    prompt: its number; None for all prompts together
    way: how answers were looked at
    corrected: the p-value times the number of tests
    detectable: total-variation distance that this test finds with a chance of 0.9
    cells: what was compared, most common first
    """

    prompt: int | None
    way: str
    statistic: float
    freedom: int
    p_value: float
    corrected: float
    detectable: float
    cells: tuple[Cell, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the distributions differ."""
        return self.corrected < SIGNIFICANT


@dataclass(frozen=True)
class DistributionResult:
    """All tests. counts: for each prompt, how many answers each engine gave."""

    tests: tuple[DistributionTest, ...]
    counts: tuple[tuple[int, int], ...]

    @property
    def differs(self) -> bool:
        """Whether any test says so."""
        return any(test.differs for test in self.tests)

    @property
    def worst(self) -> DistributionTest | None:
        """The test with the smallest p-value."""
        return min(self.tests, key=lambda test: test.p_value, default=None)

    @property
    def detectable(self) -> tuple[float, float]:
        """The distances, on average over the prompts, that the best and worst way would find."""
        together = [test.detectable for test in self.tests if test.prompt is None]
        found = together or [test.detectable for test in self.tests] or [1.0]
        return min(found), max(found)


def compare_distributions(
    plain: Mapping[int, Sequence[Answer]], speculative: Mapping[int, Sequence[Answer]]
) -> DistributionResult:
    """Test whether two engines sample alike.

    plain, speculative: the answers to each prompt, by its number
    """
    numbers = sorted(n for n in plain if plain[n] and speculative.get(n))
    tables = [
        (n, way, cells)
        for way in _ways([answer for n in numbers for answer in (*plain[n], *speculative[n])])
        for n in numbers
        if len(cells := _table(plain[n], speculative[n], way)) > 1
    ]
    sizes = {n: (len(plain[n]), len(speculative[n])) for n in numbers}
    ways = list(dict.fromkeys(way for _, way, _ in tables))
    count = len(tables) + (len(ways) if len(numbers) > 1 else 0)
    tests = [
        _test(n, way, *_chi_square(cells), (sizes[n],), count, cells) for n, way, cells in tables
    ]
    if len(numbers) > 1:
        for way in ways:
            own = [test for test in tests if test.way == way and test.prompt is not None]
            total = sum(test.statistic for test in own), sum(test.freedom for test in own)
            there = tuple(sizes[test.prompt] for test in own if test.prompt is not None)
            tests.append(_test(None, way, *total, there, count))
    return DistributionResult(tuple(tests), tuple(sizes[n] for n in numbers))


def _ways(answers: Sequence[Answer]) -> Iterable[str]:
    """Return how these answers can be looked at: by words, if an engine tells no tokens."""
    told = all(answer.tokens for answer in answers if answer.count)
    return TOKEN_WAYS if told else WORD_WAYS


def _table(plain: Sequence[Answer], speculative: Sequence[Answer], way: str) -> tuple[Cell, ...]:
    """Count outcomes, the rare ones together."""
    a, b = (Counter(_outcome(answer, way) for answer in side) for side in (plain, speculative))
    share = min(len(plain), len(speculative)) / (len(plain) + len(speculative))
    by_count = sorted(a | b, key=lambda outcome: (-a[outcome] - b[outcome], outcome))
    common = [o for o in by_count if (a[o] + b[o]) * share >= LEAST_EXPECTED]
    rest = [o for o in by_count if o not in set(common)]
    # the rare ones together may still be too few: then the least common one joins them
    while rest and common and sum(a[o] + b[o] for o in rest) * share < LEAST_EXPECTED:
        rest.append(common.pop())
    cells = [Cell(o, a[o], b[o]) for o in common]
    if rest:
        cells.append(Cell(None, sum(a[o] for o in rest), sum(b[o] for o in rest)))
    return tuple(cells)


def _outcome(answer: Answer, way: str) -> Outcome:
    if way in TOKEN_WAYS:
        return tuple(token.text for token in answer.tokens[TOKEN_WAYS[way]])
    return tuple(f"{word} " for word in answer.text.split()[: WORD_WAYS[way]])


def _chi_square(cells: Sequence[Cell]) -> tuple[float, int]:
    """Return Pearson's statistic of a table with two rows, and its degrees of freedom."""
    n, m = sum(cell.plain for cell in cells), sum(cell.speculative for cell in cells)
    statistic = 0.0
    for cell in cells:
        both = cell.plain + cell.speculative
        for seen, size in ((cell.plain, n), (cell.speculative, m)):
            expected = both * size / (n + m)
            statistic += (seen - expected) ** 2 / expected
    return statistic, len(cells) - 1


def _test(
    prompt: int | None,
    way: str,
    statistic: float,
    freedom: int,
    sizes: Sequence[tuple[int, int]],
    tests: int,
    cells: tuple[Cell, ...] = (),
) -> DistributionTest:
    p = float(_scipy().chi2.sf(statistic, freedom))
    least = detectable(freedom, sizes, SIGNIFICANT / tests)
    return DistributionTest(prompt, way, statistic, freedom, p, min(1.0, p * tests), least, cells)


def detectable(freedom: int, sizes: Sequence[tuple[int, int]], alpha: float) -> float:
    """Return the total-variation distance that is found with a chance of `POWER`.

    sizes: answers of both engines, for each prompt
    alpha: the p-value below which it counts as found

    With n and m answers and a distance d, the statistic follows a non-central chi-square
    distribution whose non-centrality is at least 4 d^2 n m / (n + m), whichever outcomes differ:
    the least is reached by moving mass from one half of the outcomes to the other in proportion. A
    distance in few outcomes is found sooner.
    """
    weight = sum(4 * n * m / (n + m) for n, m in sizes)
    return float(min(1.0, (_noncentrality(freedom, alpha) / weight) ** 0.5))


@lru_cache(maxsize=1024)
def _noncentrality(freedom: int, alpha: float) -> float:
    """Return the non-centrality with which a statistic is found."""
    from scipy.optimize import brentq

    stats = _scipy()
    critical = stats.chi2.isf(alpha, freedom)
    found = brentq(lambda nc: stats.ncx2.sf(critical, freedom, nc) - POWER, 1e-6, 10 * critical)
    return float(found)


def _scipy() -> Any:
    from scipy import stats

    return stats
