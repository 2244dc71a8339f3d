"""Run engines in turn on the same prompts, and reckon how fast each was."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.audit import Comparison, compare, depart, tolerance
from outrider.audit.prompts import read_prompts
from outrider.bench.workloads import KINDS, prompts
from outrider.clients import Answer, Counts, Engine, Query
from outrider.errors import UsageError

__all__ = ["Cell", "Parity", "Plan", "Run", "measure", "speed_of", "timed", "workload"]


TIE = "numerical tie"


@dataclass(frozen=True)
class Cell:
    """What is measured at once: texts, and how many requests are open, or come in a second."""

    workload: str
    concurrency: int
    rate: float | None = None

    def __str__(self) -> str:
        load = f"{self.rate:g} requests/s" if self.rate else f"B = {self.concurrency}"
        return f"{self.workload}, {load}"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    texts: the prompts of each workload
    requests: how many prompts a cell has for each one that is open at a time
    """

    texts: dict[str, Sequence[str]]
    concurrency: Sequence[int] = (1, 4)
    rates: Sequence[float] = ()
    max_tokens: int = 128
    rounds: int = 3
    requests: int = 3
    chat: bool = True

    @property
    def cells(self) -> list[Cell]:
        """Every cell, in the order in which they are measured."""
        most = max(self.concurrency, default=1)
        loads = [(n, None) for n in self.concurrency] + [(8 * most, rate) for rate in self.rates]
        return [Cell(name, *load) for load in loads for name in self.texts]

    def queries(self, cell: Cell) -> list[Query]:
        """Return what is asked in a cell. The same texts come again where there are too few."""
        texts = self.texts[cell.workload]
        count = cell.concurrency * (1 if cell.rate else self.requests)
        chosen = [texts[i % len(texts)] for i in range(count)]
        return [Query(text, chat=self.chat, max_tokens=self.max_tokens) for text in chosen]


@dataclass(frozen=True)
class Run:
    """What one engine did in one round of a cell.

    speed: tokens a second of all requests; where these come at a rate, of one request
    first_token, per_token: seconds, of each request
    counts: what speculation did, if the engine tells
    """

    engine: int
    cell: Cell
    round: int
    speed: float
    tokens: int
    first_token: tuple[float, ...]
    per_token: tuple[float, ...]
    counts: Counts | None


@dataclass(frozen=True)
class Parity:
    """How the answers of an engine compare with plain's in a cell.

    same: how many of those asked are equal
    verdicts: what an audit says of each of the others
    """

    asked: int
    same: int
    verdicts: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing differs beyond what rounding explains."""
        return all(verdict == TIE for verdict in self.verdicts)

    @property
    def said(self) -> str:
        """The same in words."""
        counted = Counter(self.verdicts).items()
        kinds = "".join(
            f", {n} {verdict}{'s' * (verdict == TIE and n > 1)}" for verdict, n in counted
        )
        return f"{self.same}/{self.asked} equal{kinds}"


def workload(name: str, count: int) -> list[str]:
    """Return texts of a kind that comes with Outrider, or those of a file."""
    if name in KINDS:
        return prompts(name, min(count, 36))
    if Path(name).suffix:
        return read_prompts(Path(name))
    raise UsageError(
        f"workload {name!r}", fix=f"choose from {', '.join(KINDS)}, or name a .jsonl or .txt file"
    )


def measure(
    engines: Sequence[Engine], plan: Plan, begun: Callable[[Cell, int, int], None]
) -> Iterator[Run | tuple[Cell, int, Parity]]:
    """Yield each run as it ends, and before a cell's first how the answers compare with plain's.

    The first engine is plain. Engines take turns within a round, and nobody is always the first.
    begun: called with the cell, the engine and the round before each run, -1 for the warm-up
    """
    for number, cell in enumerate(plan.cells):
        queries, plain = plan.queries(cell), list[Answer]()
        for e, engine in enumerate(engines):
            begun(cell, e, -1)
            answers = engine.ask(queries, cell.concurrency)
            if e == 0:
                plain = answers
            else:
                yield (
                    cell,
                    e,
                    _parity(engines[0], engine, queries, cell.concurrency, (plain, answers)),
                )
        for round_ in range(plan.rounds):
            turn = (number + round_) % len(engines)
            for e in [*range(turn, len(engines)), *range(turn)]:
                begun(cell, e, round_)
                yield _run(engines[e], e, cell, round_, queries)


def _run(engine: Engine, number: int, cell: Cell, round_: int, queries: Sequence[Query]) -> Run:
    before = engine.counts()
    answers = engine.ask(queries, cell.concurrency, stream=True, rate=cell.rate)
    after = engine.counts()
    per_token = tuple(
        (one.seconds - one.first_token) / (one.count - 1) for one in answers if one.count > 1
    )
    if cell.rate:
        speed = 1 / statistics.mean(per_token) if per_token and all(per_token) else 0.0
    else:
        speed = speed_of(answers)
    return Run(
        number,
        cell,
        round_,
        speed,
        sum(one.count for one in answers),
        tuple(one.first_token for one in answers),
        per_token,
        None if before is None or after is None else after - before,
    )


def _parity(
    plain: Engine,
    other: Engine,
    queries: Sequence[Query],
    concurrency: int,
    answers: tuple[Sequence[Answer], Sequence[Answer]],
) -> Parity:
    """Compare texts; if some differ, ask for logprobs too, which tell a tie from a mistake.

    A difference that does not come again is judged where the text left plain's second answer.
    """
    pairs = list(zip(*answers, strict=True))
    differ = [n for n, (a, b) in enumerate(pairs) if a.text != b.text]
    if not differ:
        return Parity(len(pairs), len(pairs))
    again = [replace(query, logprobs=5) for query in queries]
    second = list(zip(plain.ask(again, concurrency), other.ask(again, concurrency), strict=True))
    found = [compare(a, b) for a, b in second]
    allowed = tolerance(found).value
    verdicts = {n: _verdict(one, allowed) for n, one in enumerate(found) if not one.identical}
    for n in differ:
        ours, theirs = (_left(second[n][0], one.text, allowed) for one in pairs[n])
        verdicts.setdefault(n, theirs if ours == TIE else "unsteady")
    return Parity(len(pairs), len(pairs) - len(verdicts), tuple(verdicts.values()))


def _left(told: Answer, text: str, allowed: float) -> str:
    return TIE if text == told.text else depart(told, text).verdict(allowed)


def _verdict(one: Comparison, allowed: float) -> str:
    return one.divergence.verdict(allowed) if one.divergence else "wrong"


def timed(answers: Sequence[Answer]) -> tuple[float, float]:
    """Return the tokens after the first one of all answers, and the seconds that they took.

    Engines whose answers agree have done the same work then, and a ratio of speeds is one of times.
    Empty answers say nothing; without a second token there is nothing to time: (0, 0).
    """
    answers = [a for a in answers if a.arrivals[-1][1] > 0]
    start = min((a.arrivals[0][0] + a.first_token for a in answers), default=0.0)
    end = max((a.arrivals[-1][0] for a in answers), default=0.0)
    tokens = sum(a.arrivals[-1][1] for a in answers)
    early = sum(n for a in answers for t, n in a.arrivals[1:2] if t <= start)
    return (tokens - early, end - start) if end > start else (0.0, 0.0)


def speed_of(answers: Sequence[Answer]) -> float:
    """Return tokens a second, from the first token of all answers to the last; 0 of none."""
    tokens, seconds = timed(answers)
    return tokens / seconds if seconds else 0.0


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the extremes."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


def percentiles(values: Sequence[float]) -> dict[str, Any]:
    """Return the median and the 99th percentile; None without values."""
    if not values:
        return {"p50": None, "p99": None}
    ordered = sorted(values)
    last = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 4), "p99": round(last, 4)}
