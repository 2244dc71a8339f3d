"""A head for a real model on the real CPU server, beside lookups and bare SGLang.

    python benchmarks/heads_sglang.py build/head   # 20 minutes, in setup-sglang-cpu's environment
    python benchmarks/heads_sglang.py --report     # the table and the goals of the last run

The target is SmolLM2-135M-Instruct; heads_domain.py says how its head is trained. Two servers side
by side, of which one works at a time, go on from the middle of held-out files. Requests say who
drafts; `plain` is Outrider's server without drafts, whose attention is not bare SGLang's. What
counts is the ratio of speeds within a round; each round has prompts of its own. The result is
written after every round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import at_least, model_path, of_best, show_goals, spread, write
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.report import provenance

RESULT = Path(__file__).parent / "results" / "heads_sglang.json"
TARGET = "smollm2-135m-instruct"
BATCHES, ROUNDS, DRAFTS, THREADS = (1, 4, 16), 5, 4, "2"
TOKENS = {1: 96, 4: 48, 16: 32}  # of each request, in the mean
BARE, PLAIN, HEAD, ADAPTIVE = "bare", "plain", "eagle3", "adaptive"
LOOKUPS = ("ngram", "suffix")
METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {"max_drafts": 0},
    **{name: {"drafter": name, "max_drafts": DRAFTS} for name in (*LOOKUPS, HEAD)},
    ADAPTIVE: {"drafter": ADAPTIVE},
}
FLAGS = (
    *("--dtype", "float32", "--context-length", "2048", "--mem-fraction-static", "0.5"),
    *("--max-running-requests", "16", "--max-total-tokens", "16384", "--enable-metrics"),
)


def main() -> None:
    """Measure and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("head", type=Path, nargs="?", help="written by train_head.py")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if args.report and not RESULT.exists():
        parser.error(f"there is no {RESULT.name} yet: name a head to measure")
    if args.report:
        results = iter([json.loads(RESULT.read_text())])
    elif args.head and (args.head / "training.json").is_file():
        results = compare(args.head, args.rounds)
    else:
        parser.error("name the directory of a head that scripts/train_head.py wrote")
    for result in results:
        result["cells"] = [cell(result["runs"], batch) for batch in BATCHES]
        result["goals"] = goals(result["cells"])
        write("heads_sglang", result, RESULT)
    show(result)


def compare(head: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Let every method answer every batch. Yields all that was found after every round."""
    from common_sglang import fill_cache, measure, same_outputs, side_by_side
    from heads_domain import prompts  # a report needs no models, and no SGLang
    from transformers import AutoTokenizer

    training, runs = json.loads((head / "training.json").read_text()), list[dict[str, Any]]()
    result = {
        **{"provenance": provenance(), "target": TARGET, "training": training, "tokens": TOKENS},
        **{"max_drafts": DRAFTS, "threads": THREADS, "flags": FLAGS, "runs": runs},
    }
    asked = prompts(AutoTokenizer.from_pretrained(model_path(TARGET)))
    ours = (
        *("--attention-backend", "outrider", "--speculative-algorithm", "OUTRIDER"),
        *("--speculative-draft-model-path", str(head.resolve())),
    )
    profile = json.dumps({"drafter": ADAPTIVE, "drafters": {name: {} for name in LOOKUPS}})
    with side_by_side(TARGET, FLAGS, ours, THREADS, profile) as (bare, drafting), Progress() as bar:
        task = bar.add_task("runs", total=len(BATCHES) * (1 + rounds * (1 + len(METHODS))))
        for batch in BATCHES:  # control has met traffic before
            measure(drafting, asked[-batch:], TOKENS[batch], METHODS[ADAPTIVE])
            bar.advance(task)
        for number in range(rounds):
            for batch in BATCHES:
                own = [asked[(number * batch + i) % len(asked)] for i in range(batch)]
                fill_cache(bare, own, None)
                fill_cache(drafting, own, {"drafter": HEAD})
                found: dict[str, dict[str, Any]] = {}
                names = [BARE, *METHODS]
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    server = bare if name == BARE else drafting
                    found[name] = measure(server, own, TOKENS[batch], METHODS.get(name))
                    bar.advance(task)
                for name, run in found.items():
                    same = same_outputs(run, found[BARE])
                    made = {key: of for key, of in run.items() if key not in ("outputs", "parts")}
                    runs.append(
                        {"method": name, "batch": batch, "round": number, "same": same, **made}
                    )
            yield result


def cell(runs: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Say how the methods do at a batch: ratios within a round, medians over rounds."""
    own = [run for run in runs if run["batch"] == batch]
    speed = {(run["method"], run["round"]): run["tokens_per_second"] for run in own}
    rounds = sorted({run["round"] for run in own})
    same = sum(run["same"] for run in own if run["method"] != BARE)
    return {
        "batch": batch,
        "bare_tokens_per_second": spread([speed[BARE, number] for number in rounds]),
        "times_bare": {
            name: spread([speed[name, number] / speed[BARE, number] for number in rounds])
            for name in METHODS
        },
        "same_as_bare": f"{same}/{batch * len(rounds) * len(METHODS)}",
    }


def goals(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was to be shown, and whether it was."""
    times = [{name: own["median"] for name, own in cell["times_bare"].items()} for cell in cells]
    beats = times[0][HEAD] / max(times[0][name] for name in LOOKUPS)
    slowest, single = min(cell[ADAPTIVE] for cell in times), min(map(of_best, times))
    return [
        {
            "goal": "the head beats the lookups at B = 1 on its own domain",
            "value": round(beats, 3),
            "met": beats > 1.0,
        },
        at_least("adaptive at least 0.98 of bare SGLang, every batch", slowest, 0.98),
        at_least("adaptive at least 0.97 of the best single one, every batch", single, 0.97),
    ]


def show(result: dict[str, Any]) -> None:
    """Print the speed of each method as a multiple of bare SGLang."""
    table = Table("B", "bare, tokens/s", *METHODS, "answers as bare")
    for found in result["cells"]:
        spreads = [found["bare_tokens_per_second"], *found["times_bare"].values()]
        said = ("{median:.2f} ({min:.2f}-{max:.2f})".format(**one) for one in spreads)
        table.add_row(str(found["batch"]), *said, found["same_as_bare"])
    Console(width=120).print(table)
    show_goals(result["goals"])


if __name__ == "__main__":
    main()
