"""A head for a real model on narrow text: Python's standard library.

    python scripts/train_head.py SMOLLM2 --out build/head --draft-vocab 8192 --fc-norm \
        --batch 4 --length 128 --rate 1e-3 --steps 900 --save-at 15 50 150 300 600 \
        --text $(python benchmarks/heads_domain.py --texts)
    python benchmarks/heads_domain.py build/head
    python benchmarks/heads_domain.py --report   # the table, the goals and the plot of the last run

SMOLLM2 is the directory of SmolLM2-135M-Instruct. One file of eight is held out, by a hash of its
name. The target goes on from the middle of each of these; n-grams, suffixes and the head draft,
four tokens at most. All answers are compared with plain decoding's. Training was stopped after step
600: the head is that checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from common import IMAGES, load, model_path, pyplot, save_plot, write
from heads import SAMPLING, drafted, head_drafter, show
from rich.progress import track
from transformers import AutoTokenizer

import outrider
from outrider.report import provenance

RESULT = Path(__file__).parent / "results" / "heads_domain.json"
PROMPTS, OPENING, TOKENS, DRAFTS = 16, 96, 48, 4
SKIPPED = {"__pycache__", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test",
           "tests", "turtledemo"}  # fmt: skip
"""Folders that have tests, tables, or code of others."""


def main() -> None:
    """Measure and report, or say which texts to train on."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("head", type=Path, nargs="?", help="written by train_head.py")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--texts", action="store_true", help="list the files to train on")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if args.texts:
        print(*texts(held_out=False), sep="\n")
        return
    if args.report:
        result = json.loads(RESULT.read_text())
    elif args.head and (args.head / "training.json").is_file():
        result = measure(args.target, args.head)
    else:
        parser.error("name the directory of a head that scripts/train_head.py wrote")
    result["goals"] = goals(result)
    write("heads_domain", result, RESULT)
    show(result)
    plot(result)


def texts(*, held_out: bool) -> list[Path]:
    """Return the standard library's files: those to train on, or those held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {file.relative_to(root): file for file in sorted(root.rglob("*.py"))}
    return [
        file
        for name, file in files.items()
        if SKIPPED.isdisjoint(name.parts)
        and not name.parts[0].startswith(("config-", "_sysconfigdata"))
        and (zlib.crc32(name.as_posix().encode()) % 8 == 0) == held_out
    ]


def prompts(tokenizer: Any) -> list[list[int]]:
    """Return what stands before the middle of held-out files, the largest ones."""
    files = sorted(texts(held_out=True), key=lambda file: -file.stat().st_size)[:PROMPTS]
    found = []
    for file in files:
        text = file.read_text("utf-8")
        middle = text.index("\n", len(text) // 2) + 1
        found.append(tokenizer.encode(text[:middle])[-OPENING:])
    return found


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Let lookups, the head and its checkpoints draft."""
    made = provenance()
    target = load(name, "float32")
    asked_for = prompts(AutoTokenizer.from_pretrained(model_path(name)))
    training = json.loads((folder / "training.json").read_text())
    runs, points = [], []
    for kind, sampling in SAMPLING.items():
        asked = {**sampling, "max_tokens": TOKENS, "ignore_eos": True}
        plain = outrider.generate(target, asked_for, drafter=None, sampling=asked).outputs
        drafters = {
            "ngram": outrider.NgramDrafter(),
            "suffix": outrider.SuffixDrafter(),
            training["kind"]: head_drafter(folder, target),
        }
        for drafter, made_drafter in track(drafters.items(), kind):
            found = drafted(target, asked_for, made_drafter, asked, DRAFTS, plain)
            runs.append({"drafter": drafter, "sampling": kind, **found})
        if kind != "greedy":
            continue
        for checkpoint in track(checkpoints(folder), "learning curve"):
            told = json.loads((checkpoint / "training.json").read_text())
            drafter = head_drafter(checkpoint, target)
            found = drafted(target, asked_for, drafter, asked, DRAFTS, plain)
            points.append({"steps": told["done"], "trained_tokens": told["tokens"], **found})
    return {
        **{"provenance": made, "target": name, "text": "Python's standard library"},
        **{"prompts": PROMPTS, "prompt_tokens": OPENING, "tokens": TOKENS, "max_drafts": DRAFTS},
        **{"training": training, "runs": runs},
        "learning_curve": {"sampling": "greedy", "points": points},
    }


def checkpoints(folder: Path) -> list[Path]:
    """Return the directories of a head's checkpoints, in order."""
    return sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was to be shown, and whether it was."""
    points = result["learning_curve"]["points"]
    different = sum(run["different"] for run in [*result["runs"], *points])
    losses = [point["loss"] for point in result["training"]["curve"]]
    learnt = points[-1]["tokens_per_step"] - points[0]["tokens_per_step"]
    head = result["training"]["kind"]
    found = {(run["drafter"], run["sampling"]): run["tokens_per_step"] for run in result["runs"]}
    sampled = found[head, "T = 0.7"] - max(found[name, "T = 0.7"] for name in ("ngram", "suffix"))
    return [
        {"goal": "answers are plain decoding's", "value": different, "met": different == 0},
        {
            "goal": "the loss falls by a quarter or more",
            "value": round(losses[-1] / losses[0], 3),
            "met": losses[-1] <= 0.75 * losses[0],
        },
        {
            "goal": "training adds tokens a step",
            "value": round(learnt, 3),
            "met": learnt > 0,
        },
        {
            "goal": "T = 0.7: the head gives more tokens a step than n-grams and suffixes",
            "value": round(sampled, 3),
            "met": sampled > 0,
        },
    ]


def plot(result: dict[str, Any], folder: Path = IMAGES) -> None:
    """Draw what training brings: the loss, and tokens a step beside the lookups."""
    plt = pyplot()
    if plt is None:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3), layout="constrained")
    curve, points = result["training"]["curve"], result["learning_curve"]["points"]
    left.plot([p["tokens"] for p in curve], [p["loss"] for p in curve], color="#0a6ebd")
    left.set(ylabel="cross entropy, training", ylim=(0, None))
    tokens, per_step = zip(
        *((p["trained_tokens"], p["tokens_per_step"]) for p in points), strict=True
    )
    right.plot(tokens, per_step, color="#0a6ebd", marker="o", label=result["training"]["kind"])
    for name, colour, style in (("ngram", "#c77700", "--"), ("suffix", "#7b2fa8", ":")):
        run = next(r for r in result["runs"] if (r["drafter"], r["sampling"]) == (name, "greedy"))
        right.axhline(run["tokens_per_step"], color=colour, linestyle=style, label=name)
    right.set(ylabel="tokens a step, greedy", ylim=(1, None))
    right.legend(frameon=False)
    for ax in (left, right):
        ax.grid(color="#e4e4e4", linewidth=0.6)
        ax.set_xlim(left=0)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f}k")
    figure.supxlabel("tokens of training")
    save_plot(figure, "heads_domain", folder)


if __name__ == "__main__":
    main()
