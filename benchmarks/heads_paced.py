"""A head at the speed of a GPU, beside a draft model and lookups: servers on a paced device.

    python benchmarks/heads_paced.py            # 5 minutes, in setup-sglang-cpu's environment
    python benchmarks/heads_paced.py --report   # the table and the goals of the last run

The device is that of paced_sglang.py (docs/paced.md): passes are made up, and cost what `h100-8b`
says. Texts are stories that the tiny target of the package wrote. The draft model and the head say
what the tiny ones said at each place of them, the head at each depth. Contenders take turns; what
counts is the ratio of speeds within a round. An answer that is not the recorded text stops the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from common import at_least, of_best, show_goals, spread, write
from rich.console import Console
from rich.table import Table

from outrider.engines.costs import H100_8B
from outrider.report import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "sglang"))
from paced.texts import STORIES, prompts

RESULT = Path(__file__).parent / "results" / "heads_paced.json"
BATCHES, TOKENS, ROUNDS, CHAIN, TREE = (1, 4, 16), 256, 3, 8, 16
BARE, MODEL, HEAD, ADAPTIVE = "bare", "model", "eagle3", "adaptive"
CONTENDERS: dict[str, dict[str, Any]] = {
    BARE: {},
    "suffix": {"profile": {"drafter": "suffix", "max_drafts": CHAIN}},
    MODEL: {"profile": {"drafter": "model", "max_drafts": CHAIN}, "draft_model": True},
    HEAD: {"profile": {"drafter": "eagle3", "max_drafts": CHAIN}, "head": True},
    "eagle3 on the device": {
        "profile": {"drafter": "eagle3", "max_drafts": CHAIN, "drafters": {"eagle3": {"depth": 6}}},
        "head": True,
    },
    "eagle3 tree": {
        "profile": {"drafter": "eagle3", "max_drafts": TREE, "drafters": {"eagle3": {"width": 3}}},
        "head": True,
    },
    ADAPTIVE: {"profile": {"drafter": "adaptive", "max_drafts": TREE}, "head": True},
}
"""Fields of paced_servers.Contender. Bare SGLang overlaps host and device."""

FLAGS = (
    *("--max-running-requests", "24", "--max-total-tokens", "40000"),
    *("--mem-fraction-static", "0.5", "--context-length", "2048"),
)


def main() -> None:
    """Measure and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    result = json.loads(RESULT.read_text()) if args.report else measure(args.rounds)
    result["cells"] = [cell(result["runs"], batch) for batch in BATCHES]
    result["goals"] = goals(result["cells"])
    write("heads_paced", result, RESULT)
    show(result)


def measure(rounds: int) -> dict[str, Any]:
    """Let every server answer every batch of stories, round by round."""
    from paced_servers import Contender, ask, run, servers  # a report needs no SGLang

    made, runs = provenance(), list[dict[str, Any]]()
    contenders = {name: Contender(**fields) for name, fields in CONTENDERS.items()}
    with servers(H100_8B.name, contenders, FLAGS) as running:
        for server in running.values():  # control has met traffic before
            for batch in BATCHES:
                run(server, prompts(STORIES, batch, first=900), batch, TOKENS)
        for round_ in range(rounds):
            for number, batch in enumerate(BATCHES):
                turn = (number + round_) % len(running)
                for name, server in [*running.items()][turn:] + [*running.items()][:turn]:
                    found = ask(
                        server, prompts(STORIES, batch, first=round_ * batch), batch, TOKENS
                    )
                    runs.append({"contender": name, "batch": batch, "round": round_, **found})
                    print(f"round {round_}, B={batch}, {name}: {found['tokens_per_second']:.0f}")
                    sys.stdout.flush()
    device = {"profile": H100_8B.name, "source": H100_8B.source}
    return {"provenance": made, "device": device, "tokens": TOKENS, "runs": runs}


def cell(runs: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Say how the contenders do at a batch: ratios within a round, medians over rounds."""
    own = [run for run in runs if run["batch"] == batch]
    speed = {(run["contender"], run["round"]): run["tokens_per_second"] for run in own}
    found = {}
    for name in CONTENDERS:
        mine = [run for run in own if run["contender"] == name]
        found[name] = {
            "times_bare": spread([speed[name, r["round"]] / speed[BARE, r["round"]] for r in mine]),
            **{
                key: round(statistics.median(run[key] for run in mine), 3)
                for key in ("tokens_per_second", "tokens_per_step", "idle_ms_median")
            },
            "times_bare_ideal": round(
                statistics.median(
                    r["ideal_tokens_per_second"] / speed[BARE, r["round"]] for r in mine
                ),
                3,
            ),
        }
    return {"batch": batch, "contenders": found}


def goals(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was to be shown, and whether it was."""
    times = [
        {name: own["times_bare"]["median"] for name, own in cell["contenders"].items()}
        for cell in cells
    ]
    beats, slowest = times[0][HEAD] / times[0][MODEL], min(cell[ADAPTIVE] for cell in times)
    single = min(map(of_best, times))
    return [
        {
            "goal": "the head beats the draft model at B = 1 on its own texts",
            "value": round(beats, 3),
            "met": beats > 1.0,
        },
        at_least("adaptive at least 0.98 of bare SGLang with overlap, every batch", slowest, 0.98),
        at_least("adaptive at least 0.97 of the best single one, every batch", single, 0.97),
    ]


def show(result: dict[str, Any]) -> None:
    """Print the speed of each contender as a multiple of bare SGLang."""
    table = Table("B", "drafter", "x bare", "if the host took no time", "tokens a step", "idle ms")
    for found in result["cells"]:
        for name, own in found["contenders"].items():
            times = "{median:.2f} ({min:.2f}-{max:.2f})".format(**own["times_bare"])
            numbers = (own["times_bare_ideal"], own["tokens_per_step"], own["idle_ms_median"])
            table.add_row(str(found["batch"]), name, times, *(f"{n:.2f}" for n in numbers))
    Console(width=100).print(table)
    show_goals(result["goals"])


if __name__ == "__main__":
    main()
