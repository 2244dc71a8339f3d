"""Where models come from, and one thread for the tiny ones."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "core"))

TINY = Path(__file__).parents[1] / "src" / "outrider" / "assets" / "tiny"


def pytest_configure(config):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny models are faster, and tests beside each other steadier, on one thread."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def model_path(name: str) -> Path:
    """Return where a model lies: in the repository, or under $OUTRIDER_MODELS."""
    if name.startswith("tiny-"):
        return TINY / name.removeprefix("tiny-")
    root = Path(os.environ.get("OUTRIDER_MODELS", "~/.cache/outrider-models")).expanduser()
    return root / name


def found(name: str) -> Path:
    """Return where a model lies, or skip the test; where models are required, fail it."""
    path = model_path(name)
    if not (path / "config.json").exists():
        say = pytest.fail if os.environ.get("OUTRIDER_REQUIRE_MODELS") else pytest.skip
        say(f"no model {name} under $OUTRIDER_MODELS")
    return path


@pytest.fixture(scope="session")
def model_dir():
    """Return a function that says where a model lies, or skips the test."""
    return found


@lru_cache(maxsize=6)
def _load(name: str, dtype: str):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(found(name), dtype=getattr(torch, dtype)).eval()


@pytest.fixture(scope="session")
def load():
    """Return a function that loads a model by name: load("stories15m", "float32")."""
    return lambda name, dtype="float32": _load(name, dtype)


@pytest.fixture(scope="session")
def tokenizer():
    """Return a function that loads a tokenizer by its model's name."""
    from transformers import AutoTokenizer

    return lambda name: AutoTokenizer.from_pretrained(found(name))


def pytest_terminal_summary(terminalreporter):
    """Say how much was compared with plain decoding."""
    reports = terminalreporter.getreports("passed")
    for unit in ("tokens", "requests"):
        key = f"{unit} compared"
        total = sum(value for r in reports for name, value in r.user_properties if key in name)
        if total:
            terminalreporter.write_line(f"{key} with plain decoding: {total:,}, all equal")
