"""The command `outrider bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Column, Table

from outrider.errors import Unsupported, UsageError
from outrider.report.console import Exit, Stage, Terminal, words

if TYPE_CHECKING:
    from outrider.bench.result import Result
    from outrider.clients import Engine

__all__ = ["run", "run_compare"]

LOADS = (1, 4)
"""Requests at once, if nobody says."""


def run(
    specs: Sequence[str], workloads: Sequence[str], out: Path, as_json: bool, **plan: Any
) -> None:
    """Measure, write both files. Ends with 1 if answers differ."""
    console = Terminal(stderr=True)
    with console.status("opening the engines"):
        result, engines = prepare(specs, workloads, **plan)
        out.mkdir(parents=True, exist_ok=True)
    failed = None
    try:
        _measure(result, engines, console)
    except KeyboardInterrupt:
        result.interrupted = True
    except Unsupported as error:
        failed = error
        result.interrupted = True
    finally:
        for engine in engines:
            engine.close()
    from outrider.bench.page import page
    from outrider.report import document

    text = document(result.as_json())
    (out / "bench.json").write_text(text, encoding="utf-8")
    (out / "bench.html").write_text(page(result), encoding="utf-8")
    if as_json:
        sys.stdout.write(text)
    else:
        show(result, Terminal())
    console.print(f"{out / 'bench.json'}, {out / 'bench.html'}", highlight=False)
    if failed is not None:
        raise failed
    if result.interrupted:
        console.print("interrupted: the report has what was measured until then", style="yellow")
        raise SystemExit(Exit.INTERRUPTED)
    if result.broken:
        raise SystemExit(Exit.FINDING)


def prepare(
    specs: Sequence[str], workloads: Sequence[str], **settings: Any
) -> tuple[Result, list[Engine]]:
    """Open the engines, read the texts. One engine alone is compared with itself without drafts."""
    from outrider.bench.measure import Plan, workload
    from outrider.bench.result import Result
    from outrider.clients import both_modes, open_engine
    from outrider.report import provenance

    most = max([*(settings["concurrency"] or LOADS), *(8 for _ in settings["rates"])])
    needed = most * max(1, settings["requests"])
    texts: dict[str, Sequence[str]] = {name: workload(name, needed) for name in workloads}
    if len(specs) == 1:
        specs = both_modes(specs[0])
    engines = [open_engine(spec) for spec in specs]
    facts = [engine.facts() for engine in engines]
    settings["concurrency"] = _loads(facts, settings["concurrency"])
    if settings["rates"] and any(spec.startswith("transformers:") for spec in specs):
        raise UsageError("--rate with a model in this process", fix="serve it, or leave it out")
    plan = Plan(texts, **settings)
    return Result(provenance(), facts, plan), engines


def _loads(facts: Sequence[dict[str, Any]], wanted: Sequence[int] | None) -> Sequence[int]:
    """Return how many requests are open at once. Refuses what cannot be compared."""
    models = {str(one["model"]).rstrip("/").rpartition("/")[2] for one in facts}
    if len(models) > 1:
        raise UsageError(
            f"engines with different models: {', '.join(sorted(models))}",
            fix="compare engines that serve the same one",
        )
    alone = [one["engine"] for one in facts if one.get("mode") in ("plain", "assisted", "lookup")]
    if wanted is None:
        return LOADS[:1] if alone else LOADS
    if alone and max(wanted, default=1) > 1:
        raise UsageError(
            f"concurrency above 1 with {alone[0]}: it answers one request at a time",
            fix="use --concurrency 1",
        )
    return wanted


def _measure(result: Result, engines: Sequence[Engine], console: Console) -> None:
    from outrider.bench.measure import Cell, Run, measure
    from outrider.bench.result import names

    called = names(result.engines)
    total = len(result.plan.cells) * len(engines) * (result.plan.rounds + 1)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        Stage(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def begun(cell: Cell, engine: int, round_: int) -> None:
            when = "warm-up and parity" if round_ < 0 else f"round {round_ + 1}"
            progress.update(task, description=f"{cell}: {called[engine]}, {when}", advance=1)

        for found in measure(engines, result.plan, begun):
            if isinstance(found, Run):
                result.runs.append(found)
            else:
                cell, engine, parity = found
                result.parities[cell, engine] = parity


def show(result: Result, console: Console) -> None:
    """Print a line for each cell and engine."""
    from outrider.bench.page import headline
    from outrider.bench.result import names

    called = names(result.engines)
    table = Table(box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column("engine", overflow="fold", min_width=16)
    for head in ("tokens/s", "times plain", "per step"):
        table.add_column(head, no_wrap=True)
    table.add_column("answers", min_width=9)
    for cell in result.cells:
        for e, name in enumerate(called):
            one = result.summary(cell, e)
            speed, ratio = one.get("tokens_per_second"), one.get("times_plain")
            counts = one.get("counts") or {}
            steps = counts.get("request_steps")
            table.add_row(
                words(cell if e == 0 else ""),
                words(name.replace(",", ", ")),
                f"{speed['median']:.2f}" if speed else "",
                "{median:.2f} ({min:.2f}-{max:.2f})".format(**ratio) if ratio else "",
                f"{counts['emitted'] / steps:.2f}" if steps else "",
                words(": ".join(said for said in (_parity(one), one.get("refused")) if said)),
                style="red" if one.get("refused") else None,
            )
    console.print(table)
    verdict, state = headline(result)
    console.print(
        verdict, style={"good": "bold green", "bad": "bold red"}.get(state, "bold yellow")
    )


def _parity(one: dict[str, Any]) -> str:
    return str(one["parity"]["said"]) if one["parity"] else ""


def run_compare(old: Path, new: Path, as_json: bool) -> None:
    """Print how the speed-ups of two results compare, cell by cell."""
    from outrider.bench.result import compared, load_result

    found = compared(load_result(old), load_result(new))
    if not found:
        raise UsageError(f"{old} and {new} have no cell in common", fix="measure the same")
    if as_json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    names = [Column(words(file.name)) for file in (old, new)]
    table = Table("", "engine", *names, "new / old", "", box=None, pad_edge=False)
    for one in found:
        spreads = [
            f"{v['median']:.2f} ({v['min']:.2f}-{v['max']:.2f})" for v in (one["old"], one["new"])
        ]
        clear = "clear" if one["clear"] else "within the spread"
        cells = words(one["cell"]), words(one["engine"])
        table.add_row(*cells, *spreads, f"{one['ratio']:.2f}", clear)
    Terminal().print(table)
