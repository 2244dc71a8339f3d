"""What an audit found: how far two engines agree, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from outrider.audit.compare import (
    MOST,
    Comparison,
    Divergence,
    Tolerance,
    Verdict,
    compare,
    tolerance,
)
from outrider.audit.distribution import POWER, DistributionResult, compare_distributions
from outrider.clients import Answer, Counts, Token
from outrider.report.console import Exit

__all__ = ["Agreement", "Answers", "Heard", "Result", "Settings", "quantile", "wilson"]

SAME = "Speculation does not change answers here"
TIES = "Only numerical ties"
CHANGED = "Speculation changes answers"
OPEN = "Not decided"
THIN = "Not enough evidence"
EXIT_CODES = {SAME: Exit.GOOD, TIES: Exit.GOOD, CHANGED: Exit.FINDING}

MIN_PROMPTS, MIN_TOKENS = 5, 115
"""The fewest compared prompts and tokens for a verdict. With 115 tokens a fault that changes one
token in 50 shows in 9 of 10 audits."""

Answers = dict[int, Answer]
"""By the number of the query."""


@dataclass(frozen=True)
class Settings:
    """How the engines are asked.

    samples: answers to each prompt of the sampling test; 0 leaves it out
    tolerance: a margin up to which a divergence is a tie; None reads it from the noise
    min_prompts, min_tokens: what must have been compared for a good verdict
    """

    chat: bool = True
    max_tokens: int = 64
    concurrency: int = 4
    samples: int = 200
    temperature: float = 1.0
    top_p: float = 1.0
    tolerance: float | None = None
    seed: int = 0
    min_prompts: int = MIN_PROMPTS
    min_tokens: int = MIN_TOKENS


@dataclass
class Heard:
    """All answers so far. `plain_again` is the control: does plain agree with itself?

    skipped: why an engine refuses a prompt, by its number
    """

    plain: Answers = field(default_factory=dict)
    plain_again: Answers = field(default_factory=dict)
    speculative: Answers = field(default_factory=dict)
    sampled_plain: Answers = field(default_factory=dict)
    sampled_speculative: Answers = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.plain)


@dataclass(frozen=True)
class Agreement:
    """How far the answers to the same prompts agree."""

    comparisons: Mapping[int, Comparison]

    @staticmethod
    def of(plain: Answers, other: Answers) -> Agreement:
        """Compare answer by answer, as far as there are two."""
        both = sorted(plain.keys() & other.keys())
        return Agreement({n: compare(plain[n], other[n]) for n in both})

    def __len__(self) -> int:
        return len(self.comparisons)

    @property
    def identical(self) -> int:
        """Prompts whose answers are the same."""
        return sum(comparison.identical for comparison in self.comparisons.values())

    @property
    def interval(self) -> tuple[float, float]:
        """Where the share of identical answers lies, with 95 % confidence."""
        return wilson(self.identical, len(self))

    @property
    def tokens(self) -> int:
        """Of the plain answers."""
        return sum(comparison.total for comparison in self.comparisons.values())

    @property
    def agreed(self) -> int:
        """Tokens before the first differences."""
        return sum(comparison.agreed for comparison in self.comparisons.values())

    @property
    def divergences(self) -> dict[int, Divergence]:
        """By the number of the prompt."""
        found = ((n, one.divergence) for n, one in self.comparisons.items())
        return {n: divergence for n, divergence in found if divergence is not None}

    @property
    def faults(self) -> dict[int, tuple[str, ...]]:
        """What differs where the tokens do not, by the number of the prompt."""
        return {n: one.faults for n, one in self.comparisons.items() if one.faults}

    @property
    def drifts(self) -> list[float]:
        """|Difference of logprobs| on agreeing tokens."""
        return [value for one in self.comparisons.values() for value in one.drifts]

    @property
    def noise(self) -> list[float]:
        """|Difference of margins| on agreeing tokens."""
        return [value for one in self.comparisons.values() for value in one.noise]

    def verdicts(self, tolerated: float) -> dict[int, Verdict]:
        """What each divergence is."""
        return {n: one.verdict(tolerated) for n, one in self.divergences.items()}


@dataclass(frozen=True)
class Result:
    """All that an audit found, whole or as far as it came.

    prompts, sampling_prompts: what was asked
    facts: what the engines say about themselves, "plain" and "speculative"
    greedy_counts, sampling_counts: what speculation did in each part, if the engine tells
    plain_counts: the same of the plain engine, which must not draft
    stopped: why it ended early, or None; interrupted: whether by Ctrl-C
    """

    settings: Settings
    prompts: Sequence[str]
    sampling_prompts: Sequence[str]
    heard: Heard
    facts: Mapping[str, Mapping[str, Any]]
    provenance: Mapping[str, Any]
    greedy_counts: Counts | None = None
    sampling_counts: Counts | None = None
    plain_counts: Counts | None = None
    stopped: str | None = None
    interrupted: bool = False

    @cached_property
    def greedy(self) -> Agreement:
        """Plain against speculative."""
        return Agreement.of(self.heard.plain, self.heard.speculative)

    @cached_property
    def control(self) -> Agreement:
        """Plain against plain."""
        return Agreement.of(self.heard.plain, self.heard.plain_again)

    @cached_property
    def tolerance(self) -> Tolerance:
        """How large a margin is still a tie."""
        if self.settings.tolerance is not None:
            return Tolerance(self.settings.tolerance, "given")
        both = [*self.greedy.comparisons.values(), *self.control.comparisons.values()]
        return tolerance(both)

    @cached_property
    def sampling(self) -> DistributionResult | None:
        """The sampling test, if there was one."""
        sides = self.heard.sampled_plain, self.heard.sampled_speculative
        plain, speculative = (_by_prompt(side, len(self.sampling_prompts)) for side in sides)
        return compare_distributions(plain, speculative) if plain and speculative else None

    @cached_property
    def verdicts(self) -> dict[int, Verdict]:
        """What each divergence is, by the number of its prompt."""
        return self.greedy.verdicts(self.tolerance.value)

    def count(self, verdict: Verdict) -> int:
        """Return how many divergences are so."""
        return sum(found == verdict for found in self.verdicts.values())

    # -- the verdict

    @cached_property
    def wrongs(self) -> list[str]:
        """What rounding and chance do not explain."""
        return list(self._wrongs())

    def _wrongs(self) -> Iterator[str]:
        if self.count("wrong") and not self._restless:
            yield (
                f"{self.count('wrong')} of {len(self.greedy)} greedy answers depart from the plain "
                f"engine's where it is sure (margin above {self.tolerance.value:.3g})"
            )
        if self.greedy.faults and not self.control.faults:
            n, faults = next(iter(self.greedy.faults.items()))
            yield (
                f"{len(self.greedy.faults)} answers of the same tokens differ otherwise "
                f"(prompt {n + 1}: {'; '.join(faults)})"
            )
        if self.sampling is not None and self.sampling.differs:
            worst = self.sampling.worst
            assert worst is not None
            where = "all prompts" if worst.prompt is None else f"prompt {worst.prompt + 1}"
            yield (
                f"sampled answers follow another distribution ({worst.way} of {where}: "
                f"corrected p = {worst.corrected:.1g})"
            )

    @cached_property
    def doubts(self) -> list[str]:
        """What keeps an audit from a verdict."""
        return list(self._doubts())

    def _doubts(self) -> Iterator[str]:
        if self.stopped is not None:
            yield self.stopped
        if not len(self.greedy):
            yield "no prompt was answered by both engines"
        if self._restless:
            yield "the plain engine does not agree with itself, beyond what rounding explains"
        if unknown := self.count("unknown"):
            yield f"{unknown} divergences cannot be judged: an engine tells no logprobs there"
        if self.plain_counts is not None and self.plain_counts.drafted:
            yield "the plain engine drafted too"
        counts = self.greedy_counts
        if counts is not None and len(self.greedy) and not counts.drafted:
            yield "the speculative engine drafted nothing (name a drafter: URL#drafter=model)"

    @property
    def evidence(self) -> int:
        """Tokens in which a fault could have shown: compared, and no more than were drafted."""
        drafted = self.greedy_counts.drafted if self.greedy_counts is not None else math.inf
        return int(min(self.greedy.agreed, drafted))

    @property
    def rarest_fault(self) -> int | None:
        """N, so that a fault that changes one token in N shows in 9 of 10 audits; None without."""
        return round(1 / (1 - (1 - POWER) ** (1 / self.evidence))) if self.evidence else None

    @property
    def power(self) -> str:
        """What this audit would have found."""
        told = "" if self.greedy_counts is None else " drafted"
        prompts = f"{len(self.greedy)} prompt{'s' * (len(self.greedy) != 1)}"
        said = f"{self.evidence:,}{told} tokens of {prompts} compared"
        if self.rarest_fault is not None:
            said += f": a fault in 1 of {self.rarest_fault:,} tokens would show in 9 of 10 audits"
        if self.sampling is None or not self.sampling.tests or self.sampling.detectable[0] >= 1:
            return f"{said}; sampling not tested"
        return f"{said}; in sampling, distances from {self.sampling.detectable[0]:.2f}"

    @property
    def thin(self) -> str | None:
        """Why the evidence is not enough for a good verdict, or None."""
        wanted = self.settings
        if len(self.greedy) >= wanted.min_prompts and self.evidence >= wanted.min_tokens:
            return None
        return (
            f"{self.power}; a verdict needs {wanted.min_tokens} tokens of {wanted.min_prompts} "
            "prompts: raise --count or --max-tokens"
        )

    @property
    def _restless(self) -> bool:
        """Whether plain differs from itself by more than rounding."""
        most = max(MOST, self.tolerance.value)
        return any(verdict == "wrong" for verdict in self.control.verdicts(most).values())

    @property
    def verdict(self) -> str:
        """What it comes to."""
        if self.wrongs:
            return CHANGED
        if self.doubts:
            return OPEN
        if self.thin:
            return THIN
        return TIES if self.verdicts else SAME

    @property
    def headline(self) -> str:
        """The verdict with its first reason, or with its power."""
        return f"{self.verdict} ({self.reason})"

    @property
    def reason(self) -> str:
        """What the verdict rests on."""
        found = {CHANGED: self.wrongs, OPEN: self.doubts}.get(self.verdict)
        return found[0] if found else self.thin or self.power

    @property
    def exit_code(self) -> Exit:
        """That of the verdict; or why there is none."""
        if self.interrupted:
            return Exit.INTERRUPTED
        undecided = Exit.COULD_NOT_RUN if self.stopped else Exit.UNDECIDED
        return EXIT_CODES.get(self.verdict, undecided)

    @cached_property
    def notes(self) -> list[str]:
        """What a reader should know beside the verdict."""
        return list(self._notes())

    def _notes(self) -> Iterator[str]:
        if self.verdict == CHANGED:
            yield from self.wrongs[1:]
            yield from self.doubts
        elif self.verdict == OPEN:
            yield from self.doubts[1:]
        if self.heard.skipped:
            n, why = next(iter(self.heard.skipped.items()))
            yield (
                f"{len(self.heard.skipped)} of {len(self.prompts)} prompts were skipped: an engine "
                f"refuses them (prompt {n + 1}: {why})"
            )
        if len(self.control) and self.control.identical < len(self.control):
            yield (
                f"the plain engine agrees with itself on {self.control.identical} of "
                f"{len(self.control)} prompts: batches change its rounding, without speculation"
            )
        outliers = sum(value > MOST for value in self.greedy.noise)
        if outliers:
            yield (
                f"on {outliers} of {len(self.greedy.noise):,} agreeing tokens the engines' margins "
                "differ by more than rounding explains: other weights or a wrong cache behind "
                "verification, or logprobs that an engine makes up"
            )
        if len(self.greedy.drifts) < self.greedy.agreed / 2:
            yield (
                f"logprobs of both engines are known for {len(self.greedy.drifts):,} of "
                f"{self.greedy.agreed:,} agreeing tokens only: drift says little"
            )
        if self.greedy_counts is None and len(self.greedy):
            yield "the speculative engine does not tell whether it drafted"
        if self.sampling is None:
            yield "sampling was not tested"
        elif not self.sampling.tests:
            yield "sampling was not tested: every sampled answer was the same, or there are too few"
        elif self.sampling_counts is not None and not self.sampling_counts.drafted:
            yield "no draft took part in the sampled answers: the sampling test says nothing"

    # -- as plain values

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        sampling = self.sampling
        return {
            "verdict": self.verdict,
            "headline": self.headline,
            "wrong": self.wrongs,
            "doubts": self.doubts,
            "power": {
                "said": self.power,
                "prompts": len(self.greedy),
                "tokens": self.evidence,
                "one_fault_in": self.rarest_fault,
                # the sampling test's keys are `law` and `law_distance`: users hold such files
                "law_distance": sampling.detectable[0] if sampling and sampling.tests else None,
            },
            "notes": self.notes,
            "skipped": {str(n): why for n, why in self.heard.skipped.items()},
            "stopped": self.stopped,
            "interrupted": self.interrupted,
            "engines": {name: dict(facts) for name, facts in self.facts.items()},
            "settings": asdict(self.settings),
            "tolerance": asdict(self.tolerance),
            "greedy": self._agreement(self.greedy),
            "control": self._agreement(self.control),
            "law": self._sampling(),
            "counts": {
                name: counts and counts.as_json()
                for name, counts in (
                    ("greedy", self.greedy_counts),
                    ("law", self.sampling_counts),
                    ("plain", self.plain_counts),
                )
            },
            "provenance": dict(self.provenance),
        }

    def _agreement(self, found: Agreement) -> dict[str, Any]:
        verdicts = found.verdicts(self.tolerance.value)
        return {
            "prompts": len(found),
            "identical": found.identical,
            "interval": [round(bound, 4) for bound in found.interval],
            "tokens": found.tokens,
            "agreed": found.agreed,
            "drift": summary(found.drifts),
            "noise": summary(found.noise),
            "faults": {str(n): list(faults) for n, faults in found.faults.items()},
            "divergences": [
                {"prompt": n, "text": self.prompts[n], "verdict": verdicts[n], **_plain(divergence)}
                for n, divergence in found.divergences.items()
            ],
        }

    def _sampling(self) -> dict[str, Any] | None:
        if self.sampling is None:
            return None
        return {
            "differs": self.sampling.differs,
            "detectable": self.sampling.detectable,
            "prompts": list(self.sampling_prompts),
            "counts": [list(pair) for pair in self.sampling.counts],
            "tests": [asdict(test) for test in self.sampling.tests],
        }


def _plain(divergence: Divergence) -> dict[str, Any]:
    found = asdict(divergence)
    for side in ("plain", "speculative"):
        token: Token | None = getattr(divergence, side)
        if token is not None:  # JSON has no infinity
            top = [(text, value if math.isfinite(value) else None) for text, value in token.top]
            found[side]["top"] = [list(pair) for pair in top]
    return found


def _by_prompt(answers: Answers, prompts: int) -> dict[int, list[Answer]]:
    """Sort sampled answers by prompt: these took turns."""
    found: dict[int, list[Answer]] = {}
    for number in sorted(answers):
        found.setdefault(number % prompts, []).append(answers[number])
    return found


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, 99th percentile and maximum, or None of nothing."""
    if not values:
        return None
    found = {"median": quantile(values, 0.5), "p99": quantile(values, 0.99), "max": max(values)}
    return {"count": len(values), **{name: round(value, 6) for name, value in found.items()}}


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value that a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def wilson(good: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval for a share, 95 % by default."""
    if not total:
        return 0.0, 1.0
    share, square = good / total, z * z / total
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / total + square / total / 4) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)
