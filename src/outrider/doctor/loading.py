"""Whether a model can be loaded: the checks that loading makes, made without its memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

from outrider.checkpoint import Checkpoint, misfits
from outrider.doctor.finding import Area, Finding
from outrider.doctor.model import Model
from outrider.doctor.tokens import has_tokenizer
from outrider.errors import Unsupported

__all__ = ["check_loading"]


def check_loading(model: Model, in_sglang: bool) -> Iterator[Finding]:
    """Say what loading would refuse of a model that is not a head.

    in_sglang: whether SGLang, which has classes of its own, may serve it instead
    """
    if model.tensors is not None:
        found = Checkpoint(model.path, model.whole, model.tensors)
        for error in misfits(found):
            yield _problem(model, error)
            return
        yield from _built(model, found, in_sglang)
    if has_tokenizer(model):
        yield from _refusals(model, "tokenizer", lambda: _load_tokenizer(model))


def _built(model: Model, found: Checkpoint, in_sglang: bool) -> Iterator[Finding]:
    """Build the model without memory, if Transformers knows it."""
    if importlib.util.find_spec("transformers") is None:
        return
    from outrider.engines.transformers.loading import check_model, is_known

    if is_known(found) or not in_sglang:
        yield from _refusals(model, "models", lambda: check_model(found))


def _load_tokenizer(model: Model) -> None:
    if importlib.util.find_spec("transformers") is not None:
        from outrider.engines.transformers.loading import load_tokenizer

        load_tokenizer(model.path)


def _refusals(model: Model, area: Area, load: Callable[[], None]) -> Iterator[Finding]:
    try:
        load()
    except ImportError:  # Transformers without torch
        return
    except Unsupported as error:
        yield _problem(model, error, area)


def _problem(model: Model, error: Unsupported, area: Area = "models") -> Finding:
    return Finding(area, "problem", f"{model.name}: {error.what}", "it is not loaded", error.fix)
