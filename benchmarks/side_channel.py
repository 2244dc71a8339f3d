"""Which prompt was asked? Guess it from a real server's stream: the attack of arXiv 2411.01076.

    python benchmarks/side_channel.py [--runs 4] [--tokens 32] [--temperature 0.3] [--traces DIR]

An observer knows a set of prompts, and has traces of earlier answers to each. It sees a new stream
and guesses the prompt by the nearest of these traces: from (tokens) how many tokens each chunk has,
(bytes) how large each chunk is, which anyone on the way sees though it is encrypted, or (times)
when each comes. Three ways to serve are compared: `open`, with the default settings; `quiet`, with
`flush_tokens` above K and `report_acceptance: false`; and `plain`, without drafts. All answers have
the same number of tokens, so that their length tells nothing. Needs SGLang
(`scripts/setup-sglang-cpu`) and the model stories15m.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import model_path, write
from rich.progress import Progress

PROMPTS = [
    f"{opening} {middle}"
    for opening in (
        "Once upon a time there was a little girl named Lily. Lily had a",
        "One day, Tom and Sam went to the beach. They saw a",
        "The dog ran to the park. The dog ran to the tree. The dog saw a",
        "There was a big house by the lake. In the house lived a",
    )
    for middle in ("red ball.", "sad cat.", "big bear.", "tiny bird.", "kind old man.")
]
DRAFTS, FLUSH, NEIGHBOURS = 4, 8, 3
QUIET = {"flush_tokens": FLUSH, "report_acceptance": False}
FEATURES = ("tokens", "bytes", "times")
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--max-total-tokens", "4096"),
    *("--attention-backend", "outrider", "--speculative-algorithm", "OUTRIDER"),
]

Trace = dict[str, list[float]]
"""What an observer sees of one answer, chunk by chunk: tokens, bytes, seconds since the last."""


def listen(server: Any, prompt: str, tokens: int, temperature: float, drafts: int) -> Trace:
    """Ask, and return the trace of the answer."""
    from common_sglang import session

    body = {
        "model": "default", "prompt": prompt, "max_tokens": tokens, "temperature": temperature,
        "ignore_eos": True, "stream": True, "custom_params": {"outrider": {"max_drafts": drafts}},
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    trace: Trace = {name: [] for name in FEATURES}
    before, last = 0, time.perf_counter()
    with session().post(f"{server.url}/v1/completions", json=body, stream=True) as reply:
        for line in reply.iter_lines(chunk_size=None):
            if not line.startswith(b"data: {"):
                continue
            now, piece = time.perf_counter(), json.loads(line[6:])
            so_far = (piece.get("usage") or {}).get("completion_tokens", before)
            if so_far > before:
                for name, value in zip(
                    FEATURES, (so_far - before, len(line), now - last), strict=True
                ):
                    trace[name].append(value)
                before, last = so_far, now
    return trace


def vectors(traces: Sequence[Trace], feature: str) -> Any:
    """Return the feature of each trace, [N, longest], the first chunk's time left out."""
    rows = [trace[feature][feature == "times" :] for trace in traces]
    made = np.zeros((len(rows), max(map(len, rows))))
    for row, values in zip(made, rows, strict=True):
        row[: len(values)] = values
    return made


def guess(known: Any, labels: Sequence[int], seen: Any, rng: np.random.Generator) -> list[int]:
    """Return the label of each trace seen: that of most of its nearest neighbours.

    known: [N, F] traces whose labels are known; seen: [M, F]
    Equal distances are settled by chance, so that traces which tell nothing give chance.
    """
    scale = known.std(0) + 1e-9
    found = []
    for one in seen:
        distances = np.abs((known - one) / scale).clip(max=5).sum(1)
        nearest = np.lexsort((rng.random(len(known)), distances))[:NEIGHBOURS]
        votes = Counter(labels[i] for i in nearest)
        most = max(votes.values())
        found.append(next(labels[i] for i in nearest if votes[labels[i]] == most))
    return found


def interval(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    p, n = hits / count, count
    middle, spread = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)


def accuracy(traces: Sequence[Sequence[Trace]], feature: str) -> dict[str, Any]:
    """Return how often the prompt is guessed: each run in turn from all the others.

    traces: of each prompt, run by run
    """
    rng = np.random.default_rng(0)
    flat = [trace for runs in traces for trace in runs]
    labels = [prompt for prompt, runs in enumerate(traces) for _ in runs]
    rows, fold = (
        vectors(flat, feature),
        np.array([run for runs in traces for run in range(len(runs))]),
    )
    hits = 0
    for run in range(max(fold) + 1):
        known, seen = np.flatnonzero(fold != run), np.flatnonzero(fold == run)
        guessed = guess(rows[known], [labels[i] for i in known], rows[seen], rng)
        hits += sum(guess == labels[i] for guess, i in zip(guessed, seen, strict=True))
    low, high = interval(hits, len(flat))
    return {
        "accuracy": round(hits / len(flat), 4),
        "interval": [round(low, 4), round(high, 4)],
        "guesses": len(flat),
    }


WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "quiet": (QUIET, DRAFTS),
    "open": ({}, DRAFTS),
    "plain": ({}, 0),
}
"""The profile's settings and the most drafts of a request, by the name of a way to serve."""


def record(
    runs: int, tokens: int, temperature: float, folder: Path
) -> dict[str, list[list[Trace]]]:
    """Return the traces by way to serve, prompt and run. Those in the folder are not made again."""
    from common_sglang import Server, end_servers_at_sigterm

    # in the tests' folder, which common_sglang has put on the path
    import server as servers  # isort: skip
    from parity import noisy

    end_servers_at_sigterm()
    servers.STARTUP_SECONDS = 900  # a busy machine
    model = Path(model_path("stories15m"))
    draft = folder / "draft" if (folder / "draft").exists() else noisy(model, folder / "draft")
    flags = [*FLAGS, "--speculative-draft-model-path", str(draft)]
    made = {name: folder / f"{name}.json" for name in WAYS}
    with Progress() as progress:
        for settings in (QUIET, {}):
            names = [n for n, way in WAYS.items() if way[0] == settings and not made[n].exists()]
            if not names:
                continue
            profile = folder / "profile.yaml"
            profile.write_text(json.dumps({"drafter": "model", "max_drafts": DRAFTS, **settings}))
            log = folder / f"{names[0]}.log"
            with Server(model, *flags, log=log, OUTRIDER_CONFIG=str(profile)) as server:
                for name in names:
                    task = progress.add_task(name, total=runs * len(PROMPTS))
                    traces: list[list[Trace]] = [[] for _ in PROMPTS]
                    for prompt in PROMPTS:  # into the prefix cache
                        listen(server, prompt, 1, temperature, WAYS[name][1])
                    for _ in range(runs):
                        for prompt, theirs in zip(PROMPTS, traces, strict=True):
                            drafts = WAYS[name][1]
                            theirs.append(listen(server, prompt, tokens, temperature, drafts))
                            progress.advance(task)
                    made[name].write_text(json.dumps(traces))
    return {name: json.loads(file.read_text()) for name, file in made.items()}


def main() -> None:
    """Record, guess, and write benchmarks/results/side_channel.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=4, help="of each prompt, at least 2")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.3)
    parser.add_argument("--traces", type=Path, help="where traces are kept; a rerun uses them")
    parser.add_argument("--out", type=Path, help="another file for the result")
    options = parser.parse_args()
    folder = options.traces or Path(tempfile.mkdtemp(prefix="outrider-side-channel-"))
    folder.mkdir(parents=True, exist_ok=True)
    traces = record(options.runs, options.tokens, options.temperature, folder)
    found = {
        name: {feature: accuracy(theirs, feature) for feature in FEATURES}
        for name, theirs in traces.items()
    }
    settings = {"runs": options.runs, "tokens": options.tokens, "temperature": options.temperature}
    settings |= {"max_drafts": DRAFTS, "flush_tokens": FLUSH, "neighbours": NEIGHBOURS}
    result = {"prompts": len(PROMPTS), "chance": 1 / len(PROMPTS), **settings, "ways": found}
    write("side_channel", result, options.out)


if __name__ == "__main__":
    main()
