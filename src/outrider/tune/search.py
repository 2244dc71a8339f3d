"""Successive halving: all candidates a little, the better half a little more, until two are left.

A rung has rounds, each with prompts of its own. In a round plain decoding and every candidate that
is left answer the same prompts, one after the other: only those who shared a round are compared on
it, for texts differ, and the machine may be slower in the next. Plain decoding never drops out: it
is the measure, and may be the answer. It comes first and last in a round: how far its two speeds
differ is the noise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.measure import timed
from outrider.clients import Answer, Counts, Engine, Query
from outrider.errors import Unsupported

__all__ = ["CLOSE", "PLAIN", "Candidate", "Search", "Traffic", "Trial", "available", "grid"]

DRAFTERS = ("model", "suffix", "adaptive")  # n-grams are what suffixes are without branches
KS = (2, 4, 8, 12)
PROBE, FEWEST, MOST = 16, 48, 256
"""Tokens that an answer has: of the first look, and at least and at most of a trial. With fewer,
who drafts has not found its pace yet; time that is left is better spent on other prompts."""
CLOSE = 0.03
"""Candidates so close to each other are equal, as far as this machine can tell."""


@dataclass(frozen=True)
class Candidate:
    """A setting: who drafts, and at most how many drafts a request has in a step."""

    drafter: str
    max_drafts: int

    def __str__(self) -> str:
        return "plain" if not self.max_drafts else f"{self.drafter}, K = {self.max_drafts}"

    @property
    def options(self) -> dict[str, Any]:
        """The same as options of a request."""
        return {"drafter": self.drafter, "max_drafts": self.max_drafts}


PLAIN = Candidate("none", 0)


@dataclass(frozen=True)
class Traffic:
    """What to tune for: prompts, and how many are open at once."""

    texts: Sequence[str]
    concurrency: int
    chat: bool = True

    def queries(self, number: int, max_tokens: int) -> list[Query]:
        """Return what is asked in a round: other prompts than in the one before."""
        count = self.concurrency
        chosen = [self.texts[(number * count + i) % len(self.texts)] for i in range(count)]
        return [Query(text, chat=self.chat, max_tokens=max_tokens) for text in chosen]


@dataclass(frozen=True)
class Trial:
    """How a candidate did in a round.

    speed: tokens a second, 0 if answers were too short to time; tokens: those that were timed
    times_plain: the speed over plain's on the same prompts, 0 if there is none
    tokens_per_step: 0 if the engine does not tell
    same: how many of the answers asked for were plain's
    """

    candidate: Candidate
    rung: int
    round: int
    speed: float
    times_plain: float
    tokens_per_step: float
    same: int
    asked: int
    tokens: float


def available(engine: Engine) -> tuple[list[str], dict[str, str]]:
    """Return the drafters that an engine has, and of the others why not."""
    found, refused = [], {}
    for name in DRAFTERS:
        try:
            engine.variant({"drafter": name, "max_drafts": 1}).ask([Query("a", False, 1)])
            found.append(name)
        except Unsupported as error:
            refused[name] = error.what
    return found, refused


def grid(drafters: Sequence[str], most: int | None = None) -> list[Candidate]:
    """Return every candidate there is but plain decoding. most: drafts that a server allows"""
    ks = sorted({k if most is None else min(k, most) for k in KS})
    return [Candidate(name, k) for name in drafters for k in ks]


@dataclass
class Search:
    """Looks for the best candidate within a budget of seconds.

    next_round: the number of the round to come; it decides on the prompts
    tokens: how long answers are; None: decided by the budget and the speed of plain decoding
    trials: what was measured so far, plain decoding too
    rungs: who was left at the start of each rung
    """

    engine: Engine
    traffic: Traffic
    candidates: list[Candidate]
    seconds: float
    next_round: int = 0
    tokens: int | None = None
    clock: Callable[[], float] = time.perf_counter
    trials: list[Trial] = field(default_factory=list)
    rungs: list[list[Candidate]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._alive = list(self.candidates)

    @property
    def num_rungs(self) -> int:
        """How many rungs are to come: as many as it takes to halve until two are left, and one."""
        return 1 + max(0, math.ceil(math.log2(max(1, len(self._alive)) / 2)))

    def run(self, begun: Callable[[int, Candidate, float], None]) -> Iterator[Trial]:
        """Yield each trial. begun: called before each, with the share of the budget spent."""
        started = self.clock()

        def tell(rung: int, who: Candidate) -> None:
            begun(rung, who, (self.clock() - started) / self.seconds)

        while True:
            self.rungs.append(list(self._alive))
            tell(len(self.rungs) - 1, PLAIN)
            if self.tokens is None:
                turns = self.num_rungs * (len(self._alive) + 2)
                self.tokens = self._length(self.seconds / turns)
            end = self.clock() + (started + self.seconds - self.clock()) / self.num_rungs
            took = 0.0
            # another round if half of it fits
            while not took or self.clock() + took / 2 < end:
                before = self.clock()
                yield from self.measure_round(tell)
                took = self.clock() - before
            if len(self._alive) <= 2 or self.clock() - started > self.seconds:
                return
            keep = max(2, math.ceil(len(self._alive) / 2))
            self._alive = sorted(self._alive, key=self.gain, reverse=True)[:keep]

    def measure_round(self, begun: Callable[[int, Candidate], None]) -> Iterator[Trial]:
        """Measure plain, all that are left, and plain again, on the next prompts."""
        number, rung = self.next_round, len(self.rungs) - 1
        self.next_round += 1
        queries = self.traffic.queries(number, self.tokens or FEWEST)
        # both models read the prompts first: what follows finds them in the prefix cache
        who = next((c for c in self._alive if c.drafter in ("model", "adaptive")), PLAIN)
        first = [Query(query.prompt, query.chat, 1) for query in queries]
        self._variant(who).ask(first, self.traffic.concurrency)
        plain, expected = 0.0, list[Answer]()
        turn = number % max(1, len(self._alive))
        for candidate in [PLAIN, *self._alive[turn:], *self._alive[:turn], PLAIN]:
            begun(rung, candidate)
            answers, counts = self._measure(candidate, queries)
            tokens, seconds = timed(answers)
            speed = tokens / seconds if seconds else 0.0
            if not expected:
                plain, expected = speed, answers
            trial = Trial(
                candidate,
                rung,
                number,
                speed,
                speed / plain if plain else 0.0,
                counts.tokens_per_step if counts else 0.0,
                sum(a.text == b.text for a, b in zip(answers, expected, strict=True)),
                len(queries),
                tokens,
            )
            self.trials.append(trial)
            yield trial

    def _length(self, seconds: float) -> int:
        """Return how long answers shall be, so that plain decoding takes about so many seconds."""
        before = self.clock()
        self._variant(PLAIN).ask(self.traffic.queries(0, PROBE), self.traffic.concurrency)
        took = max(1e-6, self.clock() - before)
        return int(min(MOST, max(FEWEST, seconds * PROBE / took)))

    def _measure(
        self, candidate: Candidate, queries: Sequence[Query]
    ) -> tuple[list[Answer], Counts | None]:
        engine = self._variant(candidate)
        before = engine.counts()
        answers = engine.ask(queries, self.traffic.concurrency, stream=True)
        after = engine.counts()
        counts = after - before if before is not None and after is not None else None
        return answers, counts

    def _variant(self, candidate: Candidate) -> Engine:
        return self.engine.variant(candidate.options, salt="tune")

    def score(
        self,
        candidate: Candidate,
        other: Candidate = PLAIN,
        rounds: Collection[int] | None = None,
    ) -> float:
        """Return how many times another's speed a candidate has, on the rounds that both had.

        It is the ratio of the times that both took for plain's tokens: a round counts by its
        tokens, and one whose answers were too short to time does not. rounds: only these
        """
        mine, theirs, weights = self._pace(candidate), self._pace(other), self._weights
        shared = [n for n in mine if n in theirs and (rounds is None or n in rounds)]
        taken = sum(weights[n] * mine[n] for n in shared)
        return sum(weights[n] * theirs[n] for n in shared) / taken if taken else 0.0

    def _pace(self, candidate: Candidate) -> dict[int, float]:
        """Return seconds a token by round, the mean where there are two trials."""
        found: dict[int, list[float]] = {}
        for trial in self.trials:
            if trial.candidate == candidate and trial.speed > 0:
                found.setdefault(trial.round, []).append(1 / trial.speed)
        return {number: sum(paces) / len(paces) for number, paces in found.items()}

    @property
    def _weights(self) -> dict[int, float]:
        """The tokens of plain decoding, by round."""
        return {t.round: t.tokens for t in self.trials if t.candidate == PLAIN}

    @property
    def noise(self) -> float:
        """How far plain decoding's two speeds in a round differ, as a share: root mean square."""
        by_round: dict[int, list[float]] = {}
        for trial in self.trials:
            if trial.candidate == PLAIN and trial.speed > 0:
                by_round.setdefault(trial.round, []).append(math.log(trial.speed))
        squares = [(pair[0] - pair[-1]) ** 2 for pair in by_round.values() if len(pair) > 1]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0

    def gain(self, candidate: Candidate, rounds: Collection[int] | None = None) -> float:
        """Return the speed-up that a candidate can claim. rounds: on these only

        Speed-up = tokens a step / (step time / decode time), and a step that verifies drafts takes
        no less time than one without: what is measured beyond the tokens a step is noise.
        """
        steps = self.tokens_per_step(candidate)
        return min(self.score(candidate, rounds=rounds), steps or math.inf)

    def wins(self, candidate: Candidate) -> bool:
        """Whether a finalist is faster than plain decoding, by more than two times the noise.

        Only the last rung counts: in the others it was chosen for being fast, or lucky.
        """
        rung = max((t.rung for t in self.trials if t.candidate == candidate), default=0)
        rounds = [n for n in self.rounds_of(rung) if n in self._pace(candidate)]
        least = max(CLOSE / 3, 2 * self.noise / math.sqrt(max(1, len(rounds))))
        return self.gain(candidate, rounds) >= 1 + least

    def rounds_of(self, rung: int) -> list[int]:
        """Return the numbers of the rounds that a rung had."""
        return sorted({trial.round for trial in self.trials if trial.rung == rung})

    @property
    def finalists(self) -> list[Candidate]:
        """Who reached the last rung, the best first. Only these have answered all the same."""
        drafted = [trial for trial in self.trials if trial.candidate != PLAIN]
        last = max((trial.rung for trial in drafted), default=0)
        found = {trial.candidate for trial in drafted if trial.rung == last}
        return sorted(found, key=self.gain, reverse=True)

    def spread(self, candidate: Candidate) -> tuple[float, float]:
        """Return the lowest and the highest ratio that a candidate had."""
        own = [t.times_plain for t in self.trials if t.candidate == candidate and t.times_plain]
        return min(own, default=1.0), max(own, default=1.0)

    def tokens_per_step(self, candidate: Candidate) -> float:
        """Return how many tokens a request gets from a step; 0 if the engine does not tell."""
        own = [t for t in self.trials if t.candidate == candidate and t.tokens_per_step]
        steps = sum(t.tokens / t.tokens_per_step for t in own)
        return sum(t.tokens for t in own) / steps if steps else 0.0

    @property
    def ranking(self) -> list[Candidate]:
        """Everything that was tried, the best first; who stayed longer goes before who dropped."""

        def place(candidate: Candidate) -> tuple[int, float]:
            rungs = [t.rung for t in self.trials if t.candidate == candidate]
            return max(rungs, default=-1), self.gain(candidate)

        tried = dict.fromkeys(trial.candidate for trial in self.trials)
        return sorted(tried, key=place, reverse=True)
