"""Every class of Transformers' causal-LM mapping: are our tokens those of its own `generate`?

    python benchmarks/transformers_models.py                # 15 minutes on one core
    python benchmarks/transformers_models.py Phi3 Gemma     # classes whose names have one of these
    python benchmarks/transformers_models.py --report       # the table of the last run

Each class is built as tiny random models: with a window of 8 tokens, without, and with longrope.
The tokens of a batch of prompts of different lengths are compared with those of the model's own
greedy `generate`, one prompt at a time: without drafts, with n-grams, with the model as its own
draft; at both levels of exactness. A class is *equal*, *refused*, *not buildable* as a tiny model,
or DIFFERENT, which fails the run.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from common import write
from rich.console import Console
from rich.progress import track
from tiny_classes import VOCAB, build, classes, variants

import outrider
from outrider.errors import one_line

RESULT = Path(__file__).parent / "results" / "transformers_models.json"
LENGTHS, TOKENS = (5, 24, 50), 24
LIMIT = 120.0
"""Seconds that one model may take."""

RUNS: dict[str, dict[str, Any]] = {
    "lossless, no drafts": {"drafter": "none", "max_drafts": 0},
    "lossless, n-grams": {"drafter": "ngram"},
    "lossless, itself": {"drafter": "itself", "max_drafts": 5},
    "bitwise, no drafts": {"drafter": "none", "max_drafts": 0, "exactness": "bitwise"},
    "bitwise, itself": {"drafter": "itself", "max_drafts": 5, "exactness": "bitwise"},
}


class SlowError(BaseException):
    """A model took too long; no part of it may catch this."""


def main() -> None:
    """Compare and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of class names; all classes by default")
    parser.add_argument("--report", action="store_true", help="compare nothing")
    args = parser.parse_args()
    if args.report:
        result = json.loads(RESULT.read_text())
    else:
        result = summary(compare(args.names))
        if not args.names:
            write("transformers_models", result, RESULT)
    show(result)
    sys.exit(1 if result["counts"].get("DIFFERENT") else 0)


def compare(names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return what became of each class and variant."""
    with quiet():
        return compared(names)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what libraries log and warn of, and give everything back: tests run this, too."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.logging.set_verbosity(verbosity)


def compared(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what became of each class and variant whose class name has one of these parts."""
    chosen = [
        (config, kind)
        for config, kind in classes()
        if not names or any(name.lower() in kind.__name__.lower() for name in names)
    ]
    found: dict[str, dict[str, Any]] = {}
    for config, kind in track(chosen, console=Console(stderr=True)):
        try:
            changes = variants(config)
        except Exception as error:  # of any configuration
            found[kind.__name__] = {"usual": not_buildable(error)}
            continue
        found[kind.__name__] = {
            name: one(lambda change=change: build(kind, config, change))  # noqa: B023
            for name, change in changes.items()
        }
        gc.collect()
    return found


def not_buildable(error: BaseException) -> dict[str, str]:
    """Return the verdict on a model that cannot be made or cannot generate by itself."""
    return {"verdict": "not buildable", "why": one_line(f"{type(error).__name__}: {error}")[:200]}


@contextmanager
def within_limit() -> Iterator[None]:
    """Raise SlowError if the time is over."""

    def ring(*_: object) -> None:
        raise SlowError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def one(make: Callable[[], Any]) -> dict[str, Any]:
    """Return the verdict on one model, and what each run gave."""
    try:
        with within_limit():
            try:
                model = make()
                prompts, expected = plain(model)
            except Exception as error:  # of any class
                return not_buildable(error)
            runs = {name: run(model, prompts, expected, **how) for name, how in RUNS.items()}
    except SlowError:
        return {"verdict": "not buildable", "why": f"took longer than {LIMIT:.0f} s"}
    verdicts = [found["verdict"] for found in runs.values()]
    worst = next((v for v in ("DIFFERENT", "equal") if v in verdicts), "refused")
    return {"verdict": worst, "runs": runs}


def plain(model: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts, and what the model's own `generate` makes of each, alone."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCAB - 1, (n,), generator=generator).tolist() for n in LENGTHS]
    outputs = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        mask = torch.ones_like(given)
        made = model.generate(given, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
        outputs.append(made[0, len(prompt) :].tolist())
    return prompts, outputs


def run(
    model: Any, prompts: list[list[int]], expected: list[list[int]], drafter: str, **how: Any
) -> dict[str, Any]:
    """Return whether one run gives the expected tokens."""
    try:
        found = outrider.generate(
            model,
            prompts,
            drafter=model if drafter == "itself" else drafter,
            sampling={"max_tokens": TOKENS},
            **how,
        )
    except outrider.Unsupported as error:
        return {"verdict": "refused", "why": str(error)}
    except Exception as error:  # counts as a fault, whatever it is
        return {"verdict": "DIFFERENT", "why": one_line(f"{type(error).__name__}: {error}")}
    if found.outputs != expected:
        pairs = zip(found.outputs, expected, strict=True)
        return {"verdict": "DIFFERENT", "prompts": [ours == own for ours, own in pairs]}
    length = found.stats.accept_length if drafter != "none" else 1.0
    return {"verdict": "equal", "accept_length": round(length, 2)}


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the result: a class has the worst verdict of its variants."""
    order = ("DIFFERENT", "equal", "refused", "not buildable")
    verdicts = {
        name: next(v for v in order if any(one["verdict"] == v for one in of.values()))
        for name, of in found.items()
    }
    runs = [
        run for of in found.values() for one in of.values() for run in one.get("runs", {}).values()
    ]
    compared = sum(run["verdict"] == "equal" for run in runs)
    return {
        "transformers": transformers.__version__,
        "counts": dict(Counter(verdicts.values())),
        "sequences_equal": compared * len(LENGTHS),
        "tokens_equal": compared * len(LENGTHS) * TOKENS,
        "verdicts": verdicts,
        "classes": found,
    }


def show(result: dict[str, Any]) -> None:
    """Print the classes by verdict, and why the others are not equal."""
    for name, of in result["classes"].items():
        for variant, one in of.items():
            whys = [run["why"] for run in one.get("runs", {}).values() if "why" in run]
            why = one.get("why") or next(iter(whys), "")
            print(f"{name:36} {variant:10} {one['verdict']:14} {why}"[:200])
    print(result["counts"], f"{result['tokens_equal']:,} tokens equal")


if __name__ == "__main__":
    main()
