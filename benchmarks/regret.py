"""What control reaches on recorded answers, beside fixed choices and an oracle.

    python benchmarks/regret.py

The oracle knows what will be accepted: it drafts exactly that, and asks the draft model only where
its passes pay. Texts, drafts and times are recorded ones (record_traces.py): nothing here depends
on how fast this machine is. Requests come one after the other, B at a time; the first ones warm up.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from common import write
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "control"))
import replay


def main() -> None:
    """Replay every cell and write benchmarks/results/regret.json."""
    kinds = (*dict.fromkeys(trace["kind"] for trace in replay.recorded()["traces"]), "mixed")
    table = Table("text", "B", "best fixed", "x plain", "adaptive", "oracle", "regret")
    cells: list[dict[str, Any]] = []
    for kind, batch in track([(k, b) for k in kinds for b in (1, 2, 4, 8, 16)], "replaying"):
        speeds = replay.speeds(kind, batch)
        best = max(replay.FIXED, key=lambda name: speeds[name])
        times = {name: round(speed / speeds["plain"], 3) for name, speed in speeds.items()}
        share = speeds["adaptive"] / speeds["oracle"]
        cells.append(
            {"kind": kind, "batch": batch, "times_plain": times, "best_fixed": best}
            | {"of_best_fixed": round(speeds["adaptive"] / speeds[best], 3)}
            | {"of_oracle": round(share, 3)}
        )
        shown = [f"{times[name]:.2f}" for name in (best, "adaptive", "oracle")]
        table.add_row(kind, str(batch), best, *shown, f"{share:.2f}")
    Console().print(table)
    shares = [cell["of_oracle"] for cell in cells]
    mean = math.prod(shares) ** (1 / len(shares))
    fixed = min(cell["of_best_fixed"] for cell in cells)
    summary = {"of_oracle": {"mean": round(mean, 3), "lowest": min(shares)}}
    print(summary, "lowest share of the best fixed choice:", fixed)
    write("regret", {**summary, "lowest_of_best_fixed": fixed, "cells": cells})


if __name__ == "__main__":
    main()
