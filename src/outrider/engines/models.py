"""Models of Transformers, heads and drafters, as users name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.errors import Unsupported, UsageError, check_choice

__all__ = ["check_drafter", "check_target", "draft_kind", "load_model", "load_tokenizer"]

ONLY_DATA = {"use_safetensors": True, "trust_remote_code": False}
"""How models are loaded: no pickle is read, and no code of a checkpoint is run or asked about."""


def check_drafter(name: str) -> None:
    """Refuse a name that no drafter has, and list those there are."""
    from outrider.drafters.registry import known_drafters

    check_choice("drafter", name, known_drafters("adaptive", "model"), error=UsageError)


def draft_kind(path: str) -> str:
    """Return what a draft is, by its files here: "model", or a kind of head as `eagle3`."""
    if not (Path(path) / "config.json").is_file():
        return "model"  # a name of the hub, or a mistake that whoever loads it will meet
    from outrider.drafters.heads.formats import kind_of, read_config

    return kind_of(read_config(Path(path)))


def check_target(name: str) -> None:
    """Refuse a head where a model is expected."""
    if (kind := draft_kind(name)) != "model":
        raise UsageError(
            f"{name} is a head ({kind}), not a model",
            fix="name the model that it drafts for, and the head as the draft",
        )


def load_model(name: str, dtype: Any) -> Any:
    """Return a model of Transformers, ready to generate. Raises Unsupported if there is none."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **ONLY_DATA).eval()
    except Exception as error:  # of each library that reads a part of it
        why = (str(error) or type(error).__name__).splitlines()[0]
        if not Path(name).exists() and (name.count("/") > 1 or name.startswith(("/", ".", "~"))):
            why = "no such directory"  # the hub's rules for names would be no help
        raise Unsupported(
            f"no model at {name!r} ({why:.200})",
            fix="give a directory with config.json and weights, or a name of the hub",
        ) from error


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model of Transformers. Raises Unsupported if it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of each library that reads a part of it
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise Unsupported(
            f"no tokenizer at {name!r} ({why:.200})",
            fix="put the model's tokenizer.json and tokenizer_config.json there",
        ) from error
