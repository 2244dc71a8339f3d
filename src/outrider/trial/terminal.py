"""What the command says on a terminal: what it will do, how far it is, what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from outrider.report.console import Exit, Stage, complain, printable, words
from outrider.trial.ask import Ticker
from outrider.trial.parts import KERNELS, Parts
from outrider.trial.plan import SIDES, minutes, part_name
from outrider.trial.result import Trial

__all__ = ["announce", "progress", "show"]


def announce(trial: Trial, parts: Parts, console: Console) -> None:
    """Say what will be done, what is done already, what does not apply, and how long it takes."""
    device = str(trial.wanted.device)
    rows = Table(box=None, pad_edge=False, show_header=False)
    checks = "checks and timings" if device == "cuda" else "checks"
    rows.add_row("kernels", checks, _state(parts, KERNELS))
    for pair in trial.pairs:
        what = f"skipped: {pair.skip}" if pair.skip else "bare SGLang, then SGLang with Outrider"
        states = [] if pair.skip else [_state(parts, part_name(pair, side)) for side in SIDES]
        rows.add_row(pair.name, words(what), ", ".join(dict.fromkeys(filter(None, states))))
    console.print(rows)
    names = [part_name(pair, side) for pair in trial.pairs if not pair.skip for side in SIDES]
    left = [name for name in names if parts.get(name) is None]
    about = minutes(len(left), parts.get(KERNELS) is None, device, trial.wanted.quick)
    console.print(
        f"{len(left)} servers to start, one at a time; about {max(1, round(about))} minutes with a "
        "small model. After Ctrl-C the same command goes on. Parts and logs are in "
        f"{trial.wanted.out / 'parts'}.",
        highlight=False,
    )
    for finding in trial.doctor["findings"]:
        if finding["level"] == "problem":
            complain(console, f"doctor: {finding['what']}; {finding['fix']}")


def _state(parts: Parts, name: str) -> str:
    if parts.get(name) is not None:
        return "done"
    return "made with other arguments or versions: again" if parts.is_stale(name) else ""


@contextmanager
def progress(name: str, console: Console) -> Iterator[Ticker]:
    """Show how far a part is. Yields what begins a stage of it."""
    columns = (
        Stage("{task.description:<40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:

        def ticker(stage: str, total: int) -> Callable[[], None]:
            task = shown.add_task(f"{name}: {stage}", total=total)
            return lambda: shown.advance(task)

        yield ticker


def show(trial: Trial, console: Console) -> None:
    """Print the kernels' verdict, a line for each pair and concurrency, and the verdict."""
    if trial.kernels is not None:
        console.print(words(f"kernels: {trial.kernels['verdict']}"))
    for name, judged in trial.judged.items():
        console.print(printable(f"{name}: {judged.verdict}"), markup=False)
    rows = Table(box=None, pad_edge=False)
    rows.add_column("servers", no_wrap=True, min_width=14)
    for head in ("at once", "bare, tokens/s", "ours", "times bare", "host, ms a step", "device"):
        rows.add_column(head)
    keys = ("bare_tokens_per_second", "ours_tokens_per_second", "times_bare",
            "host_ms_per_step", "device_ms_per_step")  # fmt: skip
    for one in trial.speeds():
        numbers = ("" if one[key] is None else f"{one[key]:.2f}" for key in keys)
        rows.add_row(one["pair"], str(one["concurrency"]), *numbers)
    if rows.row_count:
        console.print(rows)
    style = {Exit.GOOD: "bold green", Exit.FINDING: "bold red"}.get(trial.exit_code, "bold yellow")
    console.print(printable(trial.headline), style=style, markup=False)
