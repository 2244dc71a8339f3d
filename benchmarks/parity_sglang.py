"""The same answers as bare SGLang, on a pair of real size.

    python benchmarks/parity_sglang.py [--count 96] [--tokens 16]

Run it in the environment of scripts/setup-sglang-cpu. Both servers are in SGLang's deterministic
mode; requests are those of the parity tests: greedy and seeded, all parameters, streamed or not,
with every drafter in turn, all at once on a small cache, amid clients that hang up.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from common import model_path, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/hosts/sglang"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/hosts/sglang/site"))
import parity
from outrider_test_site import no_repeat_processor
from server import Server


def main() -> None:
    """Compare, and write benchmarks/results/parity_sglang.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    target, draft = Path(model_path(args.target)), model_path(args.draft)
    logs = Path(tempfile.mkdtemp(prefix="outrider-parity-"))
    mode = [*parity.DETERMINISTIC, "--dtype", "bfloat16", "--mem-fraction-static", "0.6"]
    drafts = ["--speculative-draft-model-path", draft, "--speculative-num-steps", "4"]
    environment = {"OMP_NUM_THREADS": "2"}
    bare = Server(target, *parity.BARE, *mode, log=logs / "bare.log", **environment)
    bare.wait()  # one after the other: SGLang looks how much memory is left
    flags = [*parity.TIGHT, *mode, *parity.OUTRIDER, *drafts]
    environment |= parity.profile(logs)
    ours = Server(target, *flags, log=logs / "ours.log", **environment)
    started = time.perf_counter()
    with bare, ours:
        phases = parity.seeded_phases(args.count, args.tokens, no_repeat_processor())
        comparison = parity.compare_seeded(bare, ours, phases)
        counters = ours.metrics()
        retractions = ours.log.read_text().count("Retract requests")
    comparison.conclude(logprobs_within=1e-5)
    names = (
        "draft_tokens",
        "accepted_draft_tokens",
        "verify_steps",
        "tree_steps",
        "emitted_tokens",
    )
    found = {
        "target": args.target,
        "draft": args.draft,
        "dtype": "bfloat16",
        "requests": comparison.requests,
        "tokens": comparison.tokens,
        "different": len(comparison.different),
        "furthest_logprob": max(comparison.gaps.values()),
        "retractions": retractions,
        "counters": {name: counters[f"outrider:{name}_total"] for name in names},
        "accepted_by_drafter": {
            key.partition('drafter="')[2].partition('"')[0]: value
            for key, value in counters.items()
            if key.startswith("outrider:accepted_draft_tokens_total{")
        },
        "minutes": round((time.perf_counter() - started) / 60, 1),
    }
    print(found)
    write("parity_sglang", found)


if __name__ == "__main__":
    main()
