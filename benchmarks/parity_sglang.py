"""The same answers as bare SGLang: on a pair of real size, or from many requests at once.

    python benchmarks/parity_sglang.py [--count 96] [--tokens 16]
    python benchmarks/parity_sglang.py --crowd --out benchmarks/results/parity_sglang_crowd.json

Run it in the environment of scripts/setup-sglang-cpu. Both servers are in SGLang's deterministic
mode; requests are those of the parity tests: greedy and seeded, all parameters, streamed or not,
with every drafter in turn, all at once on a small cache, amid clients that hang up. `--crowd` asks
a small model, and its copy with noise as a draft model, for 510 answers: half of them 64 at a time,
a third 16 at a time, the others 4 at a time and one by one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from common import model_path, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/engines/sglang"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/engines/sglang/site"))
import parity
from outrider_test_site import no_repeat_processor
from server import Server

RESULT = Path(__file__).parent / "results" / "parity_sglang.json"


def main() -> None:
    """Compare, and write benchmarks/results/parity_sglang.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--crowd", action="store_true", help="many requests, a small model")
    parser.add_argument("--out", type=Path, default=RESULT, help="result file")
    args = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="outrider-parity-"))
    mode, sizes, concurrencies, dtype = [*parity.DETERMINISTIC], parity.TIGHT, (16,), "bfloat16"
    if args.crowd:
        args.target, args.draft, args.count, dtype = "stories260k", "noisy copy", 510, "float32"
        sizes, concurrencies = parity.CROWD, (1, 4, *[16] * 4, *[64] * 6)
    target = Path(model_path(args.target))
    if args.crowd:
        draft = str(parity.noisy(target, logs / "draft"))
    else:
        mode += ["--dtype", dtype, "--mem-fraction-static", "0.6"]
        draft = model_path(args.draft)
    drafts = ["--speculative-draft-model-path", draft, "--speculative-num-steps", "4"]
    environment = {"OMP_NUM_THREADS": "1" if args.crowd else "2"}
    bare = Server(target, *parity.BARE, *mode, log=logs / "bare.log", **environment)
    bare.wait()  # one after the other: SGLang looks how much memory is left
    flags = [*sizes, *mode, *parity.OUTRIDER, *drafts]
    environment |= parity.profile(logs)
    ours = Server(target, *flags, log=logs / "ours.log", **environment)
    started = time.perf_counter()
    with bare, ours:
        phases = parity.seeded_phases(args.target, args.count, args.tokens, no_repeat_processor())
        comparison = parity.compare_seeded(bare, ours, phases, concurrencies)
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
        "dtype": dtype,
        "concurrencies": sorted(set(concurrencies)),
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
    write("parity_sglang", found, args.out)


if __name__ == "__main__":
    main()
