"""The benchmark as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from outrider.bench.measure import Cell
from outrider.bench.result import Result, names
from outrider.report import Page, table
from outrider.report.page import State
from outrider.report.plots import TEXT, colour, name_ticks, new_figure, svg

__all__ = ["page", "time_bars"]

SERIES = ("--ours", "--host", "--good", "--other", "--bad", "--torch")
MARKERS = "os^Dv*"
PARTS = {
    "forward": "--ours",
    "draft_forward": "--host",
    "draft": "--other",
    "verify": "--good",
    "host": "--torch",
    "scheduler": "--bad",
    "step": "--ours",
}
SAID = {
    "forward": "target's passes",
    "draft_forward": "draft model's passes",
    "draft": "drafting",
    "verify": "sampling and verifying",
    "host": "host",
    "scheduler": "scheduler",
    "step": "all of the step",
}
LAST_ONES = (
    "<p>The equation is for a request in a step. What is measured is the time until the last "
    "request ends: drafts bring some to their end sooner than others, and the last ones have the "
    "batch to themselves. With more prompts for each request at once (--requests) it stays full "
    "longer.</p>"
)


def page(result: Result) -> str:
    """Return the whole page."""
    verdict, state = headline(result)
    made = Page("Outrider bench", verdict, state, f"{_subtitle(result)}, {_date(result)}")
    if result.interrupted:
        made.add("<p class='note'>Interrupted: what was measured until then.</p>")
    made.section("Speed-up against plain", *_speed(result))
    made.section("Why: tokens per step and the time of a step", *_equation(result))
    made.section("Acceptance by position", *_acceptance(result))
    made.section("Where the time goes", *_time(result))
    made.section("Latency", _latency(result))
    made.section("Engines", *_engines(result))
    made.made_with(result.provenance)
    return made.html()


def headline(result: Result) -> tuple[str, State]:
    """Return the result in one sentence, and its colour."""
    if result.broken:
        count = len(result.broken)
        return f"Answers differ in {count} cell{'s' * (count > 1)}: no speed is told there", "bad"
    medians = [
        cell["times_plain"]["median"]
        for cell in result.as_json()["cells"]
        if cell.get("times_plain")
    ]
    if not medians:
        return "Nothing was measured", "other"
    low, high = min(medians), max(medians)
    state: State = "good" if low >= 0.97 else "other"
    if len(medians) == 1:
        return f"{low:.2f} times plain", state
    return f"{low:.2f} to {high:.2f} times plain, in {len(medians)} cells", state


def _subtitle(result: Result) -> str:
    model = str(result.engines[0].get("model")).rstrip("/").rpartition("/")[2]
    return f"{model}: plain against {' and '.join(names(result.engines)[1:])}"


def _date(result: Result) -> str:
    return str(result.provenance["date"])


def _engines(result: Result) -> Iterator[str]:
    yield "<dl>"
    for name, engine in zip(names(result.engines), result.engines, strict=True):
        said = "<br>".join(escape(f"{key.replace('_', ' ')}: {engine[key]}") for key in engine)
        yield f"<div><dt>{escape(name)}</dt><dd>{said}</dd></div>"
    yield "</dl>"


def _speed(result: Result) -> Iterator[str]:
    called = names(result.engines)
    yield from _plots(lambda: list(_speed_panels(result)), legend=_legend(result))
    rows: list[list[str]] = []
    states: dict[tuple[int, int], State] = {}
    for cell in result.cells:
        plain = result.summary(cell, 0)
        for e in range(1, len(called)):
            one = result.summary(cell, e)
            said = _said(one.get("times_plain"))
            row = [str(cell), _said(plain.get("tokens_per_second")), called[e]]
            row += [_said(one.get("tokens_per_second")), said or one.get("refused", "not measured")]
            row += [one["parity"]["said"] if one["parity"] else ""]
            if one.get("refused"):
                states[len(rows), 4] = states[len(rows), 5] = "bad"
            elif one.get("times_plain"):
                states[len(rows), 4] = "good" if one["times_plain"]["median"] >= 1 else "other"
            rows.append(row)
    heads = ["", "plain, tokens/s", "engine", "tokens/s", "times plain", "answers"]
    yield table(heads, rows, states)
    yield (
        "<p>Median over rounds (smallest\N{EN DASH}largest). Engines take turns within a round; "
        "a ratio is of one round, in which both did the same work. "
        "Where answers differ by more than a tie, no speed is told.</p>"
    )


def _speed_panels(result: Result) -> Iterator[str]:
    called = names(result.engines)
    for workload in dict.fromkeys(cell.workload for cell in result.cells):
        cells = [c for c in result.cells if c.workload == workload and not c.rate]
        if not cells:
            continue
        figure, axes = new_figure()
        for e in range(1, len(called)):
            found = [(c.concurrency, s) for c in cells if (s := _ratios(result, c, e))]
            middle = [s["median"] for _, s in found]
            ends = [[s["median"] - s["min"] for _, s in found],
                    [s["max"] - s["median"] for _, s in found]]  # fmt: skip
            if found:
                axes.errorbar(
                    [n for n, _ in found], middle, yerr=ends, capsize=3, linewidth=1.6,
                    color=colour(SERIES[(e - 1) % 6]), marker=MARKERS[(e - 1) % 6], markersize=5,
                )  # fmt: skip
        axes.axhline(1, color=TEXT, linestyle=(0, (6, 3)), linewidth=1)
        axes.set_ylim(0, None)
        axes.set_xscale("log", base=2)
        name_ticks(axes, sorted({c.concurrency for c in cells}), "requests at once")
        axes.set_ylabel("times plain")
        yield svg(figure, axes, _title(workload), f"speed-{workload}")


def _ratios(result: Result, cell: Cell, engine: int) -> dict[str, float] | None:
    found: dict[str, float] | None = result.summary(cell, engine).get("times_plain")
    return found


def _equation(result: Result) -> Iterator[str]:
    called, rows = names(result.engines), []
    for cell in result.cells:
        for e in range(1, len(called)):
            found, measured = result.equation(cell, e), _ratios(result, cell, e)
            if found and measured:
                ratio = found["step_seconds"] / found["decode_seconds"]
                rows.append(
                    [
                        f"{cell}; {called[e]}",
                        f"{found['tokens_per_step']:.2f}",
                        f"{1000 * found['step_seconds']:.1f} ms",
                        f"{1000 * found['decode_seconds']:.1f} ms",
                        f"{found['tokens_per_step']:.2f} / {ratio:.2f} = {found['speed_up']:.2f}",
                        f"{measured['median']:.2f}",
                    ]
                )
    if not rows:
        yield "<p>None of the engines tells what its steps did.</p>"
        return
    yield (
        "<p class='note'><b>speed-up = tokens per step / (step time / decode time)</b><br>"
        "A step of speculation may take longer than one of plain decoding, as long as it brings "
        "more tokens.</p>"
    )
    heads = ["", "tokens per step", "step", "plain step", "the equation", "measured"]
    yield table(heads, rows)
    yield LAST_ONES


def _acceptance(result: Result) -> Iterator[str]:
    found = list(_with_counts(result, "accepted_at"))
    if not found:
        yield "<p>None of the engines tells.</p>"
        return
    yield from _plots(lambda: list(_acceptance_panels(result)), legend=_legend(result))
    yield (
        "<p>Of the drafts proposed at each place in the block, how many were accepted. Where an "
        "engine does not tell how many were proposed, of the steps.</p>"
    )


def _acceptance_panels(result: Result) -> Iterator[str]:
    for workload in dict.fromkeys(cell.workload for cell in result.cells):
        figure, axes = new_figure()
        longest = 1
        for e in range(1, len(result.engines)):
            accepted: dict[int, float] = {}
            proposed: dict[int, float] = {}
            for cell, engine, counts in _with_counts(result, "accepted_at"):
                if engine == e and cell.workload == workload:
                    _add(accepted, counts["accepted_at"])
                    whole = dict.fromkeys(counts["accepted_at"], counts["request_steps"])
                    _add(proposed, counts["proposed_at"] or whole)
            places = sorted(place for place in proposed if proposed[place] > 0)
            longest = max(longest, *places) if places else longest
            rates = [accepted.get(place, 0) / proposed[place] for place in places]
            axes.plot(
                places, rates, color=colour(SERIES[(e - 1) % 6]), marker=MARKERS[(e - 1) % 6],
                markersize=5, linewidth=1.6,
            )  # fmt: skip
        axes.set_ylim(0, 1.05)
        name_ticks(axes, range(1, longest + 1), "place in the block")
        axes.set_ylabel("accepted")
        yield svg(figure, axes, _title(workload), f"accepted-{workload}")


def _with_counts(result: Result, key: str) -> Iterator[tuple[Cell, int, dict[str, Any]]]:
    """Yield what engines other than plain count, where they do."""
    for cell in result.cells:
        for e in range(1, len(result.engines)):
            counts = result.summary(cell, e).get("counts")
            if counts and counts[key]:
                yield cell, e, counts


def _add(to: dict[int, float], more: dict[str, float]) -> None:
    for place, value in more.items():
        to[int(place)] = to.get(int(place), 0) + value


def _time(result: Result) -> Iterator[str]:
    called = names(result.engines)
    found = [
        (f"{cell}; {called[e]}", counts["seconds"])
        for cell, e, counts in _with_counts(result, "seconds")
    ]
    yield from time_bars(found) if found else ["<p>None of the engines tells.</p>"]


def time_bars(found: Sequence[tuple[str, dict[str, float]]]) -> Iterator[str]:
    """Yield a bar for each name: its seconds by part of a step."""
    parts = [p for p in PARTS if any(seconds.get(p) for _, seconds in found)]
    yield "<p class='legend'>"
    for part in parts:
        yield f"<span style='--mark: var({PARTS[part]})'>{escape(SAID[part])}</span>"
    yield "</p>"
    for name, seconds in found:
        total = sum(seconds.values()) or 1.0
        yield f"<p class='bar-name'>{escape(name)}</p>"
        yield "<p class='bar'>"
        for part in parts:
            share = seconds.get(part, 0) / total
            yield (
                f"<span style='--share: {share:.4f}; --mark: var({PARTS[part]})' "
                f"title='{escape(SAID[part])}: {share:.1%}'>{f'{share:.0%}' * (share >= 0.06)}"
                "</span>"
            )
        yield "</p>"


def _latency(result: Result) -> str:
    called, rows = names(result.engines), []
    for cell in result.cells:
        for e, name in enumerate(called):
            one = result.summary(cell, e)
            first, each = one.get("first_token_seconds"), one.get("seconds_per_token")
            if first and each:
                cells = [first["p50"], first["p99"], each["p50"], each["p99"]]
                rows.append([str(cell), name, *(_ms(value) for value in cells)])
    heads = ["", "engine", "first token, median", "99th", "each further token, median", "99th"]
    return table(heads, rows)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.0f} ms"


def _said(value: dict[str, float] | None) -> str:
    if value is None:
        return ""
    return f"{value['median']:.2f} ({value['min']:.2f}\N{EN DASH}{value['max']:.2f})"


def _legend(result: Result) -> str:
    spans = [
        f"<span style='--mark: var({SERIES[(e - 1) % 6]})'>{escape(name)}</span>"
        for e, name in enumerate(names(result.engines))
        if e
    ]
    return f"<p class='legend'>{''.join(spans)}</p>"


def _title(workload: str) -> str:
    return workload.replace("\\", "/").rpartition("/")[2]


def _plots(make: Callable[[], Sequence[str]], legend: str) -> Iterator[str]:
    try:
        panels = make()
    except ImportError as error:
        yield f"<p>No plots: {escape(str(error))}; pip install 'outrider[tools]'.</p>"
        return
    if panels:
        yield f"{legend}<figure><div class='panels'>{''.join(panels)}</div></figure>"
