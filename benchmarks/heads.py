"""How many tokens a step heads give, beside lookups and a draft model, on texts they never saw.

    python benchmarks/heads.py            # 3 minutes on two cores; needs no download
    python benchmarks/heads.py --report   # the table and the goals of the last run

The target is the tiny one in the package, which writes stories from a grammar. Prompts are openings
of stories of another seed than all training. All answers are compared with plain decoding's. How
fast a drafter is says nothing at this size; how many of its drafts are accepted does.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from common import load, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

import outrider
from outrider.drafters import ModelDrafter
from outrider.drafters.heads import DFlashDrafter, HeadDrafter, load_head
from outrider.hosts.transformers.runner import Runner
from outrider.report import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from train_tiny_pair import write_story

RESULT = Path(__file__).parent / "results" / "heads.json"
TINY = Path(str(files("outrider"))) / "assets" / "tiny"
SEED, STORIES, OPENING, TOKENS, DRAFTS = 20_261_117, 96, 24, 120, 6
SAMPLING = {"greedy": {}, "T = 0.7": {"temperature": 0.7, "seed": 1}}
HEADS = {"eagle3": "head", "mtp": "mtp", "dflash": "dflash"}


def main() -> None:
    """Measure and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    result = json.loads(RESULT.read_text()) if args.report else measure()
    result["goals"] = goals(result["runs"])
    write("heads", result, RESULT)
    show(result)


def drafters(target: Any) -> dict[str, Any]:
    """Return what drafts, by name. Heads draft as far as they may, as the others do."""
    embedding = target.get_input_embeddings().weight.detach()
    draft = load(str(TINY / "draft"), "float32")
    lm_head = target.get_output_embeddings().weight.detach()
    found: dict[str, Any] = {
        "ngram": outrider.NgramDrafter(),
        "suffix": outrider.SuffixDrafter(),
        "draft model": ModelDrafter(Runner(draft), target.config.vocab_size, min_survival=0.0),
    }
    for name, folder in HEADS.items():
        layers = target.config.num_hidden_layers
        head = load_head(TINY / folder, embedding, layers, lm_head=lm_head)
        kind = DFlashDrafter if name == "dflash" else HeadDrafter
        found[name] = kind(head, target.config.vocab_size, min_survival=0.0)
    return found


def measure() -> dict[str, Any]:
    """Let every drafter draft for every story."""
    target = load(str(TINY / "target"), "float32")
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    rng = random.Random(SEED)
    stories = [tokenizer.encode(write_story(rng))[:OPENING] for _ in range(STORIES)]
    runs = []
    for kind, sampling in SAMPLING.items():
        asked = {**sampling, "max_tokens": TOKENS}
        plain = outrider.generate(target, stories, drafter=None, sampling=asked)
        for name, drafter in track(drafters(target).items(), kind):
            done = outrider.generate(
                target, stories, drafter=drafter, sampling=asked, max_drafts=DRAFTS
            )
            stats = done.stats
            runs.append(
                {
                    "drafter": name,
                    "sampling": kind,
                    "tokens": stats.emitted,
                    "different": sum(
                        a != b for a, b in zip(done.outputs, plain.outputs, strict=True)
                    ),
                    "tokens_per_step": round(stats.accept_length, 3),
                    "accepted_at": [
                        round(stats.accepted_at[i] / max(1, stats.request_steps), 3)
                        for i in range(1, DRAFTS + 1)
                    ],
                }
            )
    about = {"stories": STORIES, "prompt_tokens": OPENING, "tokens": TOKENS, "max_drafts": DRAFTS}
    return {"provenance": provenance(), "torch": torch.__version__, **about, "runs": runs}


def goals(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was to be shown, and whether it was."""
    per_step = {(run["drafter"], run["sampling"]): run["tokens_per_step"] for run in runs}
    least = min(per_step["eagle3", kind] - per_step["draft model", kind] for kind in SAMPLING)
    different = sum(run["different"] for run in runs)
    return [
        {"goal": "answers are plain decoding's", "value": different, "met": different == 0},
        {
            "goal": "EAGLE-3 gives more tokens a step than the draft model",
            "value": round(least, 3),
            "met": least > 0,
        },
    ]


def show(result: dict[str, Any]) -> None:
    """Print tokens a step, and how often the draft at each depth was accepted."""
    table = Table("drafter", "sampling", "tokens a step", "accepted at depth 1, 2, ...")
    for run in result["runs"]:
        depths = " ".join(f"{share:.2f}" for share in run["accepted_at"])
        table.add_row(run["drafter"], run["sampling"], f"{run['tokens_per_step']:.2f}", depths)
    console = Console()
    console.print(table)
    for goal in result["goals"]:
        console.print(f"{'met' if goal['met'] else 'missed'}: {goal['goal']} ({goal['value']})")


if __name__ == "__main__":
    main()
