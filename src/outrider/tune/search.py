"""Successive halving: all candidates a little, the better half a little more, until one is left.

Each rung has prompts of its own, and within it every candidate answers the same ones, plain
decoding among them: what counts is the ratio to plain within a rung, for the machine may be slower
in the next. Plain decoding never drops out: it is the measure, and may be the answer.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.measure import speed_of
from outrider.engines import Answer, Counts, Engine, Wish
from outrider.errors import Unsupported

__all__ = ["PLAIN", "Candidate", "Search", "Traffic", "Trial", "available", "grid"]

DRAFTERS = ("model", "suffix", "adaptive")  # n-grams are what suffixes are without branches
KS = (2, 4, 8, 12)
FEWEST, MOST = 24, 384
"""Tokens that an answer has: with fewer, who drafts has not found its pace yet."""


@dataclass(frozen=True)
class Candidate:
    """A setting: who drafts, and at most how many drafts a request has in a step."""

    drafter: str
    max_drafts: int

    def __str__(self) -> str:
        return "plain" if not self.max_drafts else f"{self.drafter}, K = {self.max_drafts}"

    @property
    def wishes(self) -> dict[str, Any]:
        """The same as wishes of a request."""
        return {"drafter": self.drafter, "max_drafts": self.max_drafts}


PLAIN = Candidate("none", 0)


@dataclass(frozen=True)
class Traffic:
    """What to tune for: prompts, and how many are open at once."""

    texts: Sequence[str]
    concurrency: int
    chat: bool = True

    def wishes(self, rung: int, max_tokens: int) -> list[Wish]:
        """Return what is asked in a rung: other prompts than in the one before."""
        count = self.concurrency
        chosen = [self.texts[(rung * count + i) % len(self.texts)] for i in range(count)]
        return [Wish(text, chat=self.chat, max_tokens=max_tokens) for text in chosen]


@dataclass(frozen=True)
class Trial:
    """How a candidate did in a rung.

    times_plain: its speed over plain's on the same prompts
    tokens_per_step: if the engine tells
    """

    candidate: Candidate
    rung: int
    speed: float
    times_plain: float
    tokens_per_step: float
    same: int
    asked: int


def available(engine: Engine) -> tuple[list[str], dict[str, str]]:
    """Return the drafters that an engine has, and of the others why not."""
    found, refused = [], {}
    for name in DRAFTERS:
        try:
            engine.variant({"drafter": name, "max_drafts": 1}).ask([Wish("a", False, 1)])
            found.append(name)
        except Unsupported as error:
            refused[name] = error.what
    return found, refused


def grid(drafters: Sequence[str], ks: Sequence[int] = KS) -> list[Candidate]:
    """Return every candidate there is but plain decoding."""
    return [Candidate(name, k) for name in drafters for k in ks]


@dataclass
class Search:
    """Looks for the best candidate within a budget of seconds.

    trials: what was measured so far
    rungs: who was left at the start of each rung
    """

    engine: Engine
    traffic: Traffic
    candidates: list[Candidate]
    seconds: float
    clock: Callable[[], float] = time.perf_counter
    trials: list[Trial] = field(default_factory=list)
    rungs: list[list[Candidate]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._alive = list(self.candidates)
        self._plain_speed = 0.0  # of one request

    @property
    def num_rungs(self) -> int:
        """How many rungs are to come: as many as it takes to halve until two are left, and one."""
        return 1 + max(0, math.ceil(math.log2(max(1, len(self._alive)) / 2)))

    def run(self, begun: Callable[[int, Candidate, float], None]) -> Iterator[Trial]:
        """Yield each trial. begun: called before each, with the share of the budget spent."""
        started = self.clock()
        while True:
            left = started + self.seconds - self.clock()
            share = left / self.num_rungs / (len(self._alive) + 1)
            self.rungs.append(list(self._alive))
            last = len(self._alive) <= 2
            yield from self._rung(
                len(self.rungs) - 1,
                share,
                lambda rung, who: begun(rung, who, (self.clock() - started) / self.seconds),
            )
            if last or self.clock() - started > self.seconds:
                return
            keep = max(2, math.ceil(len(self._alive) / 2))
            self._alive = sorted(self._alive, key=self.score, reverse=True)[:keep]

    def _rung(
        self, rung: int, share: float, begun: Callable[[int, Candidate], None]
    ) -> Iterator[Trial]:
        """Measure plain and all that are left, each for about `share` seconds."""
        begun(rung, PLAIN)
        wishes = self.traffic.wishes(rung, self._tokens(share))
        # both models read the prompts first: what follows finds them in the prefix cache
        who = next((c for c in self._alive if c.drafter in ("model", "adaptive")), PLAIN)
        first = [Wish(wish.prompt, wish.chat, 1) for wish in wishes]
        self._variant(who).ask(first, self.traffic.concurrency)
        answers, plain, _ = self._measure(PLAIN, wishes)
        self._plain_speed = plain / self.traffic.concurrency
        yield Trial(PLAIN, rung, plain, 1.0, 1.0, len(wishes), len(wishes))
        turn = rung % max(1, len(self._alive))
        for candidate in [*self._alive[turn:], *self._alive[:turn]]:
            begun(rung, candidate)
            said, speed, counts = self._measure(candidate, wishes)
            trial = Trial(
                candidate,
                rung,
                speed,
                speed / plain if plain else 0.0,
                counts.tokens_per_step if counts else 0.0,
                sum(a.text == b.text for a, b in zip(answers, said, strict=True)),
                len(wishes),
            )
            self.trials.append(trial)
            yield trial

    def _tokens(self, share: float) -> int:
        """Return how long answers shall be, so that plain decoding takes about so many seconds."""
        if not self._plain_speed:
            before = self.clock()
            wishes = self.traffic.wishes(0, FEWEST)
            self._variant(PLAIN).ask(wishes, self.traffic.concurrency)
            self._plain_speed = FEWEST / max(1e-6, self.clock() - before)
        return int(min(MOST, max(FEWEST, share * self._plain_speed)))

    def _measure(
        self, candidate: Candidate, wishes: Sequence[Wish]
    ) -> tuple[list[Answer], float, Counts | None]:
        engine = self._variant(candidate)
        before = engine.counts()
        answers = engine.ask(wishes, self.traffic.concurrency, stream=True)
        after = engine.counts()
        counts = after - before if before is not None and after is not None else None
        return answers, speed_of(answers), counts

    def _variant(self, candidate: Candidate) -> Engine:
        return self.engine.variant(candidate.wishes, salt="tune")

    def score(self, candidate: Candidate, other: Candidate = PLAIN) -> float:
        """Return how many times another's speed a candidate has, on the rungs that both had.

        Later rungs are longer and count so. The mean is geometric: twice as fast and half as fast
        are as fast.
        """
        mine, theirs = self._by_rung(candidate), self._by_rung(other)
        shared = [rung for rung in mine if rung in theirs]
        logs = [(math.log(mine[rung] / theirs[rung]), rung + 1) for rung in shared]
        return math.exp(sum(v * w for v, w in logs) / sum(w for _, w in logs)) if logs else 0.0

    def _by_rung(self, candidate: Candidate) -> dict[int, float]:
        if candidate == PLAIN:
            return dict.fromkeys(range(len(self.rungs)), 1.0)
        own = [trial for trial in self.trials if trial.candidate == candidate]
        return {trial.rung: max(1e-6, trial.times_plain) for trial in own}

    @property
    def finalists(self) -> list[Candidate]:
        """Who reached the last rung, the best first. Only these have answered all the same."""
        last = max((trial.rung for trial in self.trials), default=0)
        found = [trial.candidate for trial in self.trials if trial.rung == last]
        return sorted(found, key=self.score, reverse=True)

    def spread(self, candidate: Candidate) -> tuple[float, float]:
        """Return the lowest and the highest ratio that a candidate had."""
        found = [t.times_plain for t in self.trials if t.candidate == candidate] or [1.0]
        return min(found), max(found)

    def tokens_per_step(self, candidate: Candidate) -> float:
        """Return the mean over trials; 0 if the engine does not tell."""
        found = [t.tokens_per_step for t in self.trials if t.candidate == candidate]
        return statistics.mean(found) if found else 0.0

    @property
    def ranking(self) -> list[Candidate]:
        """Everything that was tried, the best first; who stayed longer goes before who dropped."""

        def place(candidate: Candidate) -> tuple[int, float]:
            rungs = [t.rung for t in self.trials if t.candidate == candidate]
            last = len(self.rungs) - 1 if candidate == PLAIN else max(rungs, default=-1)
            return last, self.score(candidate)

        tried = {trial.candidate for trial in self.trials} | {PLAIN}
        return sorted(tried, key=place, reverse=True)
