"""The trial as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from outrider.bench.page import time_bars
from outrider.report import Page, table
from outrider.report.console import Exit
from outrider.report.page import State
from outrider.trial.result import Judged, Trial

__all__ = ["page"]

Row = list[object]
States = dict[tuple[int, int], State]

STATES: dict[Exit, State] = {Exit.GOOD: "good", Exit.FINDING: "bad", Exit.COULD_NOT_RUN: "bad"}
LEVELS: dict[str, State] = {"problem": "bad", "warning": "other", "ok": "good"}
STYLE = (
    ".scroll.wrap td { white-space: normal; } .scroll.wrap td:first-child { white-space: nowrap; }"
)


def page(trial: Trial) -> str:
    """Return the whole page."""
    machine = trial.doctor.get("machine") or {}
    where = machine.get("gpu") or machine.get("device") or "unknown device"
    models = " with ".join(filter(None, (trial.wanted.target, trial.wanted.draft)))
    subtitle = f"{models} on {where}, {trial.provenance['date']}"
    state = STATES.get(trial.exit_code, "other")
    made = Page("Outrider selftest --server", trial.headline, state, subtitle, STYLE)
    made.add(
        "<p class='note'>Please attach <b>server.json</b>, which is beside this page, to an issue "
        "of the kind <i>Report from a GPU</i>. Good and bad results both help.</p>"
    )
    if trial.failures:
        made.section("What could not run", *_failures(trial))
    made.section("Kernels", *_kernels(trial.kernels))
    made.section("Are the answers those of bare SGLang?", *_answers(trial))
    made.section("Speed", *_speed(trial))
    made.section("Where the time of a step goes", *_time(trial))
    skipped = [[pair.name, pair.skip] for pair in trial.pairs if pair.skip]
    if skipped:
        made.section("Skipped", _wrapped(table(["servers", "why"], skipped)))
    made.section("What outrider doctor says", _doctor(trial.doctor))
    made.made_with(
        {**trial.provenance, "options_of_the_servers": " ".join(trial.wanted.arguments["flags"])}
    )
    return made.html()


def _failures(trial: Trial) -> Iterator[str]:
    for name, why in trial.failures.items():
        yield f"<h3>{escape(name)}</h3><pre>{escape(why)}</pre>"


def _kernels(kernels: Mapping[str, Any] | None) -> Iterator[str]:
    if kernels is None:
        yield "<p>Not checked.</p>"
        return
    yield f"<p>{escape(kernels['verdict'])}, {escape(str(kernels['environment']['device']))}.</p>"
    wrong = [one for one in kernels["checks"] if one["promised"] and not one["passed"]]
    if wrong:
        yield "<ul class='failures'>"
        yield from (
            f"<li><b>{escape(one['name'])}</b><br>{escape(one['detail'])}</li>" for one in wrong
        )
        yield "</ul>"
    rows, states = list[Row](), States()
    for kernel in dict.fromkeys(one["name"].split(":")[0] for one in kernels["checks"]):
        own = [one for one in kernels["checks"] if one["name"].split(":")[0] == kernel]
        passed = sum(one["passed"] for one in own)
        states[len(rows), 1] = _grade(own)
        rows.append([kernel, f"{passed} of {len(own)}"])
    yield table(["kernel", "checks passed"], rows, states)
    if kernels["measurements"]:
        yield "<p>Their timings: <code>parts/kernels/selftest.html</code>, and in the JSON.</p>"


def _grade(checks: list[dict[str, Any]]) -> State:
    if any(one["promised"] and not one["passed"] for one in checks):
        return "bad"
    return "good" if all(one["passed"] for one in checks) else "other"


def _answers(trial: Trial) -> Iterator[str]:
    if not trial.judged:
        yield "<p>No two servers were compared.</p>"
        return
    rows, states = list[Row](), States()
    for name, judged in trial.judged.items():
        states[len(rows), 5] = STATES.get(judged.exit_code, "other")
        rows.append(
            [
                name,
                len(judged.all),
                judged.all.identical,
                f"{judged.all.agreed:,} of {judged.all.tokens:,}",
                f"{judged.control.identical} of {len(judged.control)}",
                judged.verdict,
            ]
        )
    heads = ["servers", "requests", "identical", "tokens agreed", "bare, asked twice", "verdict"]
    yield _wrapped(table(heads, rows, states))
    yield (
        "<p>Both servers of a pair have the same options and get the same requests, 1 to 16 at "
        "once. The deterministic pair is asked greedily, with and without logprobs, and sampled "
        "with seeds: every token must be the same. The others are asked greedily, and a numerical "
        "tie is allowed.</p>"
    )
    for name, judged in trial.judged.items():
        yield from _differences(name, judged)


def _differences(name: str, judged: Judged) -> Iterator[str]:
    verdicts = judged.all.verdicts(judged.greedy.tolerance.value)
    rows = []
    for n, one in judged.all.comparisons.items():
        if one.identical:
            continue
        found = one.divergence
        where = found.position if found else None
        sides = (found.plain, found.speculative) if found else (None, None)
        tokens = [repr(token.text) if token else "" for token in sides]
        margin = "" if found is None or found.margin is None else f"{found.margin:.3g}"
        said = verdicts[n] if found else "; ".join(one.faults)
        after = "" if where is None else f"after {where} tokens"
        rows.append([n + 1, judged.greedy.prompts[n][:60], after, *tokens, margin, said])
    if rows:
        heads = ["request", "prompt", "differs", "bare", "Outrider", "margin", ""]
        yield f"<h3>Differences, {escape(name)}</h3>" + _wrapped(table(heads, rows[:50]))
        yield f"<p>{len(rows) - 50} more.</p>" if len(rows) > 50 else ""


def _speed(trial: Trial) -> Iterator[str]:
    rows, states = list[Row](), States()
    for one in trial.speeds():
        ratio = one["times_bare"]
        if ratio is not None:
            states[len(rows), 4] = "good" if ratio >= 1 else "other"
        keys = ("bare_tokens_per_second", "ours_tokens_per_second", "times_bare",
                "tokens_per_step", "host_ms_per_step", "device_ms_per_step")  # fmt: skip
        rows.append([one["pair"], one["concurrency"], *(_number(one[key]) for key in keys)])
    if not rows:
        yield "<p>Nothing was measured.</p>"
        return
    heads = ["servers", "at once", "bare, tokens/s", "Outrider, tokens/s", "times bare",
             "tokens per step", "host, ms a step", "device, ms a step"]  # fmt: skip
    yield table(heads, rows, states)
    yield (
        "<p>Medians. A GPU has room for one server, so the two of a pair ran one after the other: "
        "a ratio has the drift of the machine in it. <code>outrider bench</code> measures two "
        "servers in turn. Host and device are from the server's counter "
        "<code>outrider:step_seconds_total</code>: the passes and the sampler, which wait for the "
        "device, and all else. With overlap the two run at the same time.</p>"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def _time(trial: Trial) -> Iterator[str]:
    found = [
        (f"{name}, {cell['concurrency']} at once", cell["counts"]["seconds"])
        for (name, _), one in trial.servers.items()
        for cell in one["speed"]
        if cell.get("counts") and sum(cell["counts"]["seconds"].values())
    ]
    yield from time_bars(found) if found else ["<p>No server told.</p>"]


def _doctor(doctor: Mapping[str, Any]) -> str:
    findings = doctor.get("findings") or []
    rows = [[one["level"], one["area"], one["what"], one["why"]] for one in findings]
    states = {(n, 0): LEVELS[row[0]] for n, row in enumerate(rows) if row[0] in LEVELS}
    return _wrapped(table(["", "area", "what", "why"], rows, states))


def _wrapped(html: str) -> str:
    """Return a table whose cells hold sentences: they may break."""
    return html.replace("class='scroll stack'", "class='scroll stack wrap'", 1)
