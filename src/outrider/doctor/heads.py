"""A head beside its target: whether it was made for it, and which states it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.doctor.finding import Finding
from outrider.doctor.model import Model
from outrider.errors import Unsupported

__all__ = ["check_head", "is_head", "is_own_layer"]

_TENSORS = ("fc.weight", "midlayer.", "eh_proj.weight", "mtp.", "mtp_layers.")
_OTHER = "use the head with the target that it was trained for"


def is_head(model: Model) -> bool:
    """Say whether these are the files of a head: by config.json, else by what tensors it has."""
    names = " ".join(model.architectures).lower()
    # of models with MTP layers within them, keys name nextn too
    keys = " ".join(map(str, model.whole)).lower()
    if any(part in f"{names} {keys}" for part in ("eagle", "dflash", "speculators_model_type")):
        return True
    if "nextn" in names or "draft_vocab_size" in model.whole:
        return True
    tensors = [tensor.name for tensor in model.tensors or ()]
    has_model = any(name.endswith("layers.1.mlp.down_proj.weight") for name in tensors)
    return not has_model and any(name.startswith(_TENSORS) for name in tensors)


def is_own_layer(target: Model, draft: Model) -> bool:
    """Say whether the target is named twice, and has an MTP layer: then that layer drafts."""
    try:
        from outrider.drafters.heads.formats import has_mtp
    except ImportError:  # without PyTorch
        return False
    return Path(draft.path).resolve() == Path(target.path).resolve() and has_mtp(target.whole)


def check_head(target: Model, head: Model, is_own: bool = False) -> Iterator[Finding]:
    """Compare a head's config.json with its target's.

    is_own: whether it is the MTP layer among the target's own weights
    """
    try:
        from outrider.drafters.heads.formats import head_layers, head_shape, kind_of
    except ImportError:
        yield Finding(
            "models", "note", f"{head.name} is a head, which was not looked at",
            "PyTorch is not installed here", "pip install torch",
        )  # fmt: skip
        return
    layers = target.layers or 0
    try:
        kind = "mtp" if is_own else kind_of(head.whole)
        shape = head_shape(head.whole, head.path, kind)
        read = head_layers(head.whole, layers, kind)
    except Unsupported as error:
        yield Finding("models", "problem", f"{head.name}: {error.what}", fix=error.fix)
        return
    wrong = {
        "width": (target.hidden, shape.hidden_size),
        "vocabulary": (target.config.get("vocab_size"), shape.vocab_size),
    }
    for what, (theirs, own) in wrong.items():
        if theirs is not None and theirs != own:
            said = f"{head.name} is for a target with a {what} of {own:,}; {target.name} has "
            yield Finding("models", "problem", f"{said}{theirs:,}", "it is not loaded", _OTHER)
    how = "speculators" if "speculators_model_type" in head.whole else "SGLang"
    said = f"{head.name} is a head ({kind}, in the format of {how}) that reads "
    if is_own:
        said = f"{head.name} has a head among its own weights ({kind}), which reads "
    many = "the last states" if read == (layers,) else f"the states of layers {list(read)}"
    yield Finding("models", "ok", f"{said}{many} of {target.name}'s {layers} layers")
    yield from _check_count(head, layers, how)
    yield from _check_verifier(target, head)
    if read != (layers,) and not all(0 < i < layers for i in read):
        yield Finding(
            "hosts", "warning", f"{head.name} is refused in SGLang",
            "SGLang gives the states of inner layers, or those of the last",
            "use it with Transformers",
        )  # fmt: skip
    if target.context is not None and shape.max_length < target.context:
        yield Finding(
            "context", "note",
            f"{head.name} was made for {shape.max_length:,} positions, {target.name} has "
            f"{target.context:,}",
            "drafts beyond that are less good in SGLang, and there are none with Transformers",
        )  # fmt: skip


def _check_count(head: Model, layers: int, how: str) -> Iterator[Finding]:
    """Warn of ids that look as if they were counted in the other way."""
    key = "eagle_aux_hidden_state_layer_ids"
    nested: dict[str, Any] = head.whole.get("eagle_config") or {}
    ids = head.whole.get(key) or nested.get(key)
    usual = [2, layers // 2, layers - 3]
    other = usual if how == "SGLang" else [i - 1 for i in usual]
    if ids is not None and list(ids) == other:
        names = {"SGLang": "speculators and vLLM", "speculators": "SGLang"}
        yield Finding(
            "models", "warning",
            f"{head.name}: the layer ids {list(ids)} are the usual ones as {names[how]} count them",
            f"as {how} counts they name the neighbours: drafts would be worse, answers the same",
            "compare the accept length with ids that are one "
            + ("less" if how == "SGLang" else "more"),
        )  # fmt: skip


def _check_verifier(target: Model, head: Model) -> Iterator[Finding]:
    """Say so if a head names another target."""
    about = head.whole.get("speculators_config") or {}
    named = (about.get("verifier") or {}).get("name_or_path")
    if named and Path(str(named)).name.lower() != target.path.name.lower():
        yield Finding(
            "models", "note", f"{head.name} names {named} as its target, not {target.name}",
            "with another one it costs speed only, if the shapes fit", _OTHER,
        )  # fmt: skip
