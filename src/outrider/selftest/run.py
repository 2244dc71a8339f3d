"""The command `outrider selftest`."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from outrider.errors import Unsupported
from outrider.report.console import Exit, Stage, Terminal

if TYPE_CHECKING:
    from outrider.selftest.check import Setting
    from outrider.selftest.report import Report

__all__ = ["run"]

INTERPRET = "TRITON_INTERPRET"
NEEDED = {
    "torch": "pip install torch, the build for your GPU",
    "triton": "torch's GPU builds bring it; without a GPU, pip install 'outrider[selftest]'",
}
COLOURS = {"good": "green", "bad": "red", "other": "yellow"}


def run(device: str | None, out: Path, quick: bool, as_json: bool) -> None:
    """Check, measure, write both files. Ends with 1 if a check failed."""
    from outrider.report import document

    # progress goes to stderr: stdout is the table's, or the document's
    console = Terminal(stderr=True)
    for package, fix in NEEDED.items():
        if importlib.util.find_spec(package) is None:
            raise Unsupported(f"{package} is not installed here", fix=fix)
    setting = prepare(device, quick)
    out.mkdir(parents=True, exist_ok=True)
    report = examine(setting, console)
    text = document(report.as_json())
    (out / "selftest.json").write_text(text, encoding="utf-8")
    (out / "selftest.html").write_text(report.page(), encoding="utf-8")
    if as_json:
        sys.stdout.write(text)
    else:
        show(report, Terminal())
    console.print(f"{out / 'selftest.json'}, {out / 'selftest.html'}", highlight=False)
    if report.failures:
        raise SystemExit(Exit.FINDING)


def prepare(device: str | None, quick: bool) -> Setting:
    """Return where kernels shall run, or refuse. On CPU this turns Triton's interpreter on."""
    if device == "cpu":
        _interpret()
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        _interpret()
        torch.set_num_threads(1)  # the shapes are tiny
    elif not torch.cuda.is_available():
        raise Unsupported(
            f"torch {torch.__version__} sees no GPU here",
            fix="install torch's CUDA or ROCm build, or use --device cpu (Triton's interpreter)",
        )
    elif os.environ.get(INTERPRET) == "1":
        raise Unsupported(f"{INTERPRET}=1 would interpret the kernels", fix=f"unset {INTERPRET}")
    from outrider.kernels import arch
    from outrider.selftest.check import Setting

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return Setting(where, arch(where), quick)


def _interpret() -> None:
    if os.environ.get(INTERPRET) != "1" and "triton" in sys.modules:
        raise Unsupported(
            "Triton was imported before its interpreter was chosen",
            fix=f"set {INTERPRET}=1 in the environment",
        )
    os.environ[INTERPRET] = "1"


def examine(setting: Setting, console: Console) -> Report:
    """Run the checks and, on a GPU, the benchmark."""
    from outrider.report import provenance
    from outrider.selftest.bench import measure
    from outrider.selftest.checks import all_checks
    from outrider.selftest.environment import environment
    from outrider.selftest.report import Report
    from outrider.selftest.timing import Bench, Grid

    made_with = provenance(), environment(setting)
    checked: AbstractContextManager[object] = nullcontext()
    if setting.interpreted:
        from outrider.kernels import interpreter

        checked = interpreter.checked()
    columns = (
        Stage("{task.fields[part]:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        Stage(),
    )
    with Progress(*columns, console=console, transient=True) as progress, checked:
        checks, outcomes = all_checks(setting), []
        task = progress.add_task("", total=len(checks), part="checks")
        for check in checks:
            progress.update(task, description=check.name)
            outcomes.append(check.outcome())
            progress.advance(task)
        if setting.interpreted:
            return Report(*made_with, outcomes)
        grid = Grid.quick() if setting.quick else Grid()
        task = progress.add_task("copy", total=len(list(grid.steps())) + 1, part="benchmark")
        found = measure(
            Bench.of_gpu(setting.device),
            grid,
            lambda done: progress.update(task, advance=1, description=done),
        )
        return Report(*made_with, outcomes, found)


def show(report: Report, console: Console) -> None:
    """Print a table of kernels, the measurements of one row, and what failed."""
    from outrider.selftest.report import NO_TIMINGS, grade, spread, tally

    table = Table("kernel", "correctness", "bit for bit", box=None, pad_edge=False)
    for kernel, sections in report.by_kernel():
        table.add_row(kernel, *(Text(tally(o), COLOURS[grade(o)]) for o in sections.values()))
    console.print(table)
    if report.benchmark is None:
        console.print(NO_TIMINGS, style="dim")
    else:
        columns = ("batch", "context", "rows", "by", "µs (10-90 %)", "GB/s")
        times = Table(*columns, box=None, pad_edge=False, title="paged attention")
        for one in report.benchmark.measurements:
            if one.operation == "paged_attention":
                shape = (str(value) for value in one.shape.values())
                times.add_row(*shape, one.contender, spread(one), f"{one.rate():,.0f}")
        console.print(times)
        if report.benchmark.roofline is not None:
            console.print(f"a copy on this machine: {report.benchmark.roofline.rate():,.0f} GB/s")
        for note in report.benchmark.notes:
            console.print(note, style="dim", markup=False)
    for outcome in report.failures:
        console.print(f"failed: {outcome.name}: {outcome.detail}", style="red", markup=False)
    console.print(report.verdict, style="bold red" if report.failures else "bold green")
