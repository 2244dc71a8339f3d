"""What it costs to decide what to draft, when no model is asked: time and memory.

    python benchmarks/deciding.py [--requests 64 256] [--contexts 1024 8192 32768] [--quick]

Texts are made up, with repetition as real ones have it: frequent tokens and rare ones, and spans
that are copied from before. A request emits the drafts that its text goes on with, and one token
more. What is measured is the time in which a GPU would wait: `propose` and `observe`, for each
request and step; in CPU time of the one thread that works, so that others on the machine count
less. The first steps are left out: the adaptive drafter only looks on in some of them.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from common import write
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.control import adaptive_drafter
from outrider.core import (
    Budget,
    Drafter,
    KeyedCoins,
    Outcome,
    Outcomes,
    Proposal,
    Request,
    SamplingParams,
)
from outrider.drafters import NgramDrafter, SuffixDrafter

VOCABULARY = 32_000
IDS = tuple(range(VOCABULARY))  # one object for each id, so that texts take little memory
MAX_DRAFTS = 8
WARM_UP = 8
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "suffix": SuffixDrafter,
    "ngram": NgramDrafter,
    "adaptive": lambda: adaptive_drafter(None, clock=lambda: 0.0),
}


def make_text(length: int, seed: int) -> tuple[int, ...]:
    """Return phrases by Zipf's law; about half of the tokens lie in spans copied from before."""
    random = np.random.default_rng(seed)
    ranks = np.arange(1, VOCABULARY + 1)
    chances = np.cumsum(1 / (ranks + 2.7))  # the most frequent one takes 3 of 100
    sizes = random.integers(1, 6, VOCABULARY)
    phrases = np.split(random.permutation(np.repeat(ranks - 1, 3))[: sizes.sum()], sizes.cumsum())
    drawn = np.searchsorted(chances, random.random(length) * chances[-1])
    text = np.concatenate([phrases[i] for i in drawn])[:length]
    at = 64
    while at < length:
        at += int(random.integers(4, 64))  # new tokens
        size = min(int(random.integers(4, 64)), max(0, length - at))
        source = int(random.integers(0, at - size)) if size else 0
        text[at : at + size] = text[source : source + size]
        at += size
    return tuple(IDS[token] for token in text.tolist())


def settle(request: Request, text: Sequence[int], drafts: Sequence[int]) -> Outcome:
    """Return what a target that writes this text makes of the drafts."""
    rest = text[request.length : request.length + len(drafts) + 1]
    right = 0
    while right < len(drafts) and drafts[right] == rest[right]:
        right += 1
    rows = tuple(range(right + 1))
    return Outcome(request, tuple(rest[: right + 1]), rows, len(drafts), right, None)


def run(
    drafter: Drafter, texts: Sequence[Sequence[int]], context: int, steps: int
) -> dict[str, Any]:
    """Decode the texts and return the seconds of each call, and what was accepted."""
    # contexts differ in length, as those of users do
    sampling = SamplingParams(max_tokens=10**6)
    requests = [
        Request(i, tuple(text[: context - i % (context // 8)]), sampling, 0)
        for i, text in enumerate(texts)
    ]
    starts, proposes, observes, emitted = [], [], [], 0
    for request in requests:
        began = thread_time()
        drafter.start([request])
        starts.append(thread_time() - began)
    budget = Budget(np.full(len(requests), MAX_DRAFTS), "match", KeyedCoins(), trees=False)
    meanwhile = getattr(drafter, "meanwhile", lambda: None)
    for _ in range(WARM_UP + steps):
        began = thread_time()
        proposal = drafter.propose(requests, budget)
        proposed = thread_time()
        meanwhile()  # a host does this while the device works
        outcomes = _outcomes(requests, texts, proposal)
        settled = thread_time()
        drafter.observe(outcomes)
        ended = thread_time()
        proposes.append(proposed - began)
        observes.append(ended - settled)
        outcomes.apply()
        emitted += len(outcomes.tokens)
    return {
        "start": starts,
        "propose": proposes[WARM_UP:],
        "observe": observes[WARM_UP:],
        "accept_length": emitted / len(requests) / (WARM_UP + steps),
    }


def _outcomes(
    requests: Sequence[Request], texts: Sequence[Sequence[int]], proposal: Proposal[Any]
) -> Outcomes:
    tokens, starts = proposal.tokens.tolist(), proposal.starts
    return Outcomes.of(
        [
            settle(request, text, tokens[starts[r] : starts[r + 1]])
            for r, (request, text) in enumerate(zip(requests, texts, strict=True))
        ]
    )


def figures(name: str, texts: Sequence[Sequence[int]], context: int, steps: int) -> dict[str, Any]:
    """Measure one drafter over these texts."""
    make = DRAFTERS[name]
    gc.collect()
    drafter = make()
    found = run(drafter, texts, context, steps)
    each = 1e6 / len(texts)
    both = [a + b for a, b in zip(found["propose"], found["observe"], strict=True)]
    row: dict[str, Any] = {"requests": len(texts), "context": context, "drafter": name}
    for what, seconds in (("propose", found["propose"]), ("observe", found["observe"])):
        row[f"{what}_us"] = _spread([each * s for s in seconds])
    row["step_us"] = _spread([each * s for s in both])
    row["slowest_step_ms"] = round(1e3 * max(both), 2)
    row["start_ms"] = _spread([1e3 * s for s in found["start"]])
    row["accept_length"] = round(found["accept_length"], 2)
    if isinstance(drafter, SuffixDrafter):
        tokens = int(drafter.texts.lengths.sum())
        row |= {"bytes": drafter.nbytes, "bytes_per_token": round(drafter.nbytes / tokens, 1)}
    return row


def _spread(values: list[float]) -> dict[str, float]:
    median, p99 = np.percentile(values, [50, 99])
    found = {"median": float(median), "p99": float(p99), "max": max(values)}
    return {name: round(value, 2) for name, value in found.items()}


def main() -> None:
    """Measure, print a table, and write benchmarks/results/deciding.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32_768])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="a small run, to see that it works")
    parser.add_argument("--out", type=Path, help="instead of the committed file")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.contexts, args.steps = [4], [1024], 10
    rows = []
    jobs = [(b, c, name) for c in args.contexts for b in args.requests for name in DRAFTERS]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=len(jobs))
        for context in args.contexts:
            length = context + (args.steps + WARM_UP + 1) * (MAX_DRAFTS + 1) + 256
            texts = [make_text(length, seed) for seed in range(max(args.requests))]
            for batch in args.requests:
                for name in DRAFTERS:
                    rows.append(figures(name, texts[:batch], context, args.steps))
                    progress.advance(task)
    report(rows)
    setting = {"max_drafts": MAX_DRAFTS, "steps": args.steps, "load": os.getloadavg()}
    write("deciding", {**setting, "figures": rows}, args.out)


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table: microseconds are those of a request and step."""
    heads = ("propose us", "observe us", "both us", "p99", "max", "slowest step ms", "start ms")
    table = Table("requests", "context", "drafter", *heads, "accept length", "bytes/token")
    for row in rows:
        cells = [
            row["propose_us"]["median"],
            row["observe_us"]["median"],
            *row["step_us"].values(),
            row["slowest_step_ms"],
            row["start_ms"]["median"],
            row["accept_length"],
            row.get("bytes_per_token", 0.0),
        ]
        keys = (str(row["requests"]), str(row["context"]), row["drafter"])
        table.add_row(*keys, *(f"{cell:.1f}" for cell in cells))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
