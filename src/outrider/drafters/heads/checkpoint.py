"""Heads as people publish them: one loader for the formats of SpecForge/SGLang and speculators.

Both keep `config.json` beside safetensors. They differ in names, and in how they count the target's
layers: SGLang's id j is the output of layer j (the first is 0), which is `hidden_states[j + 1]` in
Transformers; speculators' id i is `hidden_states[i]`. Outrider counts as Transformers does.

A tensor that is missing or unknown is an error that names it. Pickled weights are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core import Unsupported
from outrider.drafters.heads.eagle3 import Eagle3Head
from outrider.drafters.heads.layers import HeadConfig

SPECULATORS = "speculators_model_type"
EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Architectures of EAGLE-3 heads in the format of SpecForge and SGLang."""

UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""What a checkpoint may hold that drafting has no use for: `t2d` follows from `d2t`."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the config.json of a directory."""
    try:
        found = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Unsupported(f"{path}: {error}", fix="name a directory with config.json") from None
    if not isinstance(found, dict):
        raise Unsupported(f"{path}/config.json is not an object", fix="name a model's directory")
    return found


def kind_of(config: Mapping[str, Any]) -> str:
    """Return what a config.json describes: "eagle3", or "model" for a causal language model."""
    if SPECULATORS in config:
        found = str(config[SPECULATORS])
    else:
        names = config.get("architectures") or [""]
        found = "eagle3" if names[0] in EAGLE3 else "model"
    if found not in ("eagle3", "model"):
        raise Unsupported(f"a head of the kind {found!r}", fix="eagle3, or a causal language model")
    return found


@torch.inference_mode(mode=False)  # weights made in a caller's could not be used outside it
def load_head(
    path: str | Path, embedding: Tensor, num_layers: int, dtype: torch.dtype | None = None
) -> Eagle3Head:
    """Return the head in a directory, for a target.

    embedding: the target's, [V, H]; the head shares it unless it brings its own
    num_layers: of the target; says which layers' states are read if the checkpoint does not
    dtype: of the head's weights; the target's by default
    """
    path = Path(path)
    config = read_config(path)
    size, layers = head_shape(config, path), head_layers(config, num_layers)
    given = _weights(path)
    own = given.get("embed_tokens.weight")
    used = embedding if own is None else own
    if used.shape != (size.vocab_size, size.hidden_size):
        raise Unsupported(
            f"the head at {path} is for embeddings of {size.vocab_size} x {size.hidden_size}, and "
            f"these are {used.shape[0]} x {used.shape[1]}",
            fix="use the head with the target that it was trained for",
        )
    head = Eagle3Head(size, layers, used.shape[1])
    given["embed_tokens.weight"] = used
    _fill(head, given, path)
    return head.to(dtype or embedding.dtype).to(embedding.device).eval().requires_grad_(False)


def head_shape(config: Mapping[str, Any], path: str | Path) -> HeadConfig:
    """Return the shape of a head. path: where it is, for messages"""
    kind = kind_of(config)
    if kind == "model":
        raise Unsupported(f"{path} is a {kind}, not a head", fix="load it as a draft model")
    shape = dict(config)
    if SPECULATORS in config:
        shape = {**config.get("transformer_layer_config", {})}
        shape["draft_vocab_size"] = config.get("draft_vocab_size")
    try:
        return HeadConfig.of(shape)
    except KeyError as error:
        fix = "complete it from the head's page"
        raise Unsupported(f"{path}/config.json has no {error}", fix=fix) from None


def head_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose states a head reads, as Transformers counts them.

    num_layers: of the target
    """
    nested = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or nested.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    found = [2, num_layers // 2, num_layers - 3]
    if ids:
        found = [int(i) + (0 if SPECULATORS in config else 1) for i in ids]
    if not all(0 <= i <= num_layers for i in found):
        raise Unsupported(
            f"a head that reads layers {ids or found} of a target with {num_layers}",
            fix="use the head with the target that it was trained for",
        )
    return tuple(found)


def _weights(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a directory, by the names of SpecForge."""
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise Unsupported(f"no safetensors in {path}", fix="convert the head's weights")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        except Exception as error:  # a library's own class, without a base in common
            raise Unsupported(f"{file}: {error}", fix="download the head again") from None
    return {_name(name): tensor for name, tensor in found.items()}


def _name(name: str) -> str:
    """Return SpecForge's name of a tensor; speculators calls the layer `layers.0`."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _fill(head: Eagle3Head, given: dict[str, Tensor], path: Path) -> None:
    """Give the head its weights. Every tensor must be there, be known, and have its shape."""
    expected = head.state_dict()
    given = {name: tensor for name, tensor in given.items() if name not in UNUSED}
    if "d2t" not in given and head.config.draft_vocab_size == head.config.vocab_size:
        given["d2t"] = expected["d2t"]
    missing = sorted(expected.keys() - given.keys())
    unknown = sorted(given.keys() - expected.keys())
    wrong = sorted(
        f"{name}: {tuple(given[name].shape)}, not {tuple(expected[name].shape)}"
        for name in expected.keys() & given.keys()
        if given[name].shape != expected[name].shape
    )
    said = [
        f"{what} {', '.join(names)}"
        for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", wrong))
        if names
    ]
    if said:
        raise Unsupported(f"the head at {path}: {'; '.join(said)}", fix="use an EAGLE-3 head")
    reach = torch.arange(len(given["d2t"])) + given["d2t"]
    if ((reach < 0) | (reach >= head.config.vocab_size)).any():
        raise Unsupported(
            f"the head at {path}: d2t leaves the vocabulary", fix="download the head again"
        )
    for name, parameter in head.state_dict(keep_vars=True).items():
        parameter.data = given[name] if name == "d2t" else given[name].to(parameter.dtype)
