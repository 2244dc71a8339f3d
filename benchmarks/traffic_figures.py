"""The arithmetic of traffic.py: figures of a run, summaries over rounds, and goals."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common import spread
from paced_sglang import ADAPTIVE, NONE, OVERLAP, cell_summary
from traffic_clients import KINDS, Answer, Traffic

Run = dict[str, Any]

TRAFFIC, FIXED, HISTORIES = "traffic", "fixed", "histories"
AGAIN, THROUGHPUT, FRESH = "adaptive again", "adaptive, throughput", "fresh"
SIMPLE = (NONE, "device 2", "device 4", "device 8")
"""Contenders that choose nothing. `adaptive` must not be slower than the best of them."""

AGREE = 0.03
"""By how much two starts, or two histories, may differ."""

EDITS = {4: 0.35, 16: 0.40, 64: 0.55}
SPEEDS = {4: 1.30, 16: 1.20, 64: 1.05}
FIXED_EDITS = {1: 4.0, 16: 2.8, 64: 2.1}
CPU_BATCHES = 16, 64


@dataclass(frozen=True)
class VirtualTimes:
    """Converts moments of a run to those of a device whose work costs this machine no CPU time.

    real, virtual: the same moments on both clocks, ascending. Between two of them the virtual clock
        runs evenly, outside of them as the real one does. Empty: both clocks are the same.
    excused: seconds of the scheduler's CPU time up to each moment that are the device's work
    """

    real: Sequence[float] = ()
    virtual: Sequence[float] = ()
    excused: Sequence[float] = ()

    def at(self, moment: float) -> float:
        """Return the virtual time of a real moment."""
        if not self.real:
            return moment
        if moment <= self.real[0]:
            return self.virtual[0] - (self.real[0] - moment)
        if moment >= self.real[-1]:
            return self.virtual[-1] + (moment - self.real[-1])
        return self._between(moment, self.virtual)

    def excused_at(self, moment: float) -> float:
        """Return the CPU seconds up to a real moment that are the device's work."""
        if not self.excused or moment <= self.real[0]:
            return self.excused[0] if self.excused else 0.0
        return self.excused[-1] if moment >= self.real[-1] else self._between(moment, self.excused)

    def _between(self, moment: float, values: Sequence[float]) -> float:
        after = bisect_right(self.real, moment)
        before = after - 1
        share = (moment - self.real[before]) / (self.real[after] - self.real[before])
        return values[before] + share * (values[after] - values[before])


def run_figures(traffic: Traffic, times: VirtualTimes) -> Run:
    """Return what a run measured. Users are the requests that were sent in the window.

    A sample of CPU times has seconds by what used them, `scheduler` among them.
    """
    begun, ended = times.at(traffic.begun), times.at(traffic.ended)
    wall = ended - begun
    users, tokens = [], 0.0
    for answer in traffic.answers:
        sent, first, last = map(times.at, (answer.sent, answer.first, answer.last))
        if traffic.begun <= answer.sent < traffic.ended:
            users.append(Answer(answer.kind, answer.tokens, sent, first, last))
        tokens += begun <= first < ended
        if last > first:  # evenly: a stream's chunks in between are not looked at
            inside = max(0.0, min(last, ended) - max(first, begun))
            tokens += (answer.tokens - 1) * inside / (last - first)
        else:  # all in one chunk
            tokens += (answer.tokens - 1) * (begun <= first < ended)
    excused = times.excused_at(traffic.ended) - times.excused_at(traffic.begun)
    before, after = traffic.samples
    cpu = {name: after[name] - before[name] for name in after}
    cpu["scheduler"] -= excused
    token_ms = [_token_ms(user) for user in users]
    first_ms = [1000 * (user.first - user.sent) for user in users]
    kinds = {
        kind: [ms for ms, user in zip(token_ms, users, strict=True) if user.kind == kind]
        for kind in KINDS
    }
    return {
        "tokens_per_second": round(tokens / wall, 1),
        "users": len(users),
        "token_ms": {
            **_median_and_p95(token_ms),
            **{kind: round(statistics.median(found), 3) for kind, found in kinds.items() if found},
        },
        "first_token_ms": _median_and_p95(first_ms),
        "cpu_share": {name: round(seconds / wall, 3) for name, seconds in cpu.items()},
        "excused_seconds": round(excused, 3),
        "seconds": round(wall, 3),
        "real_seconds": round(traffic.ended - traffic.begun, 3),
    }


def _token_ms(user: Answer) -> float:
    return 1000 * (user.last - user.first) / (user.tokens - 1)


def _median_and_p95(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"median": round(statistics.median(ordered), 3), "p95": round(p95, 3)}


# -- summaries


def flat(run: Run) -> dict[str, float]:
    """Return the figures of a run that are compared, under one name each."""
    found = {"tokens_per_second": run["tokens_per_second"]}
    for group in ("token_ms", "first_token_ms"):
        found |= {f"{group} {name}": value for name, value in run[group].items()}
    return found | {"scheduler_share": run["cpu_share"]["scheduler"]}


def ratios(runs: Iterable[Run]) -> dict[str, dict[int, dict[str, float]]]:
    """Return each contender's figures by round, as multiples of bare SGLang's in its turn.

    A turn is the runs that were made one after the other. A round that was interrupted has two.
    """
    runs = list(runs)
    bare = {run["turn"]: flat(run) for run in runs if run["contender"] == OVERLAP}
    found: dict[str, dict[int, dict[str, float]]] = {}
    for run in runs:
        if run["contender"] == OVERLAP or run["turn"] not in bare:
            continue
        other = bare[run["turn"]]
        values = {name: value / other[name] for name, value in flat(run).items() if other.get(name)}
        found.setdefault(run["contender"], {})[run["round"]] = values
    return found


def summaries(runs: list[Run]) -> dict[str, Any]:
    """Return the cells of all modes, and the goals."""
    cells = {mode: [summary(own) for own in _by_place(runs, mode)] for mode in (TRAFFIC, HISTORIES)}
    fixed = [{"device": own[0]["device"], **cell_summary(own)} for own in _by_place(runs, FIXED)]
    return {**cells, FIXED: fixed, "goals": list(goals(cells[TRAFFIC], fixed, cells[HISTORIES]))}


def _by_place(runs: list[Run], mode: str) -> Iterator[list[Run]]:
    """Return a mode's runs, those of one cell together."""
    places: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run["mode"] == mode:
            places.setdefault((run["device"], run["kind"], run["batch"]), []).append(run)
    yield from places.values()


def summary(runs: list[Run]) -> dict[str, Any]:
    """Return the medians over rounds of one cell, with the extremes.

    by_bare: multiples of bare SGLang's figures in the same turn
    by_adaptive: other contenders' tokens/s as multiples of `adaptive`'s in the same round
    """
    found = ratios(runs)
    contenders: dict[str, Any] = {}
    for name in dict.fromkeys(run["contender"] for run in runs):
        own = [flat(run) for run in runs if run["contender"] == name]
        contenders[name] = {"measured": _spreads(own)}
        if name in found:
            contenders[name]["by_bare"] = _spreads(found[name].values())
        shared = found.get(ADAPTIVE, {}).keys() & found.get(name, {}).keys()
        if name != ADAPTIVE and shared:
            key = "tokens_per_second"
            values = [found[name][r][key] / found[ADAPTIVE][r][key] for r in sorted(shared)]
            contenders[name]["by_adaptive"] = spread(values)
    place = {name: runs[0][name] for name in ("device", "batch")}
    return {**place, "contenders": contenders}


def _spreads(rows: Iterable[dict[str, float]]) -> dict[str, dict[str, float]]:
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: spread([row[name] for row in rows if name in row]) for name in names}


# -- goals


def goals(
    traffic: list[dict[str, Any]], fixed: list[dict[str, Any]], histories: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Say of each goal of the cells that were measured whether it is met, by medians."""
    for cell in traffic:
        where = f"{cell['device']}, B = {cell['batch']}"
        for text, wanted, value in _traffic_goals(cell):
            yield goal(f"{where}: {text}", wanted, value)
    for cell in histories:
        speeds = {
            name: found["by_bare"]["tokens_per_second"]["median"]
            for name, found in cell["contenders"].items()
            if "by_bare" in found
        }
        if len(speeds) > 1:
            where = f"{cell['device']}, B = {cell['batch']}"
            apart = max(speeds.values()) / min(speeds.values()) - 1
            text = "tokens/s after different histories differ by"
            yield goal(f"{where}: {text}", ("<=", AGREE), apart)
    yield from _fixed_goals(fixed)


def _traffic_goals(cell: dict[str, Any]) -> Iterator[tuple[str, tuple[str, float], float]]:
    batch, contenders = cell["batch"], cell["contenders"]
    own = contenders.get(ADAPTIVE, {}).get("by_bare")
    if own is None:
        return
    median = {name: value["median"] for name, value in own.items()}
    for kind in KINDS:
        if (name := f"token_ms {kind}") in median:
            yield f"time per token, {kind}", ("<=", 1.02), median[name]
    yield "time per token, 95th percentile", ("<=", 1.10), median["token_ms p95"]
    if batch in EDITS and "token_ms edit" in median:
        yield "time per token of edits", ("<=", EDITS[batch]), median["token_ms edit"]
    yield "time to first token", ("<=", 1.05), median["first_token_ms median"]
    if batch in SPEEDS:
        yield "tokens/s", (">=", SPEEDS[batch]), median["tokens_per_second"]
    others = [contenders[name].get("by_adaptive") for name in SIMPLE if name in contenders]
    if medians := [other["median"] for other in others if other]:
        yield "tokens/s by the best of none and device", (">=", 0.98), 1 / max(medians)
    if again := contenders.get(AGAIN, {}).get("by_adaptive"):
        apart = max(again["median"], 1 / again["median"]) - 1
        yield "tokens/s of two starts differ by", ("<=", AGREE), apart
    if batch in CPU_BATCHES and "scheduler_share" in median:
        yield "CPU share of the scheduler", ("<=", 1.2), median["scheduler_share"]


def _fixed_goals(cells: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for device in dict.fromkeys(cell["device"] for cell in cells):
        own = [cell for cell in cells if cell["device"] == device]
        for name, least in ((ADAPTIVE, 0.98), (NONE, 0.99)):
            found = {
                f"{cell['kind']}, B = {cell['batch']}": value["median"]
                for cell in own
                if (value := cell["contenders"].get(name, {}).get("times_overlap"))
            }
            if found:
                worst = min(found, key=lambda place: found[place])
                text = f"{device}, fixed batch: {name}, slowest of {len(found)} cells ({worst})"
                yield goal(text, (">=", least), found[worst])
            for batch, edits in FIXED_EDITS.items() if name == ADAPTIVE else ():
                if value := found.get(f"edit, B = {batch}"):
                    yield goal(f"{device}, fixed batch: edit, B = {batch}", (">=", edits), value)


def goal(text: str, wanted: tuple[str, float], found: float) -> dict[str, Any]:
    """Return a goal. What counts is the figure before it is rounded."""
    sign, limit = wanted
    met = found <= limit if sign == "<=" else found >= limit
    return {"goal": text, "wanted": f"{sign} {limit}", "found": round(found, 3), "met": met}
