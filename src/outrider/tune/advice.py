"""From what was measured to a profile: each value with its reason."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import one_line
from outrider.report.console import printable
from outrider.tune.search import CLOSE, PLAIN, Candidate, Search

__all__ = ["Advice", "advise"]


@dataclass(frozen=True)
class Advice:
    """A profile, with a reason for each of its values.

    chosen: the candidate that it stands for
    values: of the profile, in order; reasons: by the same keys
    """

    chosen: Candidate
    values: dict[str, Any]
    reasons: dict[str, str]

    def yaml(self, about: Iterable[str]) -> str:
        """Return the profile as YAML. about: lines that say what it was measured on."""
        lines = [f"# {printable(one_line(line))}" for line in about]
        for key, value in self.values.items():
            lines.append("")
            lines += [f"# {line}" for line in textwrap.wrap(self.reasons[key], 96)]
            lines.append(f"{key}: {value}")
        return "\n".join([*lines, ""])


def advise(search: Search, draft_bits: int | None = None, bits_reason: str = "") -> Advice:
    """Return the profile that the trials speak for.

    Among candidates that are as good as equal, one that adapts is chosen: traffic changes.
    """
    ranking, finalists = search.ranking, search.finalists
    best = next((c for c in finalists if search.wins(c)), PLAIN)
    chosen = best
    adaptive = [
        c
        for c in finalists
        if c.drafter == "adaptive" and search.wins(c) and search.score(c, best) >= 1 - CLOSE
    ]
    if best not in (PLAIN, *adaptive) and adaptive:
        chosen = adaptive[0]
    values: dict[str, Any] = {"drafter": chosen.drafter, "max_drafts": chosen.max_drafts}
    reasons = {
        "drafter": _why_drafter(search, chosen, best, ranking),
        "max_drafts": _why_drafts(search, chosen),
    }
    if draft_bits is not None and chosen.drafter in ("model", "adaptive"):
        values["draft_bits"] = draft_bits
        reasons["draft_bits"] = bits_reason
    return Advice(chosen, values, reasons)


def _why_drafter(
    search: Search, chosen: Candidate, best: Candidate, ranking: list[Candidate]
) -> str:
    if chosen == PLAIN:
        others = _listed(search, PLAIN, [c for c in ranking if c != PLAIN][:3])
        said = "nothing was faster than plain decoding here by more than the noise"
        return f"{said} ({search.noise:.1%}) and its tokens a step explain; of its speed {others}"
    low, high = search.spread(chosen)
    said = f"{search.gain(chosen):.2f} times plain ({low:.2f} to {high:.2f} by round"
    said += f", noise {search.noise:.1%})"
    if (steps := search.tokens_per_step(chosen)) > 0:
        said += f", {steps:.1f} tokens a step"
    if chosen != best:
        said += f"; {best} is within {CLOSE:.0%} of it, and what adapts is safer"
    rivals = {c.drafter: c for c in reversed(ranking) if c.drafter not in (chosen.drafter, "none")}
    if rivals:
        said += f"; of its speed on the same texts {_listed(search, chosen, rivals.values())}"
    return said


def _why_drafts(search: Search, chosen: Candidate) -> str:
    if chosen == PLAIN:
        return "0 is plain decoding"
    others = sorted((c for c in search.ranking if c.drafter == chosen.drafter), key=_k)
    found = ", ".join(
        f"K = {c.max_drafts} had {search.score(c, chosen):.2f}" for c in others if c != chosen
    )
    note = "; branches of a tree count too" if chosen.drafter == "adaptive" else ""
    return f"of its speed on the same texts {found}{note}"


def _k(candidate: Candidate) -> int:
    return candidate.max_drafts


def _listed(search: Search, chosen: Candidate, others: Iterable[Candidate]) -> str:
    """Return how fast others were, as a share of the chosen one's speed where both were tried."""
    return ", ".join(
        f"{c.drafter} with K = {c.max_drafts} had {search.score(c, chosen):.2f}" for c in others
    )


def about(facts: Mapping[str, Any], search: Search, traffic: str, date: str) -> list[str]:
    """Return the lines at the head of a profile."""
    rounds = len({trial.round for trial in search.trials})
    return [
        f"Written by `outrider tune` on {date}; use it with `outrider serve --profile FILE`.",
        f"model {facts.get('model')}; traffic: {traffic}, {search.traffic.concurrency} at once",
        f"{len(search.candidates)} settings, {rounds} rounds of answers of {search.tokens} tokens",
    ]
