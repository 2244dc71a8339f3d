"""Control over the suffix lookup, a head and a draft model, beside each of them alone.

    python benchmarks/pool.py            # 15 minutes on one core; needs no download
    python benchmarks/pool.py --report   # the table and the goals of the last run

Drafts are real: the tiny target of the package, its draft model and its EAGLE-3 head, which drafts
chains, or trees with WIDTH drafts in a pass; for control it drafts trees. Time is counted, not
measured: each pass takes what COSTS says, so that the figures are the same on every machine, and
control reads that clock. What the host takes is left out: see docs/paced.md for that.

Texts: *stories* (openings of stories that no training has seen), *copies* (a story, and its opening
again) and *hot* (stories at a temperature of 1.5, which nobody can guess well), and these mixed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import at_least, different_tokens, load, of_best, show_goals, write
from heads import TINY
from rich.console import Console
from rich.progress import track
from rich.table import Table
from train_tiny_pair import write_story
from transformers import AutoTokenizer

import outrider
from outrider.control import adaptive_drafter
from outrider.drafters import ModelDrafter
from outrider.engines.transformers.host import TransformersHost
from outrider.engines.transformers.runner import Runner
from outrider.report import provenance

RESULT = Path(__file__).parent / "results" / "pool.json"
SEED, REQUESTS, TOKENS, MOST, WIDTH = 20_261_118, 48, 96, 8, 3
BATCHES, CALIBRATED = (1, 4, 16), (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
KINDS = ("stories", "copies", "hot")
COSTS = {"target": (5.9e-3, 21e-6), "model": (2.1e-3, 3.2e-6), "eagle3": (0.5e-3, 1.0e-6)}
"""Seconds of a pass, and of each of its rows. Target and model: `h100-8b-line` of the paced device
(docs/paced.md): they are of 8B and 1B, on an H100. The head has 0.35 of the target's 8.03 billion
weights (one layer, a vocabulary of 32,000): 0.26 ms by weights, and as much again for launches."""

Case = tuple[list[int], dict[str, Any]]


def main() -> None:
    """Measure and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    result = json.loads(RESULT.read_text()) if args.report else measure()
    result["goals"] = goals(result["cells"])
    write("pool", result, RESULT)
    show(result)


class Clock:
    """Counts the seconds of passes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        return self.seconds

    def cost(self, name: str, rows: int) -> float:
        """Return the seconds of a pass of this model."""
        fixed, row = COSTS[name]
        return fixed + row * rows

    def add(self, name: str, rows: int) -> None:
        """Let a pass of this model go by."""
        self.seconds += self.cost(name, rows)

    def count(self, drafter: ModelDrafter[Any]) -> ModelDrafter[Any]:
        """Count the passes of a drafter from now on."""
        model, name = drafter._model, drafter.name
        for method in ("extend", "catch_up"):
            setattr(model, method, self._counted(name, getattr(model, method)))
        return drafter

    def _counted(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(segments: Sequence[tuple[Any, Sequence[int]]]) -> Any:
            before = self.seconds
            found = run(segments)
            self.seconds = before  # `extend` of a head calls its own `catch_up`
            self.add(name, sum(len(tokens) for _, tokens in segments))
            return found

        return counted

    @contextmanager
    def target(self) -> Iterator[None]:
        """Count the target's passes, but for those that read prompts."""
        forward = TransformersHost.forward

        def counted(host: Any, requests: Any, proposal: Any) -> Any:
            if requests[0].output:
                self.add("target", proposal.num_rows)
            return forward(host, requests, proposal)

        TransformersHost.forward = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            TransformersHost.forward = forward  # type: ignore[method-assign]


def cases(kind: str) -> list[Case]:
    """Return prompts of a kind, and how they are sampled."""
    tokenizer, rng = AutoTokenizer.from_pretrained(TINY / "target"), random.Random(SEED)
    found: list[Case] = []
    for number in range(REQUESTS):
        own = KINDS[number % len(KINDS)] if kind == "mixed" else kind
        story = tokenizer.encode(write_story(rng))
        sampling: dict[str, Any] = {"max_tokens": TOKENS}
        if own == "hot":
            sampling |= {"temperature": 1.5, "seed": number}
        prompt = story[:200] + story[:24] if own == "copies" else story[:24]
        found.append((prompt, sampling))
    return found


def contenders(target: Any, clock: Clock) -> dict[str, Callable[[], Any]]:
    """Return what makes each drafter, by name."""
    vocab_size = target.config.vocab_size

    def model(**options: Any) -> ModelDrafter[Any]:
        draft = Runner(load(str(TINY / "draft"), "float32"))
        return clock.count(ModelDrafter(draft, vocab_size, **options))

    def head(**options: Any) -> ModelDrafter[Any]:
        return clock.count(
            outrider.load_drafter(TINY / "head").drafter(target, vocab_size, **options)
        )

    def pool() -> Any:
        first = head(min_survival=0.0, width=WIDTH)
        drafter = adaptive_drafter([first, model(min_survival=0.0, siblings=1)], clock=clock)
        control = drafter.control
        for rows in CALIBRATED:  # as a server does before its first step
            seconds = [clock.cost(name, rows) for name in control.models]
            control.calibrate(rows, clock.cost("target", rows), seconds)
        return drafter

    return {
        "plain": lambda: None,
        "suffix": outrider.SuffixDrafter,
        "model": model,
        "eagle3": head,
        "eagle3 tree": lambda: head(width=WIDTH),
        "adaptive": pool,
    }


def measure() -> dict[str, Any]:
    """Let every contender answer every cell's requests, B at a time."""
    made, target, clock = provenance(), load(str(TINY / "target"), "float32"), Clock()
    cells: list[dict[str, Any]] = []
    with clock.target():
        for kind, batch in track([(k, b) for k in (*KINDS, "mixed") for b in BATCHES], "cells"):
            asked, plain = cases(kind), list[list[int]]()
            speeds: dict[str, float] = {}
            different = 0
            for name, make in contenders(target, clock).items():
                outputs, seconds, drafter = list[list[int]](), 0.0, make()
                for first in range(0, REQUESTS, batch):
                    some, started = asked[first : first + batch], clock.seconds
                    outputs += outrider.generate(
                        target,
                        [prompt for prompt, _ in some],
                        drafter=drafter,
                        sampling=[sampling for _, sampling in some],
                        max_drafts=MOST,
                    ).outputs
                    seconds += clock.seconds - started
                plain = plain or outputs
                different += different_tokens(outputs, plain)
                speeds[name] = round(sum(map(len, outputs)) / seconds, 1)
            times = {name: round(speed / speeds["plain"], 3) for name, speed in speeds.items()}
            cells.append(
                {"kind": kind, "batch": batch, "times_plain": times, "different": different}
            )
    return {
        "provenance": made,
        "costs": COSTS,
        **{"requests": REQUESTS, "tokens": TOKENS, "max_drafts": MOST, "cells": cells},
    }


def goals(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was to be shown, and whether it was."""
    different = sum(cell["different"] for cell in cells)
    worst = min(of_best(cell["times_plain"]) for cell in cells)
    mixed = min(of_best(cell["times_plain"]) for cell in cells if cell["kind"] == "mixed")
    alone = [
        cell["times_plain"] for cell in cells if (cell["kind"], cell["batch"]) == ("stories", 1)
    ]
    head = min(times["eagle3"] / times["model"] for times in alone)
    return [
        {"goal": "answers are plain decoding's", "value": different, "met": different == 0},
        at_least("adaptive at least 0.97 of the best single one, every cell", worst, 0.97),
        {
            "goal": "adaptive above the best single one on the mix",
            "value": round(mixed, 3),
            "met": mixed > 1.0,
        },
        {
            "goal": "the head beats the draft model at B = 1 on its own texts",
            "value": round(head, 3),
            "met": head > 1.0,
        },
    ]


def show(result: dict[str, Any]) -> None:
    """Print the speed of each contender as a multiple of plain decoding."""
    names = list(result["cells"][0]["times_plain"])[1:]
    table = Table("text", "B", *names)
    for cell in result["cells"]:
        times = (f"{cell['times_plain'][name]:.2f}" for name in names)
        table.add_row(cell["kind"], str(cell["batch"]), *times)
    Console().print(table)
    show_goals(result["goals"])


if __name__ == "__main__":
    main()
