"""Our suffix drafter beside the suffix tree of arctic-inference: drafts, time and memory.

    pip install torch numpy arctic-inference
    python benchmarks/suffix_vs_arctic.py

Each text is *replayed*: a prompt, and an output that is known. A step drafts at most K tokens, the
right ones are accepted, and the next token comes for free, as in greedy decoding. The library is
used as a drafter of ours would use it, so that both pay for the same protocol; nothing is shared
between requests. The texts are files of this repository; a token is a word, marks or white space,
a space before it included, as most tokenizers cut before they cut further.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from common import spread, write

from outrider.core import (
    Budget,
    Drafter,
    KeyedCoins,
    Outcome,
    Proposal,
    Request,
    SamplingParams,
    chain,
)
from outrider.drafters import NgramDrafter, SuffixDrafter

K = 8
LONG = 32_768
ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "outrider"


class ArcticDrafter:
    """SuffixDecodingCache as a drafter, with a tree for each request and none for all.

    options: of its `speculate`
    """

    name = "arctic"

    def __init__(self, **options: Any) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_cached_requests=0)
        self._options = options

    def start(self, requests: Sequence[Request]) -> None:
        """Build a tree of the text so far."""
        for request in requests:
            self._cache.start_request(request.id, np.array(request.tokens_from(0), np.int32))

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Propose what the tree says."""
        drafts = []
        for request, most in zip(requests, budget.max_drafts, strict=True):
            start = max(0, request.length - self._cache.max_tree_depth)
            context = np.array(request.tokens_from(start), np.int32)
            found = self._cache.speculate(request.id, context, most, **self._options)
            drafts.append(chain(found.token_ids, confidences=found.probs))
        return Proposal.of(drafts)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Append what was emitted."""
        for outcome in outcomes:
            self._cache.add_active_response(outcome.request.id, np.array(outcome.tokens, np.int32))

    def stop(self, requests: Sequence[Request]) -> None:
        """Drop the trees."""
        for request in requests:
            self._cache.stop_request(request.id)


CONTENDERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "suffix, min_match=1": lambda: SuffixDrafter(min_match=1),
    "arctic": ArcticDrafter,
    # it drafts at most as many tokens as match, unless told otherwise
    "arctic, to K": lambda: ArcticDrafter(max_spec_factor=float(K)),
}


class Words:
    """Turns texts into ids, one for each different piece."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's pieces."""
        pieces = re.findall(r" ?\w+| ?[^\w\s]+|\s+", text)
        return [self._ids.setdefault(piece, len(self._ids)) for piece in pieces]


def texts() -> dict[str, tuple[list[int], list[int]]]:
    """Return prompts and outputs, from much to copy to little."""
    encode = Words().encode

    def read(path: str) -> str:
        return (ROOT / path).read_text()

    edited = read("src/outrider/core/proposal.py")
    records = encode(read("benchmarks/results/speed_transformers.json"))
    code = encode("\n".join(path.read_text() for path in sorted(SOURCES.rglob("*.py"))))
    change = encode(edited.replace("parents", "ancestors").replace("tokens", "ids"))
    return {
        "the prompt with two names changed": (encode(edited), change),
        "records (JSON)": (records[:1000], records[1000:4000]),
        "a module like that in the prompt": (
            encode(read("src/outrider/kernels/tree_sampling/triton.py")),
            encode(read("src/outrider/kernels/renorm_prob/triton.py")),
        ),
        "prose on the prompt's subject": (
            encode(read("README.md")),
            encode(read("docs/sglang.md")),
        ),
        "two names changed, after 32k tokens": (code[:LONG], change),
    }


def replay(drafter: Drafter, prompt: Sequence[int], output: Sequence[int]) -> dict[str, Any]:
    """Decode a known output. Return counts, and the seconds of each call."""
    request = Request(0, tuple(prompt), SamplingParams(max_tokens=len(output)), 0)
    budget = Budget((K,), "match", KeyedCoins(), trees=False)
    seconds: dict[str, list[float]] = {"start": [], "propose": [], "observe": []}

    def timed(name: str, *arguments: Any) -> Any:
        began = time.perf_counter()
        found = getattr(drafter, name)(*arguments)
        seconds[name].append(time.perf_counter() - began)
        return found

    timed("start", [request])
    steps = drafted = accepted = 0
    while rest := output[len(request.output) :]:
        drafts = timed("propose", [request], budget).tokens.tolist()
        pairs = zip(drafts, rest[:-1], strict=False)
        right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        emitted = tuple(rest[: right + 1])
        rows = tuple(range(right + 1))
        outcome = Outcome(request, emitted, rows, len(drafts), right, None)
        timed("observe", [outcome])
        outcome.apply()
        steps, drafted, accepted = steps + 1, drafted + len(drafts), accepted + right
    drafter.stop([request])
    return {"steps": steps, "drafted": drafted, "accepted": accepted, "seconds": seconds}


def compare(rounds: int) -> dict[str, Any]:
    """Replay every text with every drafter, taking turns."""
    results: dict[str, Any] = {}
    for title, (prompt, output) in texts().items():
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
        for _ in range(rounds):
            for name, make in CONTENDERS.items():
                runs[name].append(replay(make(), prompt, output))
        results[title] = {"prompt": len(prompt), "output": len(output)}
        for name, found in runs.items():
            first = found[0]
            results[title][name] = {
                "tokens a step": round(len(output) / first["steps"], 2),
                "drafted a step": round(first["drafted"] / first["steps"], 2),
                "accepted": round(first["accepted"] / max(1, first["drafted"]), 3),
                **{
                    f"{call}, us": spread(
                        [1e6 * statistics.median(run["seconds"][call]) for run in found]
                    )
                    for call in ("start", "propose", "observe")
                },
            }
            print(f"{title:38} {name:14} {json.dumps(results[title][name])}", flush=True)
    return results


def resident() -> int:
    """Return the bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(name: str, kind: str, count: int = 16) -> float:
    """Return the bytes that a token takes, in requests of 32k tokens each."""
    if kind == "code":
        code = Words().encode("\n".join(p.read_text() for p in sorted(SOURCES.rglob("*.py"))))
        starts = [i * (len(code) - LONG) // count for i in range(count)]
        prompts = [code[start : start + LONG] for start in starts]
    else:
        draw = random.Random(0)
        prompts = [[draw.randrange(50_000) for _ in range(LONG)] for _ in range(count)]
    requests = [Request(i, tuple(p), SamplingParams(), 0) for i, p in enumerate(prompts)]
    drafter = CONTENDERS[name]()
    warm = Request(count, (1, 2, 3, 1, 2, 3), SamplingParams(), 0)
    drafter.start([warm])
    drafter.propose([warm], Budget((K,), "match", KeyedCoins(), trees=False))
    before = resident()
    drafter.start(requests)
    return (resident() - before) / (count * LONG)


def main() -> None:
    """Compare, and write benchmarks/results/suffix_vs_arctic.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", nargs=2, metavar=("DRAFTER", "TEXT"), help="only this, alone")
    options = parser.parse_args()
    if options.memory:
        print(memory(*options.memory))
        return
    found: dict[str, Any] = {}
    for kind in ("code", "random"):
        for name in ("ngram", "suffix", "arctic"):
            # each in a process of its own: memory that is given back is not always returned
            command = [sys.executable, __file__, "--memory", name, kind]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.setdefault(kind, {})[name] = round(float(done.stdout), 1)
    print(f"bytes a token in memory, {LONG} tokens a request: {found}", flush=True)
    write(
        "suffix_vs_arctic",
        {
            "arctic-inference": version("arctic-inference"),
            "K": K,
            "bytes a token": found,
            "replay": compare(options.rounds),
        },
    )


if __name__ == "__main__":
    main()
