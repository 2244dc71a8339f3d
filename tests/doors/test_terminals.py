"""What tools print of models, servers and files: it steers no terminal, and is no markup."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from reports import Engine, audit, bench, walk
from rich.progress import Progress
from rich.table import Table
from strategies import STEERS, texts

from outrider.audit import run as audit_run
from outrider.bench import run as bench_run
from outrider.doctor.finding import Finding
from outrider.errors import Unsupported
from outrider.report.console import Stage, Terminal, complain, words

HOSTILE = "http://h:1/\x1b]0;PWNED\x07[link=http://evil]a[/link]\x9b31m\u202e[bold]b[/red]"
OWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What rich itself sends: colours, and the cursor of a progress bar."""


def terminal(is_terminal=True):
    return Terminal(
        file=io.StringIO(), width=120, force_terminal=is_terminal, color_system="truecolor"
    )


def said(console):
    """Return what was printed, without rich's own commands. Fails if anything else steers."""
    text = OWN.sub("", console.file.getvalue())
    text = text.replace("\r", "") if console.is_terminal else text
    assert not STEERS & set(map(ord, text)), repr(text)
    return text


@given(texts(), texts())
def test_whatever_is_printed_is_text(one, other):
    console = terminal()
    table = Table(title=one, caption=other)
    table.add_column(one)
    table.add_row(other)
    table.add_row(words(one))
    console.print(one, style="red")
    console.print(other, highlight=True, soft_wrap=True)
    console.print(table)
    console.rule(one)
    complain(console, ValueError(one))
    said(console)


@given(texts())
def test_a_name_in_a_progress_bar_is_text(name):
    """bench's had others' escape codes in it, and links."""
    console = terminal()
    with Progress(Stage(), Stage("{task.description:<26}"), console=console) as progress:
        task = progress.add_task(name, total=2)
        progress.update(task, description=name, advance=1)
        progress.console.print(name)
        progress.refresh()
    assert "\x1b]" not in console.file.getvalue()
    said(console)


def test_markup_is_shown_as_it_is():
    console = terminal(is_terminal=False)
    console.print(HOSTILE)
    shown = said(console)
    assert "[link=http://evil]a[/link]" in shown
    assert "[bold]b[/red]" in shown
    with Progress(Stage(), console=console) as progress:
        progress.add_task(HOSTILE)
        progress.refresh()
    assert said(console).count("[link=http://evil]a[/link]") >= 2


@given(texts(), texts())
def test_audit_and_bench(one, other):
    console = terminal()
    audit_run.show(audit(one, other), console)
    bench_run.show(bench(one, other), console)
    said(console)


def test_the_progress_of_bench(monkeypatch):
    console, result = terminal(), bench("a", "b")
    result.runs = []
    result.engines = [Engine("http://plain:1").facts(), Engine(f"{HOSTILE}#x={HOSTILE}").facts()]
    engines = [Engine("http://plain:1"), Engine(HOSTILE)]
    bench_run._measure(result, engines, console)
    assert result.runs
    assert "\x1b]" not in console.file.getvalue()
    said(console)


@given(texts(), texts())
def test_doctor(one, other):
    from outrider.doctor.machine import Machine
    from outrider.doctor.pair import Plan as Planned
    from outrider.doctor.run import Report, look, show

    machine = look(8.0)
    assert isinstance(machine, Machine)
    findings = (
        Finding("server", "warning", one, other, one),
        Finding("server", "note", other, id=one, maybe=True),
    )
    console = terminal()
    show(Report(None, None, Planned(), machine, None, findings, None, None), console, bool(one))
    said(console)


@given(texts(), texts())
def test_explain(one, other):
    from outrider.explain.terminal import show

    for is_terminal in (True, False):
        console = terminal(is_terminal)
        show(walk(one, other), console)
        said(console)


@given(texts())
def test_a_refusal_is_one_line_of_text(text):
    console = terminal()
    complain(console, Unsupported(text, fix=text))
    assert len(said(console).splitlines()) <= 1


@given(texts(), texts())
def test_a_profile_is_the_values_and_comments(model, traffic):
    """A line break in a model's name would be a line of YAML."""
    import yaml

    from outrider.tune.advice import Advice, about
    from outrider.tune.search import PLAIN, Search, Traffic

    search = Search(Engine("e"), Traffic(["a"], 1), [PLAIN], 1.0)
    advice = Advice(PLAIN, {"drafter": "none"}, {"drafter": "why"})
    said = advice.yaml(about({"model": model}, search, traffic, "today"))
    said = yaml.reader.Reader.NON_PRINTABLE.sub("", said)  # those that are no characters
    assert yaml.safe_load(said) == {"drafter": "none"}


def test_twin_a_console_of_rich_is_steered():
    """Else nothing here could fail."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=300, force_terminal=True, color_system="truecolor")
    console.print("[link=http://evil]a[/link]")
    assert "\x1b]" in console.file.getvalue()
    with pytest.raises(AssertionError):
        said(console)
