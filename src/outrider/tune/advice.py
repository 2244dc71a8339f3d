"""From what was measured to a profile: each value with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.tune.search import PLAIN, Candidate, Search

__all__ = ["Advice", "advise"]

CLOSE = 0.03
"""Candidates so close to each other are equal, as far as this machine can tell."""


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
        lines = [f"# {line}" for line in about]
        for key, value in self.values.items():
            lines.append("")
            lines += [f"# {line}" for line in _wrapped(self.reasons[key])]
            lines.append(f"{key}: {_scalar(value)}")
        return "\n".join([*lines, ""])


def advise(search: Search, draft_bits: int | None = None, bits_reason: str = "") -> Advice:
    """Return the profile that the trials speak for.

    Among candidates that are as good as equal, one that adapts is chosen: traffic changes.
    """
    ranking = search.ranking
    best = max(ranking[:3], key=search.score)
    if search.score(best) < 1 + CLOSE / 3:
        best = PLAIN
    chosen = best
    near = [c for c in ranking if search.score(c) >= search.score(best) * (1 - CLOSE)]
    adaptive = [c for c in near if c.drafter == "adaptive"]
    if best not in adaptive and adaptive and best != PLAIN:
        chosen = max(adaptive, key=search.score)
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
        others = _listed(search, [c for c in ranking if c != PLAIN][:3])
        return f"nothing was faster than plain decoding here: {others}"
    low, high = search.spread(chosen)
    said = f"{search.score(chosen):.2f} times plain ({low:.2f} to {high:.2f} by rung)"
    if (steps := search.tokens_per_step(chosen)) > 0:
        said += f", {steps:.1f} tokens a step"
    if chosen != best:
        said += f"; {best} had {search.score(best):.2f}, within {CLOSE:.0%}: what adapts is safer"
    rivals = {c.drafter: c for c in reversed(ranking) if c.drafter not in (chosen.drafter, "none")}
    if rivals:
        said += f"; against {_listed(search, sorted(rivals.values(), key=search.score)[::-1])}"
    return said


def _why_drafts(search: Search, chosen: Candidate) -> str:
    if chosen == PLAIN:
        return "0 is plain decoding"
    mine = sorted((c for c in search.ranking if c.drafter == chosen.drafter), key=_k)
    said = ", ".join(f"{c.max_drafts}: {search.score(c):.2f}" for c in mine)
    note = " (branches of a tree count too)" if chosen.drafter == "adaptive" else ""
    return f"times plain by K{note}: {said}; those that dropped out early were measured less"


def _k(candidate: Candidate) -> int:
    return candidate.max_drafts


def _listed(search: Search, candidates: Iterable[Candidate]) -> str:
    return ", ".join(f"{c} {search.score(c):.2f}" for c in candidates)


def _scalar(value: Any) -> str:
    return "null" if value is None else str(value)


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 96)


def about(facts: Mapping[str, Any], search: Search, traffic: str, date: str) -> list[str]:
    """Return the lines at the head of a profile."""
    trials = len(search.trials)
    return [
        f"Written by `outrider tune` on {date}; use it with `outrider serve --profile FILE`.",
        f"model {facts.get('model')}; traffic: {traffic}, {search.traffic.concurrency} at once",
        f"{trials} trials of {len(search.candidates)} settings in {len(search.rungs)} rungs",
    ]
