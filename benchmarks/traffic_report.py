"""What traffic.py prints and draws of its result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import pyplot, save_plot
from paced_sglang import ADAPTIVE, NONE, OVERLAP
from rich.console import Console
from rich.table import Table
from traffic_clients import KINDS
from traffic_figures import FIXED, HISTORIES, THROUGHPUT, TRAFFIC

COLOURS = {
    NONE: "#9a9a9a", "device 2": "#f2c078", "device 4": "#c77700", "device 8": "#7a4900",
    ADAPTIVE: "#0a6ebd", THROUGHPUT: "#7b2fa8",
}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print the tables and the goals."""
    console = Console(width=170)
    for mode in (TRAFFIC, HISTORIES):
        if result[mode]:
            console.print(_table(mode, result[mode]))
    if result[FIXED]:
        table = Table("device", "text", "B", NONE, ADAPTIVE, title="fixed batch: times bare")
        for cell in result[FIXED]:
            found = [cell["contenders"].get(name, {}) for name in (NONE, ADAPTIVE)]
            ratios = [_said(own.get("times_overlap")) for own in found]
            table.add_row(cell["device"], cell["kind"], str(cell["batch"]), *ratios)
        console.print(table)
    for mode in (TRAFFIC, HISTORIES):
        if shares := [run["cpu_share"] for run in result["runs"] if run["mode"] == mode]:
            most = max(share["others"] + share["client"] for share in shares)
            elsewhere = max(share["elsewhere"] for share in shares)
            print(f"{mode}: clients, HTTP and the detokenizer take {most:.2f} of a core at most;")
            print(f"    what is no part of the benchmark takes {elsewhere:.2f} at most")
    goals = Table("goal", "wanted", "found", "met", title="goals, by medians over rounds")
    for goal in result["goals"]:
        met = "yes" if goal["met"] else "[red]no[/red]"
        goals.add_row(goal["goal"], goal["wanted"], str(goal["found"]), met)
    console.print(goals)
    print(f"{sum(goal['met'] for goal in result['goals'])} of {len(result['goals'])} goals are met")


def _table(mode: str, cells: list[dict[str, Any]]) -> Table:
    title = f"{mode}: multiples of bare SGLang's figures in the same turn (bare: measured)"
    table = Table(
        "device", "B", "server", "tokens/s", "ms a token", "p95", *KINDS, "first token", "p95",
        "CPU", title=title,
    )  # fmt: skip
    for cell in cells:
        for row in _rows(cell):
            table.add_row(*row)
        table.add_section()
    return table


def _rows(cell: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, found in cell["contenders"].items():
        own = found["measured"] if name == OVERLAP else found.get("by_bare", {})
        yield (
            cell["device"],
            str(cell["batch"]),
            name,
            _said(own.get("tokens_per_second")),
            _said(own.get("token_ms median")),
            *(
                f"{own[key]['median']:.2f}" if key in own else ""
                for key in ("token_ms p95", *(f"token_ms {kind}" for kind in KINDS))
            ),
            _said(own.get("first_token_ms median")),
            *(
                f"{own[key]['median']:.2f}" if key in own else ""
                for key in ("first_token_ms p95", "scheduler_share")
            ),
        )


def _said(value: dict[str, float] | None) -> str:
    if value is None:
        return ""
    digits = 0 if value["median"] >= 100 else 2
    median, low, high = (f"{value[key]:,.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({low}-{high})"


def plot(result: dict[str, Any], folder: Path) -> None:
    """Draw the time per token by kind of text, beside bare SGLang's, a panel for each cell."""
    plt = pyplot()
    cells = {(cell["device"], cell["batch"]): cell["contenders"] for cell in result[TRAFFIC]}
    devices = list(dict.fromkeys(device for device, _ in cells))
    batches = sorted({batch for _, batch in cells})
    present = {name for contenders in cells.values() for name in contenders}
    names = [name for name in COLOURS if name in present]
    bars = {"all": "median", **{kind: kind for kind in KINDS}}
    figure, grid = plt.subplots(
        len(devices), len(batches), figsize=(3.4 * len(batches), 2.4 * len(devices)),
        squeeze=False, sharey=True, layout="constrained",
    )  # fmt: skip
    width = 0.8 / max(1, len(names))
    for row, device in zip(grid, devices, strict=True):
        for axes, batch in zip(row, batches, strict=True):
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_title(f"{device}, {batch} clients")
            axes.set_xticks(range(len(bars)), list(bars))
            for number, name in enumerate(names):
                own = cells.get((device, batch), {}).get(name, {}).get("by_bare", {})
                shown = [own.get(f"token_ms {key}") for key in bars.values()]
                drawn = [(i, value) for i, value in enumerate(shown) if value]
                places = [i + (number - (len(names) - 1) / 2) * width for i, _ in drawn]
                medians = [value["median"] for _, value in drawn]
                errors = [
                    [value["median"] - value["min"] for _, value in drawn],
                    [value["max"] - value["median"] for _, value in drawn],
                ]
                axes.bar(
                    places, medians, width, yerr=errors, color=COLOURS[name], label=name,
                    error_kw={"linewidth": 0.6},
                )  # fmt: skip
    figure.supylabel("time per token, times bare")
    handles = dict(zip(*reversed(grid.flat[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(names))
    save_plot(figure, "traffic", folder)
