"""How near the best of the full grid is what `outrider tune` chose?

    outrider tune --workload mixed --concurrency 4 --out tune --model-path ...
    outrider serve --profile profile.yaml --model-path ...   # with all drafters allowed
    python benchmarks/tune_grid.py --engine http://127.0.0.1:30000 --tune tune/tune.json

Every drafter with every K that tune chooses from, n-grams besides, and plain decoding answer the
same prompts in turn, in rounds, on prompts that tune has not seen. What counts is the time that all
rounds took; the spread is that of single rounds.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from common import spread, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

from outrider.bench.workloads import prompts
from outrider.clients import open_engine
from outrider.tune.search import DRAFTERS, PLAIN, Candidate, Search, Traffic, grid


def main() -> None:
    """Measure the grid and write benchmarks/results/tune_grid.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", required=True, help="a server that allows all drafters")
    parser.add_argument("--tune", type=Path, required=True, help="tune.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tuned = json.loads(args.tune.read_text())
    concurrency = tuned["traffic"]["concurrency"]
    seen = concurrency * (1 + max(trial["round"] for trial in tuned["trials"]))
    texts = prompts(tuned["traffic"]["workload"], seen + concurrency * args.rounds)[seen:]
    everything = grid([*DRAFTERS, "ngram"])
    engine = open_engine(args.engine)
    search = Search(
        engine, Traffic(texts, concurrency), everything, math.inf, tokens=tuned["max_tokens"]
    )
    search.rungs.append(everything)
    for _ in track(range(args.rounds), "rounds", console=Console(stderr=True)):
        list(search.measure_round(lambda rung, who: None))

    profile = tuned["profile"]
    chosen = Candidate(profile["drafter"], profile["max_drafts"])
    best = search.ranking[0]
    rounds = range(search.next_round)
    table = Table("setting", "times plain", "by round", "tokens a step", box=None)
    cells = []
    for candidate in search.ranking:
        score, (low, high) = search.score(candidate), search.spread(candidate)
        steps = search.tokens_per_step(candidate)
        own = [t for t in search.trials if t.candidate == candidate]
        cells.append(
            {
                "setting": str(candidate),
                "times_plain": round(score, 4),
                "by_round": [round(t.times_plain, 4) for t in own],
                "tokens_per_step": round(steps, 3),
                "same": sum(t.same for t in own),
                "asked": sum(t.asked for t in own),
            }
        )
        table.add_row(str(candidate), f"{score:.3f}", f"{low:.2f} - {high:.2f}", f"{steps:.2f}")
    ratio = search.score(chosen, best)
    by_round = [search.score(chosen, best, [n]) for n in rounds]
    Console().print(table)
    print(f"chosen: {chosen}, {ratio:.3f} of the best ({best})")
    result = {
        "engine": engine.facts(),
        "tune": tuned["provenance"],
        "traffic": tuned["traffic"],
        "max_tokens": search.tokens,
        "prompts": len(texts),
        "plain_tokens_per_second": spread([t.speed for t in search.trials if t.candidate == PLAIN]),
        "chosen": str(chosen),
        "best": str(best),
        "chosen_times_best": round(ratio, 4),
        "chosen_times_best_by_round": [round(value, 4) for value in by_round],
        "grid": cells,
    }
    write("tune_grid", result, args.out)


if __name__ == "__main__":
    main()
