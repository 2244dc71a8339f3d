"""The command `outrider doctor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.doctor.finding import LEVELS, Finding, size
from outrider.doctor.heads import check_head, is_head, is_own_layer
from outrider.doctor.known_bad import Facts, check_known_bad
from outrider.doctor.loading import check_loading
from outrider.doctor.machine import Machine, check_machine, look
from outrider.doctor.memory import Budget, budget, check_memory
from outrider.doctor.model import Model, read_model
from outrider.doctor.pair import (
    Cost,
    Plan,
    check_attention,
    check_context,
    check_cost,
    check_kind,
)
from outrider.doctor.server import Served, ask, check_server
from outrider.doctor.tokens import check_tokens
from outrider.errors import Unsupported, UsageError, reading
from outrider.report import document, provenance
from outrider.report.console import Exit, Terminal, printable

__all__ = ["Report", "examine", "run", "show"]

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Report:
    """Everything that was found."""

    target: Model | None
    draft: Model | None
    plan: Plan
    machine: Machine
    served: Served | None
    findings: tuple[Finding, ...]
    budget: Budget | None
    cost: Cost | None

    def count(self, level: str) -> int:
        """Return how many findings are of a level."""
        return sum(finding.level == level for finding in self.findings)

    @property
    def verdict(self) -> str:
        """Return a sentence that says how it is."""
        bad = [f"{n} {level}{'s' * (n > 1)}" for level in LEVELS[:0:-1] if (n := self.count(level))]
        said = ", ".join(bad) or "nothing to mention"
        good = "No problem found"
        return f"{'It will not work as it is' if self.count('problem') else good}: {said}"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "good": not self.count("problem"),
            "verdict": self.verdict,
            "target": self.target.as_json() if self.target else None,
            "draft": self.draft.as_json() if self.draft else None,
            "plan": asdict(self.plan),
            "findings": [asdict(finding) for finding in self.findings],
            "cost": self.cost.as_json() if self.cost else None,
            "memory": self.budget.as_json() if self.budget else None,
            "machine": self.machine.as_json(),
            "server": self.served.as_json() if self.served else None,
            "provenance": provenance(),
        }


@reading(
    "a model's config.json or a server's answer",
    fix="download it again, or ask another server; `outrider --debug doctor ...` shows where",
)
def run(
    target: str | None,
    draft: str | None,
    url: str | None,
    plan: Plan,
    memory_gib: float | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Look, and say what was found. Ends with 1 if there is a problem."""
    console = Terminal(stderr=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it looks, it does not fetch
    with console.status("looking at models and machine"):
        report = examine(target, draft, url, plan, memory_gib)
    if as_json:
        sys.stdout.write(document(report.as_json()))
    else:
        show(report, Terminal(), verbose)
    if report.count("problem"):
        raise SystemExit(Exit.FINDING)


def examine(
    target_name: str | None,
    draft_name: str | None,
    url: str | None,
    plan: Plan,
    memory_gib: float | None = None,
) -> Report:
    """Read the files, look at the machine, ask the server, and check it all."""
    served = ask(url) if url else None
    if target_name is None and served is None:
        raise UsageError("no TARGET and no --url", fix="name a model, a server, or both")
    named = served.models[0] if served else None
    target = read_model(target_name) if target_name else _readable(named)
    draft = read_model(draft_name) if draft_name else _readable(served.draft if served else None)
    machine = look(memory_gib)
    # SGLang's rules hold where it is, or is asked
    in_sglang = "sglang" in machine.versions if served is None else served.arguments is not None
    findings = list(check_machine(machine)) if served is None else []
    found = cost = None
    if served is not None:
        plan = served.plan(plan)
        findings += check_server(served, target, draft, plan)
        findings += _unread(served, target)
    if target is not None:
        if is_head(target):
            raise UsageError(
                f"{target.name} is a head, not a model",
                fix="name the model that it drafts for, then the head: outrider doctor TARGET HEAD",
            )
        is_own = draft is not None and is_own_layer(target, draft)
        head = draft if draft is not None and (is_own or is_head(draft)) else None
        models = [target, draft] if draft and head is None else [target]
        for model in models:
            refused = [*check_kind(model)]
            if served is None and not any(one.level == "problem" for one in refused):
                refused += check_attention(model, in_sglang)
                refused += check_loading(model, in_sglang)
            findings += [*model.findings, *refused]
        findings += _dtype(models, plan, in_sglang)
        findings += check_context(target, None if head else draft, plan, in_sglang)
        if head is not None:
            findings += [*(() if is_own else head.findings), *check_head(target, head, is_own)]
        elif draft is not None:
            findings += check_tokens(target, draft)
            findings += check_cost(target, draft, plan, machine.device == "cpu")
            cost = Cost.of(target, draft, plan, plan.draft_bits)
        if served is None or memory_gib is not None:  # what runs has its memory
            found = budget(target, None if is_own else draft, plan, machine.room)
            findings += check_memory(found, plan, target, draft is not None and in_sglang)
    findings += check_known_bad(_facts(machine, served))
    return Report(target, draft, plan, machine, served, _in_order(findings), found, cost)


def _readable(path: str | None) -> Model | None:
    """Return the model that a server named, if its files can be read from here."""
    try:
        return read_model(path) if path else None
    except (Unsupported, OSError):
        return None


def _unread(served: Served, target: Model | None) -> Iterable[Finding]:
    if target is None:
        yield Finding(
            "models",
            "note",
            f"the files of {served.models[0]} are not here",
            "tokenizers, cost and memory were not looked at",
            "name the model as TARGET, where its files are",
        )


def _dtype(models: Iterable[Model], plan: Plan, in_sglang: bool) -> Iterable[Finding]:
    for model in models:
        if in_sglang and plan.dtype is None and model.dtype == "float32" and not model.quantized:
            yield Finding(
                "models",
                "note",
                f"{model.name} was saved as float32",
                "SGLang loads it as float16 (bfloat16 for Gemma) if --dtype does not say: half of "
                "what is reckoned here",
                "say --dtype here and there",
            )


def _facts(machine: Machine, served: Served | None) -> Facts:
    """Return what known faults are looked up by: the server's facts, if one was asked."""
    if served is None:
        return Facts(machine.versions, machine.device, os.environ)
    local = any(host in served.url for host in ("//localhost", "//127.0.0.1", "//[::1]"))
    device = served.device or (machine.device if local else "not known")
    if local and device == "cuda" and machine.device == "rocm":
        device = "rocm"
    # the server's environment is not ours
    return Facts(served.versions, device, os.environ if local else {}, served.arguments)


def _in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return them by area; within one, as they came."""
    areas = ["models", "tokenizer", "context", "cost", "memory", "hosts", "server", "known bad"]
    return tuple(sorted(findings, key=lambda finding: areas.index(finding.area)))


def show(report: Report, console: Console, verbose: bool = False) -> None:
    """Print what was found, by area, and the table of memory."""
    for area, group in groupby(report.findings, key=lambda finding: finding.area):
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column()
        folded = []
        for finding in group:
            if finding.level == "note" and finding.maybe and not verbose:
                folded.append(str(finding.id))
            else:
                table.add_row(Text(finding.level, STYLES[finding.level]), _said(finding))
        if folded:
            what = f"if you serve without Outrider: {', '.join(folded)} (--verbose explains)"
            table.add_row(Text("note", STYLES["note"]), Text(what))
        console.print(Text(area, "bold"))
        console.print(table)
        if area == "memory" and report.budget is not None:
            console.print(_memory(report.budget, report.plan))
        console.print()
    style = "bold red" if report.count("problem") else "bold green"
    console.print(report.verdict, style=style, highlight=False)


def _said(finding: Finding) -> Text:
    text = Text(printable(finding.what))
    if finding.why:
        text.append(f"\n{printable(finding.why)}", "dim")
    if finding.fix and finding.level != "ok":
        text.append("\n-> ", "dim").append(printable(finding.fix))
    return text


def _memory(found: Budget, plan: Plan) -> Table:
    table = Table(box=None, show_header=plan.tp > 1, pad_edge=False, padding=(0, 1))
    table.add_column(f"on each of {plan.tp} devices")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for row in found.rows:
        table.add_row(row.what, "not known" if row.bytes is None else size(row.bytes), row.how)
    least = "" if found.complete else "at least "
    table.add_row(
        "sum", f"{least}{size(found.total)}", f"of {size(found.room.total)}", style="bold"
    )
    return table
