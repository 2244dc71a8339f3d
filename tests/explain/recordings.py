"""Recordings to test with: of the tiny pair, and made up."""

from __future__ import annotations

from outrider.explain.recording import Logprobs, Recording, StepRecord

PROMPT = "On a misty morning, an outrider rode out of Harrow."
SETTINGS = {"engine": "none", "target": "nobody", "drafter": "model"}


def step(
    drafts=(), parents=(), kept=(), emitted=(), drafter="model", seconds=None, foreseen=None
) -> StepRecord:
    return StepRecord(
        drafter=drafter,
        drafts=drafts,
        parents=parents,
        kept=kept,
        emitted=emitted,
        seconds=seconds,
        foreseen=foreseen,
    )


def recording(*steps: StepRecord, prompt: str = "p", reason: str = "length") -> Recording:
    """Return a recording whose first step reads the prompt, and emits token 1."""
    first = step(emitted=(1,), drafter="")
    output = [token for one in (first, *steps) for token in one.emitted]
    logprobs = [Logprobs(-0.1, ((token, -0.1), (5, -2.5), (6, -9.0))) for token in output]
    return Recording(
        prompt, [0], output, [first, *steps], logprobs, reason, 1.0, None, dict(SETTINGS)
    )


# a tree: 10 - 11 - 12, 10 - 13, 14; the target goes 10, 13 and then its own way
TREE = step(
    drafts=(10, 11, 12, 13, 14),
    parents=(-1, 0, 1, 0, -1),
    kept=(0, 3),
    emitted=(10, 13, 20),
    drafter="suffix",
    seconds=0.02,
)


AHEAD = [
    step((10, 11), (-1, 0), (0,), (10, 12), "ahead", foreseen="hit"),
    step(emitted=(13,), drafter="ahead", foreseen="miss"),
    step(emitted=(14,), drafter="ahead", foreseen="none"),
    step((15,), (-1,), (0,), (15, 16), "ahead", foreseen="hit"),
]


def letters(lists) -> list[str]:
    """Spell ids as words."""
    return ["".join(f" t{token}" for token in ids) for ids in lists]
