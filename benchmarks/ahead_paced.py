"""Drafting ahead in a real SGLang server, with a device for the target and one for the draft model.

Part `paced` of ahead.py. Both devices are made up (docs/paced.md), the draft server and all of the
host are real. Bare SGLang, the same draft model in the step, and the draft server take turns in
every cell. Every answer is the recorded text, or no speed is said.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paced_servers import Contender, Paced, ask, run, servers
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "sglang"))
from paced import drafts as draft_server
from paced.texts import MIXED, prompts

DEVICE, TOKENS, MOST, WAIT = "h100x4-70b", 160, 8, 0.02
TEXTS = 4
"""A cell has at least so many: a small batch has more rounds."""

BARE, ORDINARY, AHEAD = "bare", "ordinary", "ahead"


def paced(
    kinds: Sequence[str], batches: Sequence[int], drafts: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Return each cell: tokens a second of bare SGLang, ordinary speculation and ahead.

    drafts: the K that ordinary speculation has, of which the best counts
    """
    cells = []
    rooms = [(b, max(len(p.ids) for p in prompts(k, b))) for k in kinds for b in batches]
    slots = max(batch * (prompt + TOKENS + 64) for batch, prompt in rooms) + 4096
    flags = [
        *("--max-running-requests", str(max(batches) + 8), "--max-total-tokens", str(slots)),
        *("--context-length", "4096", "--mem-fraction-static", "0.5", "--enable-metrics"),
    ]
    places = [(kind, batch) for kind in kinds for batch in batches]
    with (
        draft_process() as socket,
        servers(DEVICE, contenders(socket), flags) as running,
        Progress() as progress,
    ):
        task = progress.add_task("cells", total=len(places))
        for batch in batches:
            for server in running.values():
                run(server, prompts(MIXED, batch, first=900), batch, 48)
        for kind, batch in places:
            cells.append(cell(running, kind, batch, drafts, rounds))
            progress.advance(task)
    return {"device": DEVICE, "tokens": TOKENS, "wait": WAIT, "cells": cells}


def contenders(socket: Path) -> dict[str, Contender]:
    """Return the servers."""
    model = {"drafter": "model", "drafters": {"model": {"min_survival": 0.0}}, "max_drafts": MOST}
    options = {"socket": str(socket), "wait": WAIT}
    ahead = {"drafter": "ahead", "drafters": {"ahead": options}, "max_drafts": MOST}
    return {
        BARE: Contender(),
        ORDINARY: Contender(profile=model, draft_model=True),
        AHEAD: Contender(profile=ahead),
    }


@contextmanager
def draft_process() -> Iterator[Path]:
    """Start a draft server on a device of its own."""
    socket = Path(tempfile.mkdtemp(prefix="outrider-ahead-")) / "draft.sock"
    command = [sys.executable, draft_server.__file__, str(socket), DEVICE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "draft server" in process.stdout.readline()
            yield socket
        finally:
            process.terminate()


def cell(
    running: dict[str, Paced], kind: str, batch: int, drafts: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Measure one cell."""
    speeds: dict[str, list[float]] = {}
    before = foreseen(running[AHEAD])
    for round_ in range(max(rounds, TEXTS // batch)):
        asked = prompts(kind, batch, first=round_ * batch)
        wanted = [(BARE, 0), *((ORDINARY, k) for k in drafts), (AHEAD, MOST)]
        for name, count in wanted[round_ % 2 :] + wanted[: round_ % 2]:
            options = {} if name == BARE else {"outrider": {"max_drafts": count}}
            found = ask(running[name], asked, batch, TOKENS, options)
            key = f"{name} {count}" if name == ORDINARY else name
            speeds.setdefault(key, []).append(found["tokens_per_second"])
    counts = {key: value - before[key] for key, value in foreseen(running[AHEAD]).items()}
    middle = {key: sorted(values)[len(values) // 2] for key, values in speeds.items()}
    best = max(drafts, key=lambda count: middle[f"{ORDINARY} {count}"])
    ordinary = speeds[f"{ORDINARY} {best}"]
    ratios = sorted(a / b for a, b in zip(speeds[AHEAD], ordinary, strict=True))
    return {
        "kind": kind,
        "batch": batch,
        "plain": middle[BARE],
        "ordinary": middle[f"{ORDINARY} {best}"],
        "ordinary_drafts": best,
        "ahead": middle[AHEAD],
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio_to_plain": round(middle[AHEAD] / middle[BARE], 3),
        "hit_rate": round(counts["hit"] / max(1, sum(counts.values())), 3),
        "counts": counts,
    }


def foreseen(server: Paced) -> dict[str, int]:
    """Return what the server has counted of its draft server's trees."""
    server.resume()
    metrics = server.metrics()
    server.suspend()
    names = [name for name in metrics if name.startswith("outrider:foreseen_total{")]
    return {
        kind: int(sum(metrics[name] for name in names if f'found="{kind}"' in name))
        for kind in ("hit", "miss", "end", "none")
    }
