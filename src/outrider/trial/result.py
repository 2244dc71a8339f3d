"""What a trial found: kernels, answers and speed, and the verdict over all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from outrider.audit.result import (
    CHANGED,
    MIN_PROMPTS,
    MIN_TOKENS,
    OPEN,
    SAME,
    THIN,
    TIES,
    Agreement,
    Heard,
    Result,
    Settings,
)
from outrider.report.console import Exit
from outrider.trial.ask import queries, read_answers, read_counts
from outrider.trial.plan import Pair, Wanted

__all__ = ["Judged", "Trial", "judge"]

VERSION = 1
"""Of the JSON document."""

DEVICE = ("forward", "draft_forward", "verify")
"""Parts of a step that launch work on the device or wait for it; all others are the host's."""


@dataclass(frozen=True)
class Judged:
    """The answers of a pair, compared.

    all: every request, bare SGLang against Outrider; control: bare SGLang against itself
    greedy: what an audit says of the requests that told their logprobs
    deterministic: whether all tokens must be the same
    refused: the number of a request that only one of the two servers refuses, or None
    """

    all: Agreement
    control: Agreement
    greedy: Result
    deterministic: bool
    refused: int | None = None

    @property
    def different(self) -> list[int]:
        """The numbers of the requests whose answers differ."""
        return [n for n, one in self.all.comparisons.items() if not one.identical]

    @property
    def steady(self) -> bool:
        """Whether bare SGLang agrees with itself, so that a difference means something."""
        return self.control.identical == len(self.control)

    @property
    def evidence(self) -> int:
        """Tokens in which a fault could have shown: compared, and no more than were drafted."""
        counts = self.greedy.greedy_counts
        return int(min(self.all.agreed, self.all.agreed if counts is None else counts.drafted))

    @property
    def thin(self) -> bool:
        """Whether the evidence is not enough for a good verdict."""
        return len(self.all) < MIN_PROMPTS or self.evidence < MIN_TOKENS

    @property
    def exit_code(self) -> Exit:
        """That of the verdict."""
        if self.refused is not None or self.greedy.exit_code == Exit.FINDING:
            return Exit.FINDING
        if self.deterministic and self.different:
            return Exit.FINDING if self.steady else Exit.UNDECIDED
        return Exit.UNDECIDED if self.thin and not self.greedy.exit_code else self.greedy.exit_code

    @property
    def verdict(self) -> str:
        """What it comes to, with the reason."""
        count, of = len(self.different), len(self.all)
        if self.refused is not None:
            return f"{CHANGED} (only one of the servers refuses request {self.refused + 1})"
        if self.deterministic and count and self.steady:
            return f"{CHANGED} ({count} of {of} differ, and bare SGLang agrees with itself)"
        if self.deterministic and count and self.greedy.verdict != CHANGED:
            return f"{OPEN} ({count} of {of} differ, but bare SGLang differs from itself too)"
        verdict = self.greedy.verdict
        if verdict in (SAME, TIES) and self.thin:
            return (
                f"{THIN} ({self.evidence} drafted tokens of {of} requests compared, "
                f"{MIN_TOKENS} of {MIN_PROMPTS} are needed: raise --requests)"
            )
        reasons = {
            SAME: f"all {of} are identical, {self.all.tokens:,} tokens",
            TIES: f"{count} of {of} differ, where bare SGLang finds both tokens equally likely",
        }
        return f"{verdict} ({reasons.get(verdict) or self.greedy.reason})"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        told = self.greedy.as_json()
        audit = ("verdict", "skipped", "tolerance", "greedy", "control", "counts", "engines")
        return {
            "verdict": self.verdict,
            "exit_code": int(self.exit_code),
            "requests": len(self.all),
            "identical": self.all.identical,
            "different": self.different,
            "tokens": self.all.tokens,
            "agreed": self.all.agreed,
            "bare_agrees_with_itself": self.control.identical,
            "audit": {key: told[key] for key in audit},
        }


def judge(pair: Pair, wanted: Wanted, bare: Mapping[str, Any], ours: Mapping[str, Any]) -> Judged:
    """Compare what two servers answered.

    Where SGLang is deterministic and agrees with itself, any difference is one too many. Elsewhere
    the audit tells ties from mistakes.
    """
    plain, again = read_answers(bare["answers"]), read_answers(bare["again"])
    speculative = read_answers(ours["answers"])
    asked = queries(bare["asked"], bare["chat"], wanted.max_tokens, pair.deterministic)
    told = {n for n, query in enumerate(asked) if query.logprobs is not None}
    logprobs = [
        {n: one for n, one in side.items() if n in told} for side in (plain, again, speculative)
    ]
    heard = Heard(logprobs[0], logprobs[1], logprobs[2])
    heard.skipped.update({int(n): why for n, why in bare["refused"].items()})
    greedy = Result(
        # whether it is enough is judged over all requests
        Settings(bare["chat"], wanted.max_tokens, 16, 0, min_prompts=1, min_tokens=1),
        [query.prompt for query in asked],
        (),
        heard,
        {"plain": bare["facts"], "speculative": ours["facts"]},
        {},
        greedy_counts=read_counts(ours["counts"]),
        plain_counts=read_counts(bare["counts"]),
    )
    odd = sorted(bare["refused"].keys() ^ ours["refused"].keys(), key=int)
    return Judged(
        Agreement.of(plain, speculative),
        Agreement.of(plain, again),
        greedy,
        pair.deterministic,
        int(odd[0]) if odd else None,
    )


@dataclass
class Trial:
    """All that was found, whole or as far as it came.

    servers: what each server said, by (pair, side)
    failures: what could not run and why, with the last lines of its log
    """

    wanted: Wanted
    provenance: Mapping[str, Any]
    doctor: Mapping[str, Any]
    pairs: Sequence[Pair]
    kernels: Mapping[str, Any] | None = None
    servers: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @cached_property
    def judged(self) -> dict[str, Judged]:
        """The pairs of which both servers have answered. To be read at the end."""
        return {
            pair.name: judge(pair, self.wanted, *found)
            for pair in self.pairs
            if len(found := [one for (name, _), one in self.servers.items() if name == pair.name])
            == 2
        }

    @property
    def exit_code(self) -> Exit:
        """The worst of what was found; an interruption comes first."""
        codes = [judged.exit_code for judged in self.judged.values()]
        if self.interrupted:
            return Exit.INTERRUPTED
        if Exit.FINDING in codes or (self.kernels and not self.kernels["passed"]):
            return Exit.FINDING
        if self.failures or Exit.COULD_NOT_RUN in codes:
            return Exit.COULD_NOT_RUN
        return Exit.UNDECIDED if Exit.UNDECIDED in codes or not codes else Exit.GOOD

    @property
    def headline(self) -> str:
        """What it comes to, in a sentence."""
        if self.exit_code == Exit.INTERRUPTED:
            return "Interrupted: what was found until then"
        said = list(self._findings())
        if self.exit_code == Exit.COULD_NOT_RUN:
            said = [f"Could not run: {', '.join(self.failures)}"]
        elif self.exit_code == Exit.UNDECIDED:
            said = [one.verdict for one in self.judged.values() if one.exit_code][:1]
        elif not said:
            requests = sum(len(one.all) for one in self.judged.values())
            said = [f"Kernels pass, and {requests} answers are those of bare SGLang"]
        return "; ".join(said) or "Nothing was compared"

    def _findings(self) -> Iterator[str]:
        if self.kernels and not self.kernels["passed"]:
            yield f"Kernels: {self.kernels['verdict']}"
        for name, judged in self.judged.items():
            if judged.exit_code == Exit.FINDING:
                yield f"{name}: {judged.verdict}"

    def speeds(self) -> Iterator[dict[str, Any]]:
        """Yield each pair and concurrency: tokens a second of both, and what a step takes."""
        for pair in self.pairs:
            found = {
                side: {cell["concurrency"]: cell for cell in one["speed"]}
                for (name, side), one in self.servers.items()
                if name == pair.name
            }
            for load in sorted({load for cells in found.values() for load in cells}):
                bare, ours = (found.get(side, {}).get(load) for side in ("bare", "ours"))
                slow, fast = (_speed(one) for one in (bare, ours))
                yield {
                    "pair": pair.name,
                    "concurrency": load,
                    "bare_tokens_per_second": slow,
                    "ours_tokens_per_second": fast,
                    "times_bare": round(fast / slow, 4) if fast and slow else None,
                    **_step((ours or {}).get("counts") or {}),
                }

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values: all but the answers themselves."""
        return {
            "outrider_selftest_server": VERSION,
            "verdict": self.headline,
            "exit_code": int(self.exit_code),
            "interrupted": self.interrupted,
            "arguments": self.wanted.arguments,
            "kernels": self.kernels,
            "answers": {name: judged.as_json() for name, judged in self.judged.items()},
            "speed": list(self.speeds()),
            "servers": [
                {"pair": name, "side": side}
                | {key: one[key] for key in ("facts", "chat", "seconds", "speed")}
                for (name, side), one in self.servers.items()
            ],
            "skipped": {pair.name: pair.skip for pair in self.pairs if pair.skip},
            "failures": self.failures,
            "doctor": self.doctor,
            "provenance": self.provenance,
        }


def _speed(cell: Mapping[str, Any] | None) -> float | None:
    return cell["tokens_per_second"]["median"] if cell else None


def _step(counts: Mapping[str, Any]) -> dict[str, float | None]:
    """Return what a step takes on the host and on the device, by the server's own counters."""
    steps, parts = counts.get("steps") or 0, counts.get("seconds") or {}
    device = sum(seconds for part, seconds in parts.items() if part in DEVICE)
    host = sum(parts.values()) - device
    requests = counts.get("request_steps")
    return {
        "tokens_per_step": round(counts["emitted"] / requests, 4) if requests else None,
        "host_ms_per_step": round(1000 * host / steps, 4) if steps else None,
        "device_ms_per_step": round(1000 * device / steps, 4) if steps else None,
    }
