"""Give hostile input to every door: is it taken or refused in one line, and in time?

    python benchmarks/fuzz.py [--inputs 1000] [--seed 0] [--door custom_params ...] [--only N]

Each input is made from (seed, door, number), so that one that breaks a door can be tried again:
`--door NAME --only NUMBER` shows its traceback. A door breaks if it raises anything but its
declared error, if that has several lines, if it takes longer than LIMIT, or if what it prints or
writes steers a terminal or a page. The door `http` is a real SGLang server
(`scripts/setup-sglang-cpu`): between hostile requests it must go on to answer as before.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuzz_doors import DOORS, Door
from hostile import Hostile
from rich.progress import Progress

LIMIT = 10.0
"""Seconds that one input may take."""

SHARES = {
    "custom_params": 60, "profile": 5, "prompts": 5, "bench_results": 2, "trial_parts": 5,
    "engine": 0.5, "drafts": 0.3, "http": 0.3,
}  # fmt: skip
"""How many times --inputs a door gets, by what one input takes."""


class Hang(BaseException):
    """An input took too long; no door may catch this."""


def attempt(door: Door, rng: Hostile, folder: Path) -> str | None:
    """Return what broke, or None."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    started = time.perf_counter()
    try:
        door(rng, folder)
    except Hang:
        return "hang"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    # what a library computes in one call cannot be interrupted
    return "hang" if time.perf_counter() - started > LIMIT else None


def fuzz(
    name: str, door: Door, seed: int, inputs: int, tick: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Return how many inputs a door was given, and which of them broke it."""
    broken: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        with suppress(Exception):  # imports and caches are not timed
            door(source(seed, name, 0), Path(folder))
        for number in range(inputs):
            said = attempt(door, source(seed, name, number), Path(folder))
            if said is not None:
                broken[number] = said
            tick()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "inputs": inputs,
        "crashes": sum(said != "hang" for said in broken.values()),
        "hangs": sum(said == "hang" for said in broken.values()),
        "broken_by": dict(list(broken.items())[:20]),
    }


def source(seed: int, name: str, number: int) -> Hostile:
    """Return the source of an input."""
    return Hostile(f"{seed}/{name}/{number}")


def main(argv: Sequence[str] | None = None) -> None:
    """Fuzz the doors and write benchmarks/results/fuzz.json."""
    from fuzz_http import server_door

    names = [*DOORS, "http"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=1000, help="of a door whose share is 1")
    parser.add_argument("--door", nargs="+", choices=names, default=names)
    parser.add_argument("--only", type=int, help="try this input, and show where it breaks")
    parser.add_argument("--out", type=Path, help="another file for the result")
    options = parser.parse_args(argv)
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            for name in options.door:
                DOORS[name](source(options.seed, name, options.only), Path(folder))
        return
    found: dict[str, Any] = {}
    counts = {name: max(1, int(SHARES.get(name, 1) * options.inputs)) for name in options.door}
    with Progress() as progress:
        for name, inputs in counts.items():
            task = progress.add_task(name, total=inputs)

            def tick(task: Any = task) -> None:
                progress.advance(task)

            if name == "http":
                with server_door() as door:
                    found[name] = fuzz(name, door, options.seed, inputs, tick)
            else:
                found[name] = fuzz(name, DOORS[name], options.seed, inputs, tick)
    from common import write

    file = options.out or Path(__file__).parent / "results" / "fuzz.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    if before.get("seed") == options.seed:  # doors that were not tried now
        found = before["doors"] | found
    totals = {
        key: sum(one[key] for one in found.values()) for key in ("inputs", "crashes", "hangs")
    }
    result = {"seed": options.seed, "limit_seconds": LIMIT, **totals, "doors": found}
    write("fuzz", result, file)
    if totals["crashes"] or totals["hangs"]:
        sys.exit(f"{totals['crashes']} crashes, {totals['hangs']} hangs")


if __name__ == "__main__":
    main()
