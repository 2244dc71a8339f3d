"""The walk: a generation with the text of every token and the fate of every draft."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from outrider.explain.recording import Decode, Foreseen, Logprobs, Recording, StepRecord

__all__ = ["Alternative", "Draft", "Emitted", "Totals", "Walk", "WalkStep", "counted", "make_walk"]

Fate = Literal["accepted", "rejected", "unreached"]
"""A draft is part of the text; or the target wrote something else in its place; or its place was
not reached, since a draft before it was rejected or the text had ended."""

Ending = Literal["prompt", "plain", "bonus", "recovered", "ended"]
"""How a step's last token came about: from reading the prompt; without drafts; after a path of
drafts that were all accepted; in place of a rejected draft; or it was a draft, and the last."""

ROOT = -1
ROUNDING = 0.01
"""A logprob may be above 0 by so much."""

WINDOW = 8
"""A token is spelled after so many others: bytes may make a character only together."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class Token(_Model):
    """A token as it reads where it stands; "" if its bytes are not yet a character."""

    id: int
    text: str


class Draft(Token):
    """A drafted token. parent: the index of the draft that it follows, or -1."""

    parent: int
    fate: Fate


class Alternative(Token):
    """A token that the target considered."""

    probability: float


class Emitted(Token):
    """A token of the text.

    draft: the index of the accepted draft that it was; None if it is the target's own
    alternatives: the target's most likely tokens here, best first
    """

    draft: int | None
    probability: float | None
    alternatives: tuple[Alternative, ...]


class WalkStep(_Model):
    """One pass of the target; number 0 reads the prompt.

    foreseen: what a draft server had for it, if one was asked
    """

    number: int
    drafter: str
    drafts: tuple[Draft, ...]
    emitted: tuple[Emitted, ...]
    ending: Ending
    foreseen: Foreseen | None = None
    seconds: float | None

    @property
    def own(self) -> Emitted | None:
        """The target's own token: the bonus or recovered one."""
        last = self.emitted[-1]
        return last if last.draft is None else None

    @property
    def accepted(self) -> int:
        """How many drafts were accepted."""
        return sum(one.fate == "accepted" for one in self.drafts)

    @property
    def tally(self) -> str:
        """How many drafts were accepted of how many, and whether a draft server had some ready."""
        kept = f"{self.accepted}/{len(self.drafts)}" if self.drafts else ""
        return f"{kept} {self.foreseen or ''}".strip()

    @property
    def branches(self) -> bool:
        """Whether the drafts are more than a chain."""
        parents = [one.parent for one in self.drafts]
        return len(set(parents)) < len(parents)

    def lost(self) -> list[list[int]]:
        """Return the drafts that are no part of the text, each once, in runs that follow on."""
        runs: list[list[int]] = []
        for i, one in enumerate(self.drafts):
            if one.fate == "accepted":
                continue
            run = next((run for run in runs if run[-1] == one.parent), None)
            if run is None:
                runs.append([i])
            else:
                run.append(i)
        return runs


class Totals(_Model):
    """What the steps add up to.

    passes: of the target, the prompt's included
    decode_tokens, decode_passes: without the prompt's pass and its token
    tokens_per_pass: their quotient; plain decoding has 1
    """

    tokens: int
    passes: int
    decode_tokens: int
    decode_passes: int
    drafted: int
    accepted: int
    tokens_per_pass: float
    accepted_per_pass: float
    acceptance_rate: float


class Comparison(_Model):
    """How many tokens plain decoding wrote, and how many of them are in the same place here."""

    same: int
    total: int
    equal: bool


class Walk(_Model):
    """A generation, step by step.

    prompt: as the model reads it
    finish_reason: "stop", "length", or "interrupted"
    seconds: of all of it, if known
    settings: models and parameters
    provenance: when, where and by which versions it was made
    """

    prompt: str
    steps: tuple[WalkStep, ...]
    finish_reason: str
    seconds: float | None = None
    plain: Comparison | None = None
    settings: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def output_ids(self) -> list[int]:
        """The ids of the text."""
        return [token.id for step in self.steps for token in step.emitted]

    @property
    def text(self) -> str:
        """The text, without the prompt."""
        return "".join(token.text for step in self.steps for token in step.emitted)

    @property
    def totals(self) -> Totals:
        """The sums."""
        later = self.steps[1:]
        passes, emitted = max(1, len(later)), sum(len(step.emitted) for step in later)
        drafted = sum(len(step.drafts) for step in later)
        accepted = sum(step.accepted for step in later)
        return Totals(
            tokens=len(self.output_ids),
            passes=len(self.steps),
            decode_tokens=emitted,
            decode_passes=len(later),
            drafted=drafted,
            accepted=accepted,
            tokens_per_pass=emitted / passes,
            accepted_per_pass=accepted / passes,
            acceptance_rate=accepted / drafted if drafted else 0.0,
        )

    @property
    def foreseen(self) -> str:
        """In how many steps a draft server was ahead, and why not in the others; "" without one."""
        asked = Counter(step.foreseen for step in self.steps if step.foreseen is not None)
        if not asked:
            return ""
        hits, others = asked.pop("hit", 0), asked
        why = "".join(f", {count} {kind}" for kind, count in others.most_common())
        return f"drafts made ahead: {hits} of {counted(hits + others.total(), 'step')}{why}"

    @property
    def verdict(self) -> str:
        """One sentence."""
        totals = self.totals
        tokens, passes = counted(totals.tokens, "token"), counted(totals.passes, "pass", "es")
        said = f"{tokens} in {passes} of the target"
        return said + ", interrupted" * (self.finish_reason == "interrupted")

    @property
    def counted(self) -> str:
        """What the tokens of a pass are the quotient of."""
        t = self.totals
        tokens, passes = counted(t.decode_tokens, "token"), counted(t.decode_passes, "pass", "es")
        return f"without the prompt's pass and its token: {tokens} in {passes}"

    @property
    def equation(self) -> str:
        """The tokens of a pass, and where they come from."""
        t = self.totals
        own = t.tokens_per_pass - t.accepted_per_pass
        return (
            f"{t.tokens_per_pass:.2f} tokens a pass = {own:.2f} of its own "
            f"+ {t.accepted_per_pass:.2f} accepted drafts"
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values, with the totals; `Walk.model_validate` reads them again."""
        return {**self.model_dump(mode="json"), "totals": self.totals.model_dump()}


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{plural if number != 1 else ''}"


def make_walk(recording: Recording, decode: Decode, provenance: Mapping[str, Any]) -> Walk:
    """Return the walk of a recording. Raises ValueError if its steps do not make up its output."""
    said = [token for step in recording.steps for token in step.emitted]
    if said != recording.output_ids:
        raise ValueError(
            f"the steps emit {len(said)} tokens that are not the {len(recording.output_ids)} "
            "of the output"
        )
    comparison = None
    if recording.plain_ids is not None:
        pairs = zip(recording.plain_ids, recording.output_ids, strict=False)
        comparison = Comparison(
            same=sum(a == b for a, b in pairs),
            total=len(recording.plain_ids),
            equal=recording.plain_ids == recording.output_ids,
        )
    return Walk(
        prompt=recording.prompt,
        steps=_spelled(recording, decode),
        finish_reason=recording.finish_reason,
        seconds=recording.seconds,
        plain=comparison,
        settings=recording.settings,
        provenance=dict(provenance),
    )


Spell = Callable[[Sequence[int], int], str]
"""Returns how a token reads after others."""


def _spelled(recording: Recording, decode: Decode) -> tuple[WalkStep, ...]:
    """Return the steps with their texts, for which `decode` is called once: it may be far away."""
    wanted: dict[tuple[int, ...], str] = {(): ""}

    def want(context: Sequence[int], token: int) -> str:
        tail = tuple(context[-WINDOW:])
        wanted.update(dict.fromkeys((tail, (*tail, token), (token,)), ""))
        return ""

    def spell(context: Sequence[int], token: int) -> str:
        tail = tuple(context[-WINDOW:])
        key = (*tail, token)
        before, after = _settled(wanted[tail]), _settled(wanted[key])
        # some tokenizers tidy up what stands before
        return after[len(before) :] if after.startswith(before) else wanted[(token,)]

    list(_steps(recording, want))
    keys = [key for key in wanted if key]
    wanted.update(zip(keys, decode(keys), strict=True))
    return tuple(_steps(recording, spell))


def _settled(text: str) -> str:
    """Return a text without the bytes at its end that do not make a character yet."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


def _steps(recording: Recording, spell: Spell) -> Iterator[WalkStep]:
    context = list(recording.prompt_ids)
    at = 0
    for number, record in enumerate(recording.steps):
        logprobs = recording.logprobs[at : at + len(record.emitted)]
        yield _step(number, record, logprobs, context, spell)
        context += record.emitted
        at += len(record.emitted)


def _step(
    number: int,
    record: StepRecord,
    logprobs: Sequence[Logprobs],
    context: Sequence[int],
    spell: Spell,
) -> WalkStep:
    fates = _fates(number, record)
    paths: dict[int, list[int]] = {ROOT: []}
    drafts = []
    for i, (token, parent) in enumerate(zip(record.drafts, record.parents, strict=True)):
        text = spell([*context, *paths[parent]], token)
        paths[i] = [*paths[parent], token]
        drafts.append(Draft(id=token, text=text, parent=parent, fate=fates[i]))
    emitted = []
    for i, token in enumerate(record.emitted):
        before = [*context, *record.emitted[:i]]
        here = logprobs[i] if i < len(logprobs) else None
        top = here.top if here is not None else ()
        emitted.append(
            Emitted(
                id=token,
                text=spell(before, token),
                draft=record.kept[i] if i < len(record.kept) else None,
                probability=_probability(here.token) if here is not None else None,
                alternatives=tuple(
                    Alternative(
                        id=other, text=spell(before, other), probability=_probability(logprob)
                    )
                    for other, logprob in top
                ),
            )
        )
    return WalkStep(
        number=number,
        drafter=record.drafter if record.drafts or record.foreseen else "",
        drafts=tuple(drafts),
        emitted=tuple(emitted),
        ending=_ending(number, record),
        foreseen=record.foreseen,
        seconds=record.seconds,
    )


def _probability(logprob: float) -> float:
    if not logprob <= ROUNDING:  # NaN is not, either
        raise ValueError(f"a logprob of {logprob!r:.80}")
    return min(1.0, math.exp(logprob))


def _fates(number: int, record: StepRecord) -> list[Fate]:
    """Return what became of each draft. Raises ValueError for a step that cannot have been."""
    path = [record.drafts[i] for i in record.kept]
    parents = [record.parents[i] for i in record.kept]
    follows = parents == [ROOT, *record.kept[:-1]][: len(parents)]
    own = len(record.emitted) - len(path)
    if not follows or list(record.emitted[: len(path)]) != path or own not in (0, 1):
        raise ValueError(f"step {number}: its kept drafts are not what it emitted")
    # where the target's word is known: after the root and each kept draft, unless the text ended
    judged = {ROOT, *(record.kept if own else record.kept[:-1])}
    return [
        "accepted" if i in record.kept else "rejected" if parent in judged else "unreached"
        for i, parent in enumerate(record.parents)
    ]


def _ending(number: int, record: StepRecord) -> Ending:
    if number == 0:
        return "prompt"
    if len(record.kept) == len(record.emitted):
        return "ended"
    if not record.drafts:
        return "plain"
    last = record.kept[-1] if record.kept else ROOT
    return "recovered" if last in record.parents else "bonus"
