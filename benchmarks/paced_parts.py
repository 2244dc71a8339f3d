"""What a GPU would do between passes, by part: what it takes here, and what it is priced at.

    python benchmarks/paced_parts.py             # in an environment with SGLang; 8 minutes
    python benchmarks/paced_parts.py --report    # the table again

Servers of paced_sglang.py decode the same texts. Twice for each batch, with fewer and with more
tokens: the difference is that of decode steps, without prompts. The same servers with
`price_device_work` off show what a step takes if all of this is the CPU's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from common import write
from paced_sglang import CONTENDERS, size_flags
from rich.console import Console
from rich.table import Table

from outrider.report import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "sglang"))
from paced.texts import MIXED, prompts

from outrider.engines.costs import PROFILES

RESULT = Path(__file__).parent / "results" / "paced_device_work.json"
SHOWN = {
    "bare": CONTENDERS["bare"],
    "none": CONTENDERS["none"],
    "device 4": CONTENDERS["device 4"],
    "device 8": {"profile": {"drafter": "device", "max_drafts": 8}},
}
BATCHES = (1, 16, 64, 256)
FEW, MANY = 24, 120
"""Tokens of each answer in the two runs."""

PLACES = {
    "a pass": ("decode", "draft_decode", "head_decode", "prefill", "draft_prefill"),
    "sampling": ("sampler",),
    "looking drafts up": ("look_up", "unread_rows"),
    "rows of drafts": ("draft_rows",),
    "acceptance": ("accept",),
    "slots": ("allocation", "memory_pool", "token", "base", "base_prefix_cache", "slots", "free"),
    "copies to the device": ("to_device",),
}
"""Parts by the functions and files that ask for the work. All others are OTHER."""

PRICED, AS_IS = "priced", "as is"
OTHER = "batch: last tokens, lengths, positions"
FIGURES = ("launches", "real_us", "launching_us", "device_us")


def main() -> None:
    """Measure and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="h100-8b", choices=list(PROFILES))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=RESULT, help="result file")
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.report else measure(args)
    write("paced_device_work", result, args.out)
    show(result["cells"])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the cells, and what made them."""
    from paced.prices import prices_of
    from paced_servers import Contender, servers

    result: dict[str, Any] = {
        "provenance": provenance(),
        "device": args.device,
        "prices": vars(prices_of(args.device)),
        "cells": [],
    }
    flags = size_flags([(MIXED, batch) for batch in args.batches], lambda _: MANY)
    for name, fields in SHOWN.items():
        pair = {
            f"{name} {how}": Contender(**fields, price_device_work=how == PRICED)
            for how in (PRICED, AS_IS)
        }
        with servers(args.device, pair, flags) as running:
            for batch in args.batches:
                found = measure_cell(*running.values(), batch)
                result["cells"].append({"contender": name, "batch": batch, **found})
                print(json.dumps({"contender": name, "batch": batch, **found}))
                sys.stdout.flush()
    return result


def measure_cell(priced: Any, as_is: Any, batch: int) -> dict[str, Any]:
    """Return the figures of a step of one contender at one batch."""
    from paced.log import steady
    from paced_servers import run

    for server in (priced, as_is):  # control has met traffic before
        run(server, prompts(MIXED, batch, first=900), batch, 64)
    few_steps, few, _ = run_parts(priced, batch, FEW)
    steps, many, passes = run_parts(priced, batch, MANY)
    step = steady(passes, batch)
    other = steady(run(as_is, prompts(MIXED, batch), batch, MANY)[0], batch)
    parts: dict[str, dict[str, float]] = {}
    whole = dict.fromkeys(FIGURES, 0.0)
    for name, own in many.items():
        place = next((place for place, names in PLACES.items() if name in names), OTHER)
        for figure, value in own.items():
            each = (value - few.get(name, {}).get(figure, 0.0)) / (steps - few_steps)
            into = parts.setdefault(place, dict.fromkeys(FIGURES, 0.0))
            into[figure] += each
            whole[figure] += each
    return {
        "step_ms": round(1000 * step.seconds / step.steps, 3),
        "step_ms_as_cpu_work": round(1000 * other.seconds / other.steps, 3),
        "pass_ms": round(1000 * step.device_seconds / step.steps, 3),
        "tokens_per_step": round(step.tokens / step.steps / batch, 3),
        "all": _rounded(whole),
        "parts": {name: _rounded(parts[name]) for name in (*PLACES, OTHER) if name in parts},
    }


def run_parts(
    server: Any, batch: int, tokens: int
) -> tuple[int, dict[str, dict[str, float]], list[Any]]:
    """Return the decode steps of a run, its work by name, and its passes."""
    from paced.device import parts_file
    from paced_servers import run

    file = parts_file(server.passes)
    before = json.loads(file.read_text())
    passes, _ = run(server, prompts(MIXED, batch), batch, tokens)
    names = {"real": "real_us", "launching": "launching_us", "device": "device_us"}
    found = {}
    for name, own in json.loads(file.read_text()).items():
        was = before.get(name, dict.fromkeys(own, 0))
        work = {key: own[key] - was[key] for key in own}
        found[name] = {"launches": float(work["launches"])} | {
            label: 1e6 * work[key] for key, label in names.items()
        }
    return sum(made.kind == "decode" for made in passes), found, passes


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in figures.items()}


def show(cells: list[dict[str, Any]]) -> None:
    """Print a line for each cell, and one for each of its parts."""
    table = Table("contender", "B", "part", *FIGURES)
    for cell in cells:
        for part, own in {"all": cell["all"], **cell["parts"]}.items():
            table.add_row(
                cell["contender"], str(cell["batch"]), part, *(f"{own[f]:.1f}" for f in FIGURES)
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
