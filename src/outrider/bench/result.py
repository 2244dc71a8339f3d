"""What the runs say: speed against plain, tokens per step, and where the time goes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Optional
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from outrider.bench.measure import Cell, Parity, Plan, Run, percentiles, spread
from outrider.errors import UsageError

__all__ = ["Result", "load_result"]

VERSION = 1
"""Of the JSON document."""


@dataclass
class Result:
    """All that a benchmark found, complete or not.

    engines: what each says about itself; the first is plain
    interrupted: whether it was stopped before its end
    """

    provenance: dict[str, Any]
    engines: list[dict[str, Any]]
    plan: Plan
    runs: list[Run] = field(default_factory=list)
    parities: dict[tuple[Cell, int], Parity] = field(default_factory=dict)
    interrupted: bool = False

    def of(self, cell: Cell, engine: int) -> list[Run]:
        """Return the runs of an engine in a cell, by round."""
        found = [run for run in self.runs if (run.cell, run.engine) == (cell, engine)]
        return sorted(found, key=lambda run: run.round)

    @property
    def cells(self) -> list[Cell]:
        """The cells that have runs."""
        return [cell for cell in self.plan.cells if self.of(cell, 0)]

    @property
    def broken(self) -> list[tuple[Cell, int]]:
        """Where answers differ beyond ties: speed is not told there."""
        return [place for place, parity in self.parities.items() if not parity.holds]

    def times_plain(self, cell: Cell, engine: int) -> list[float]:
        """Return how many times plain's speed an engine had, round by round."""
        plain = {run.round: run.speed for run in self.of(cell, 0)}
        return [
            run.speed / plain[run.round]
            for run in self.of(cell, engine)
            if plain.get(run.round, 0) > 0
        ]

    def equation(self, cell: Cell, engine: int) -> dict[str, float] | None:
        """Return speed-up = tokens per step / (step time / decode time) with what was measured.

        decode time: that of plain's steps; where plain has no counters, its time for a token of
        each request. None where the engine has no counters, or requests come at a rate.
        """
        plain, ours = self.of(cell, 0), self.of(cell, engine)
        if cell.rate or not ours or not plain or any(run.counts is None for run in ours):
            return None
        total = reduce(add, (run.counts for run in ours if run.counts))
        if not total.steps or not total.step_seconds:
            return None
        steps = [run.counts for run in plain if run.counts and run.counts.steps]
        if steps:
            decode = reduce(add, steps).step_seconds
        else:
            speed = spread([run.speed for run in plain])["median"]
            decode = cell.concurrency / speed if speed else 0.0
        if round(decode, 5) <= 0 or round(total.step_seconds, 5) <= 0:
            return None  # counters that tell of steps and not of their time
        found = {
            "tokens_per_step": total.tokens_per_step,
            "step_seconds": total.step_seconds,
            "decode_seconds": decode,
            "speed_up": total.tokens_per_step / (total.step_seconds / decode),
        }
        return {name: round(value, 5) for name, value in found.items()}

    def summary(self, cell: Cell, engine: int) -> dict[str, Any]:
        """Return what is known of an engine in a cell."""
        runs = self.of(cell, engine)
        parity = self.parities.get((cell, engine))
        found: dict[str, Any] = {
            **asdict(cell),
            "engine": engine,
            "rounds": len(runs),
            "parity": parity and {"asked": parity.asked, "same": parity.same, "said": parity.said},
        }
        if parity is not None and not parity.holds:
            return {**found, "refused": "answers differ: no speed is told"}
        if not runs:
            return found
        ratios = self.times_plain(cell, engine)
        counts = [run.counts for run in runs if run.counts]
        return {
            **found,
            "tokens_per_second": spread([run.speed for run in runs]),
            "times_plain": spread(ratios) if ratios and engine else None,
            "first_token_seconds": percentiles([t for run in runs for t in run.first_token]),
            "seconds_per_token": percentiles([t for run in runs for t in run.per_token]),
            "equation": self.equation(cell, engine) if engine else None,
            "counts": reduce(add, counts).as_json() if counts else None,
        }

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        plan = asdict(self.plan)
        plan["texts"] = {name: len(texts) for name, texts in self.plan.texts.items()}
        return {
            "outrider_bench": VERSION,
            "interrupted": self.interrupted,
            "parity": "failed" if self.broken else "holds",
            "provenance": self.provenance,
            "engines": self.engines,
            "plan": plan,
            "cells": [
                self.summary(cell, engine)
                for cell in self.cells
                for engine in range(len(self.engines))
            ],
        }


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Spread(_Read):
    median: float = Field(gt=1e-9, lt=1e9)
    min: float = Field(ge=0, lt=1e9)
    max: float = Field(ge=0, lt=1e9)


class _Cell(_Read):
    workload: str = Field(max_length=1000)
    concurrency: int = Field(ge=1, le=10**6)
    rate: Optional[float] = Field(gt=0, le=1e9)  # noqa: UP045 - pydantic reads it at run time
    engine: int = Field(ge=0)
    times_plain: Optional[_Spread] = None  # noqa: UP045


class _Engine(_Read):
    engine: str = Field(max_length=1000)


class _Document(_Read):
    """What `compared` reads of a result."""

    outrider_bench: int
    engines: list[_Engine]
    cells: list[_Cell]


def load_result(file: Path) -> dict[str, Any]:
    """Return a result document, to compare with another."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        read = _Document.model_validate(found)
        if read.outrider_bench != VERSION:
            raise ValueError(f"version {read.outrider_bench}")
        if any(cell.engine >= len(read.engines) for cell in read.cells):
            raise ValueError("a cell of an engine that is not there")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{file} is no result of `outrider bench` ({error!r:.200})", fix="give its JSON file"
        ) from error
    return found


def compared(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each cell that both results have, with the ratio of speeds.

    Speeds of two runs compare only as ratios to plain: machines differ from day to day.
    """

    def key(cell: dict[str, Any]) -> tuple[Any, ...]:
        return cell["workload"], cell["concurrency"], cell["rate"], cell["engine"]

    before = {key(cell): cell for cell in old["cells"]}
    found = []
    for cell in new["cells"]:
        was = before.get(key(cell))
        if was and cell.get("times_plain") and was.get("times_plain"):
            a, b = was["times_plain"], cell["times_plain"]
            found.append(
                {
                    "cell": str(Cell(cell["workload"], cell["concurrency"], cell["rate"])),
                    "engine": new["engines"][cell["engine"]]["engine"],
                    "old": a,
                    "new": b,
                    "ratio": round(b["median"] / a["median"], 4),
                    # ranges over rounds that do not touch
                    "clear": b["min"] > a["max"] or b["max"] < a["min"],
                }
            )
    return found


def names(engines: Sequence[dict[str, Any]]) -> list[str]:
    """Return short names for engines: what tells them apart from the first, which is plain."""
    specs = [str(engine["engine"]) for engine in engines]
    plain = specs[0].partition("#")[0]
    found = []
    for spec, facts in zip(specs[1:], engines[1:], strict=True):
        base, _, queries = spec.partition("#")
        if "://" in base and base != plain:
            parts, algorithm = urlsplit(base), facts.get("speculative_algorithm") or "server"
            host = "" if parts.hostname in ("127.0.0.1", "localhost") else parts.hostname
            port = "" if parts.port is None else f":{parts.port}"
            called = "Outrider" if algorithm == "OUTRIDER" else algorithm
            queries = ", ".join(filter(None, [f"{called} {host}{port}", queries]))
        # of a path, its last part; tried at the beginnings of parts alone
        found.append(re.sub(r"(?<![^=,:])[^=,:]*/", "", queries or spec))
    return ["plain", *(found if len(set(found)) == len(found) else specs[1:])]
