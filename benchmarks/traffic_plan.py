"""What traffic.py measures, and the result file that an interrupted run goes on with."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paced_sglang import ADAPTIVE, CONTENDERS, KINDS, MIXED, NONE, OVERLAP
from traffic_clients import now
from traffic_figures import AGAIN, FIXED, FRESH, HISTORIES, THROUGHPUT, TRAFFIC, Run, summaries

from outrider.redact import hide
from outrider.report import provenance

SERVED: dict[str, dict[str, Any]] = {
    OVERLAP: CONTENDERS[OVERLAP],
    NONE: CONTENDERS[NONE],
    ADAPTIVE: CONTENDERS[ADAPTIVE],
    AGAIN: CONTENDERS[ADAPTIVE],
    **{f"device {k}": {"profile": {"drafter": "device", "max_drafts": k}} for k in (2, 4, 8)},
    THROUGHPUT: {
        "profile": {
            **CONTENDERS[ADAPTIVE]["profile"],
            "drafters": {ADAPTIVE: {"objective": "throughput"}},
        }
    },
}
"""Fields of paced_servers.Contender."""

FIXED_CONTENDERS = OVERLAP, NONE, ADAPTIVE
QUICK = OVERLAP, NONE, ADAPTIVE, "device 4"

BEFORE: dict[str, tuple[tuple[str, ...], int | None]] = {
    "after edits": (("edit",), None),
    "after chats": (("chat",), None),
    "after prose, B = 64": (("prose",), 64),
    "after json, B = 1": (("json",), 1),
    FRESH: ((), None),
}
"""What a server of `adaptive` serves before mixed traffic: kinds, and how many clients."""


@dataclass(frozen=True)
class Turn:
    """Runs that are made one after the other."""

    batch: int
    round: int
    contenders: tuple[str, ...]
    kind: str = MIXED


@dataclass(frozen=True)
class Part:
    """Servers that are started together, and the turns that they take."""

    mode: str
    device: str
    turns: tuple[Turn, ...]

    @property
    def contenders(self) -> tuple[str, ...]:
        """All of its turns, bare SGLang first."""
        return tuple(dict.fromkeys(name for turn in self.turns for name in turn.contenders))


class Recording:
    """The result file, which has each run as soon as it was made."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.result: dict[str, Any] = {"sessions": [], "runs": []}
        if file.exists():
            self.result = json.loads(file.read_text())
        self.turns = 0

    @property
    def runs(self) -> list[Run]:
        """All runs so far."""
        found: list[Run] = self.result["runs"]
        return found

    def begin(self, settings: dict[str, Any], modes: Sequence[str], resumed: bool) -> None:
        """Begin a session. Other modes' runs stay, and if it is resumed, these modes' too."""
        if resumed and "stopped" in self.result:
            raise SystemExit(f"{self.result['stopped']} Begin anew, without --resume.")
        if "stopped" in self.result:
            self.result = {"sessions": [], "runs": []}
        if not resumed:
            self.result["runs"] = [run for run in self.runs if run["mode"] not in modes]
        if not self.runs:
            self.result["sessions"] = []
        for session in self.result["sessions"]:
            if session["settings"] != settings:
                raise SystemExit(
                    f"{self.file} was measured with {session['settings']}, not with {settings}. "
                    "Name another --out."
                )
        self.result["runs"] = whole_rounds(self.runs)
        self.result["provenance"] = provenance()
        session = {"provenance": self.result["provenance"], "settings": settings}
        self.result["sessions"].append(session)
        self.turns = 1 + max((run["turn"] for run in self.runs), default=-1)

    def order(self, turn: Turn) -> tuple[str, ...]:
        """Return a turn's contenders, beginning with another one each time."""
        first = self.turns % len(turn.contenders)
        return turn.contenders[first:] + turn.contenders[:first]

    def add(self, run: Run) -> None:
        """Add a run to the file."""
        self.runs.append({**run, "session": len(self.result["sessions"]) - 1})
        self.save()

    def stop(self, why: str) -> None:
        """Say that an answer was wrong: no speed of this file counts."""
        self.result["stopped"] = why
        self.save()

    def finish(self) -> dict[str, Any]:
        """Add summaries and goals to the file. Return all of it."""
        if "stopped" in self.result:
            raise SystemExit(self.result["stopped"])
        if not self.runs:
            raise SystemExit(f"{self.file} has no runs")
        self.result |= summaries(self.runs)
        self.save()
        return self.result

    def save(self) -> None:
        """Write the file, which is never seen half written."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text(hide(json.dumps(self.result, indent=1)) + "\n")
        new.replace(self.file)


class Progress:
    """Says how many runs are left, and for how long: starts of servers count for themselves."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.left = Counter[str]()
        for part in parts:
            self.left[part.mode] += sum(len(turn.contenders) for turn in part.turns)
        self.total, self.parts = self.left.total(), len(parts)
        self.starts: list[float] = []
        self.runs: dict[str, list[float]] = {}
        self.since = now()

    def begin_part(self) -> None:
        """Say that a part's servers have started and met traffic."""
        self.starts.append(self._lap())
        self.parts -= 1

    def end_run(self, mode: str) -> str:
        """Say that a run is done. Return a word about those that are left."""
        self.runs.setdefault(mode, []).append(self._lap())
        self.left[mode] -= 1
        usual = statistics.mean(seconds for own in self.runs.values() for seconds in own)
        seconds = self.parts * statistics.mean(self.starts) + sum(
            count * statistics.mean(self.runs.get(mode, [usual]))
            for mode, count in self.left.items()
        )
        done = self.total - self.left.total()
        return f"{time.strftime('%H:%M:%S')} {done}/{self.total}, {seconds / 60:.0f} min left:"

    def end_part(self) -> None:
        """Say that a part's servers have ended."""
        self._lap()

    def _lap(self) -> float:
        before, self.since = self.since, now()
        return self.since - before


def plan(args: argparse.Namespace, modes: Sequence[str], runs: list[Run]) -> list[Part]:
    """Return what is left to be measured."""
    parts = []
    for device in args.devices:
        if TRAFFIC in modes:
            others = [name for name in args.contenders if name != OVERLAP]
            size = max(1, args.servers - 1)
            for group in (others[i : i + size] for i in range(0, len(others), size)):
                places = [
                    (batch, round_) for round_ in range(args.rounds) for batch in args.batches
                ]
                turns = [
                    Turn(*place, (OVERLAP, *names))
                    for place in places
                    if (names := missing(runs, TRAFFIC, device, MIXED, *place, group))
                ]
                parts.append(Part(TRAFFIC, device, tuple(turns)))
        if HISTORIES in modes:  # what a server has served is known only of its first mixed run
            for round_ in range(args.rounds):
                place = args.history_batch, round_
                names = missing(runs, HISTORIES, device, MIXED, *place, list(BEFORE))
                turns = [Turn(*place, (OVERLAP, *names))] if names else []
                parts.append(Part(HISTORIES, device, tuple(turns)))
        if FIXED in modes:
            turns = [
                Turn(batch, round_, FIXED_CONTENDERS, kind)
                for round_ in range(args.rounds)
                for batch in args.fixed_batches
                for kind in (MIXED, *KINDS)
                if missing(runs, FIXED, device, kind, batch, round_, FIXED_CONTENDERS)
            ]
            parts.append(Part(FIXED, device, tuple(turns)))
    return [part for part in parts if part.turns]


def missing(
    runs: list[Run], mode: str, device: str, kind: str, batch: int, round_: int,
    names: Sequence[str],
) -> tuple[str, ...]:  # fmt: skip
    """Return the contenders that were not measured there."""
    keys = "mode", "device", "kind", "batch", "round"
    place = mode, device, kind, batch, round_
    done = {run["contender"] for run in runs if tuple(run[key] for key in keys) == place}
    return tuple(name for name in names if name not in done)


def whole_rounds(runs: list[Run]) -> list[Run]:
    """Return runs without those of a fixed batch whose turn was interrupted: all of it is redone.

    Traffic keeps them: what is missing is measured in another turn, beside bare SGLang.
    """
    counts = Counter(run["turn"] for run in runs)
    return [
        run for run in runs if run["mode"] != FIXED or counts[run["turn"]] == len(FIXED_CONTENDERS)
    ]
