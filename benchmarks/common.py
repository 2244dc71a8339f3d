"""What the benchmarks share: prompts, models, and where a figure comes from."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from outrider.redact import hide
from outrider.report import provenance

os.environ.setdefault("HF_HUB_OFFLINE", "1")

IMAGES = Path(__file__).parents[1] / "docs" / "img"
PROMPTS = {
    "code": [
        "Write a Python class for a binary search tree with insert, find and delete.",
        "Write a Python function that parses a line of CSV with quoted fields. Only code.",
    ],
    "chat": [
        "What should I look at when I buy a used bicycle?",
        "Explain to a new colleague what a pull request is and how a review works.",
    ],
    "prose": [
        "Write a short story about a lighthouse keeper who finds a letter.",
        "Describe an old market town on the morning of a fair.",
    ],
}


def model_path(name: str) -> str:
    """Return the path of a model under $OUTRIDER_MODELS, or the name itself."""
    root = Path(os.environ.get("OUTRIDER_MODELS", "~/.cache/outrider-models")).expanduser()
    return str(root / name) if (root / name).exists() else name


def load(name: str, dtype: str) -> Any:
    """Load a causal language model, its weights read into memory once."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    path = model_path(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))  # the first pass reads the weights from disk
    return model


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a user's message as the model expects it."""
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(prompt, add_special_tokens=False))


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the extremes."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def at_least(goal: str, value: float, least: float) -> dict[str, Any]:
    """Return a goal, and whether a figure meets it."""
    return {"goal": goal, "value": round(value, 3), "met": value >= least}


def of_best(times: Mapping[str, float], name: str = "adaptive") -> float:
    """Return how fast one contender is beside the best of the others."""
    return times[name] / max(value for other, value in times.items() if other != name)


def show_goals(goals: Sequence[dict[str, Any]]) -> None:
    """Print what was to be shown, and whether it was."""
    for goal in goals:
        print(f"{'met' if goal['met'] else 'missed'}: {goal['goal']} ({goal['value']})")


def different_tokens(outputs: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> int:
    """Return in how many places answers differ; a place that only one of them has is different."""
    pairs = zip(outputs, plain, strict=True)
    return sum(x != y for a, b in pairs for x, y in zip_longest(a, b))


def pyplot() -> Any:
    """Return matplotlib's pyplot, set to make the same SVG of the same figures; None without it."""
    if find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.size": 9}
    matplotlib.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    from matplotlib import pyplot as plt

    return plt


def save_plot(figure: Any, topic: str, folder: Path = IMAGES) -> None:
    """Write docs/img/<topic>.svg, or to another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{topic}.svg"
    figure.savefig(file, facecolor="white", metadata={"Date": None})
    print(f"wrote {_shown(file)}")


def write(topic: str, result: dict[str, Any], file: Path | None = None) -> None:
    """Write benchmarks/results/<topic>.json, or another file.

    The provenance is this run's, unless the result brings that of the run that measured.
    """
    file = file or Path(__file__).parent / "results" / f"{topic}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    made = {} if "provenance" in result else {"provenance": provenance()}
    file.write_text(hide(json.dumps({**made, **result}, indent=2)) + "\n")
    print(f"wrote {_shown(file)}")


def _shown(file: Path) -> Path:
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
