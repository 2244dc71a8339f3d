"""How many tokens a step heads give, beside lookups and a draft model, on texts they never saw.

    python benchmarks/heads.py            # 6 minutes on two cores; needs no download
    python benchmarks/heads.py --runs     # all but the learning curve
    python benchmarks/heads.py --curve    # the learning curve alone, 3 minutes
    python benchmarks/heads.py --report   # the table, the goals and the plot of the last run

The target is the tiny one in the package, which writes stories from a grammar. Prompts are openings
of stories of another seed than all training. All answers are compared with plain decoding's. How
fast a drafter is says nothing at this size; how many of its drafts are accepted does.

The learning curve is that of one more EAGLE-3 head: `scripts/train_head.py` trains it here on other
stories, and its checkpoints draft for some of the prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from common import IMAGES, different_tokens, load, pyplot, save_plot, show_goals, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

import outrider
from outrider.drafters import ModelDrafter
from outrider.engines.transformers.runner import Runner
from outrider.report import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from train_tiny_pair import write_story

SCRIPTS = Path(__file__).parents[1] / "scripts"
RESULT = Path(__file__).parent / "results" / "heads.json"
TINY = Path(str(files("outrider"))) / "assets" / "tiny"
SEED, STORIES, OPENING, TOKENS, DRAFTS = 20_261_117, 96, 24, 120, 6
SAMPLING = {"greedy": {}, "T = 0.7": {"temperature": 0.7, "seed": 1}}
HEADS = {"eagle3": "head", "mtp": "mtp", "dflash": "dflash"}
TREES = {"eagle3 chain": 0, "eagle3 tree": 3}
"""Names, and how many drafts a pass reads. These may draft TREE_DRAFTS."""

TREE_DRAFTS = 16
CURVE = (15, 40, 100, 250, 600)
"""Steps of training after which the head is tried."""

LESSONS, TRIED = 1500, 32
"""Stories to train on for the learning curve, and stories to try the head on."""


def main() -> None:
    """Measure and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", action="store_true", help="keep the last learning curve")
    parser.add_argument("--curve", action="store_true", help="measure the learning curve alone")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    last = json.loads(RESULT.read_text()) if args.report or args.curve or args.runs else {}
    result = last if args.report or args.curve else last | measure()
    if not (args.report or args.runs):
        result["learning_curve"] = learning_curve()
    result["goals"] = goals(result)
    write("heads", result, RESULT)
    show(result)
    plot(result)


def measure() -> dict[str, Any]:
    """Let every drafter draft for every story."""
    made = provenance()
    target = load(str(TINY / "target"), "float32")
    stories = openings(STORIES)
    runs = []
    for kind, sampling in SAMPLING.items():
        asked = {**sampling, "max_tokens": TOKENS}
        plain = outrider.generate(target, stories, drafter=None, sampling=asked).outputs
        for name, drafter in track(drafters(target).items(), kind):
            found = drafted(target, stories, drafter, asked, DRAFTS, plain)
            runs.append({"drafter": name, "sampling": kind, **found})
        for name, width in TREES.items():
            drafter = head_drafter(TINY / "head", target, width=width)
            found = drafted(target, stories, drafter, asked, TREE_DRAFTS, plain)
            runs.append({"drafter": f"{name}, {TREE_DRAFTS} drafts", "sampling": kind, **found})
    return {
        **{"provenance": made, "stories": STORIES, "prompt_tokens": OPENING, "tokens": TOKENS},
        **{"max_drafts": DRAFTS, "runs": runs},
    }


def openings(count: int) -> list[list[int]]:
    """Return prompts: openings of stories that no training has seen."""
    tokenizer, rng = AutoTokenizer.from_pretrained(TINY / "target"), random.Random(SEED)
    return [tokenizer.encode(write_story(rng))[:OPENING] for _ in range(count)]


def drafters(target: Any) -> dict[str, Any]:
    """Return what drafts, by name. Heads draft as far as they may, as the others do."""
    draft = load(str(TINY / "draft"), "float32")
    found: dict[str, Any] = {
        "ngram": outrider.NgramDrafter(),
        "suffix": outrider.SuffixDrafter(),
        "draft model": ModelDrafter(Runner(draft), target.config.vocab_size, min_survival=0.0),
    }
    return found | {name: head_drafter(TINY / folder, target) for name, folder in HEADS.items()}


def head_drafter(folder: Path, target: Any, **options: Any) -> Any:
    """Return a drafter with this head, which drafts as far as it may."""
    head = outrider.load_drafter(folder)
    return head.drafter(target, target.config.vocab_size, min_survival=0.0, **options)


def drafted(
    target: Any,
    prompts: Sequence[Sequence[int]],
    drafter: Any,
    sampling: dict[str, Any],
    max_drafts: int,
    plain: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Return how far a drafter came, and in how many tokens the answers differ from plain ones."""
    done = outrider.generate(
        target, prompts, drafter=drafter, sampling=sampling, max_drafts=max_drafts
    )
    stats = done.stats
    depths = (stats.accepted_at[i] / max(1, stats.request_steps) for i in range(1, max_drafts + 1))
    return {
        "tokens": stats.emitted,
        "different": different_tokens(done.outputs, plain),
        "tokens_per_step": round(stats.accept_length, 3),
        "accepted_at": [round(share, 3) for share in depths],
    }


def learning_curve() -> dict[str, Any]:
    """Train an EAGLE-3 head, and return what it is worth after so many tokens of training."""
    made, asked, stories = provenance(), {"max_tokens": TOKENS}, openings(TRIED)
    target = load(str(TINY / "target"), "float32")
    plain = outrider.generate(target, stories, drafter=None, sampling=asked).outputs
    points = []
    with tempfile.TemporaryDirectory() as folder:
        lessons, rng = Path(folder) / "stories.txt", random.Random(SEED + 1)
        lessons.write_text("\n".join(write_story(rng) for _ in range(LESSONS)))
        options = ["--batch", "4", "--steps", str(CURVE[-1]), "--save-at", *map(str, CURVE)]
        command = [str(SCRIPTS / "train_head.py"), str(TINY / "target"), "--out", folder, *options]
        subprocess.run([sys.executable, *command, "--text", str(lessons)], check=True)
        for step in track(CURVE, "learning curve"):
            head = Path(folder) / f"step-{step}"
            told = json.loads((head / "training.json").read_text())
            found = drafted(target, stories, head_drafter(head, target), asked, DRAFTS, plain)
            found["loss"] = told["curve"][-1]["loss"]
            points.append({"steps": step, "trained_tokens": told["tokens"], **found})
    shown = ["train_head.py", "src/outrider/assets/tiny/target", "--out", "HEAD", *options]
    return {
        **{"provenance": made, "command": " ".join([*shown, "--text", lessons.name])},
        **{"stories": TRIED, "trained_on_stories": LESSONS, "sampling": "greedy"},
        "points": points,
    }


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was to be shown, and whether it was."""
    runs, points = result["runs"], result["learning_curve"]["points"]
    per_step = {(run["drafter"], run["sampling"]): run["tokens_per_step"] for run in runs}
    least = min(per_step["eagle3", kind] - per_step["draft model", kind] for kind in SAMPLING)
    different = sum(run["different"] for run in [*runs, *points])
    chain, tree = (f"{name}, {TREE_DRAFTS} drafts" for name in TREES)
    grown = min(per_step[tree, kind] - per_step[chain, kind] for kind in SAMPLING)
    learnt = points[-1]["tokens_per_step"] - points[0]["tokens_per_step"]
    return [
        {"goal": "answers are plain decoding's", "value": different, "met": different == 0},
        {
            "goal": "EAGLE-3 gives more tokens a step than the draft model",
            "value": round(least, 3),
            "met": least > 0,
        },
        {
            "goal": "training an EAGLE-3 head adds two tokens a step or more",
            "value": round(learnt, 3),
            "met": learnt >= 2,
        },
        {
            "goal": "a tree gives more tokens a step than a chain, greedy and sampled",
            "value": round(grown, 3),
            "met": grown > 0,
        },
    ]


def show(result: dict[str, Any]) -> None:
    """Print tokens a step, and how often the draft at each depth was accepted."""
    table = Table("drafter", "sampling", "tokens a step", "accepted at depth 1, 2, ...")
    curve = result["learning_curve"]
    trained = [
        {
            "drafter": f"{point['trained_tokens']:,} tokens of training",
            "sampling": curve["sampling"],
            **point,
        }
        for point in curve["points"]
    ]
    for run in [*result["runs"], *trained]:
        depths = " ".join(f"{share:.2f}" for share in run["accepted_at"])
        table.add_row(run["drafter"], run["sampling"], f"{run['tokens_per_step']:.2f}", depths)
    Console().print(table)
    show_goals(result["goals"])


def plot(result: dict[str, Any], folder: Path = IMAGES) -> None:
    """Draw what training brings: tokens a step, and acceptance by depth."""
    plt = pyplot()
    if plt is None:
        return
    points = result["learning_curve"]["points"]
    tokens = [point["trained_tokens"] for point in points]
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3), layout="constrained")
    left.plot(tokens, [p["tokens_per_step"] for p in points], color="#0a6ebd", marker="o")
    left.set(ylabel="tokens a step", ylim=(1, DRAFTS + 1))
    depths = (1, 2, 4, DRAFTS)
    colours = ("#0a6ebd", "#7b2fa8", "#c77700", "#5a5a5a")
    for depth, colour, marker in zip(depths, colours, "osD^", strict=True):
        shares = [p["accepted_at"][depth - 1] for p in points]
        right.plot(tokens, shares, color=colour, marker=marker, label=f"draft {depth}")
    right.set(ylabel="accepted, share of steps", ylim=(0, 1))
    right.legend(frameon=False)
    for ax in (left, right):
        ax.set_xscale("log")
        ax.grid(color="#e4e4e4", linewidth=0.6)
    figure.supxlabel("tokens of training")
    save_plot(figure, "heads", folder)


if __name__ == "__main__":
    main()
