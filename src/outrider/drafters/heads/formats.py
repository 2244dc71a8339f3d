"""What a head's config.json says: its kind, its shape, and which states of the target it reads.

Two formats are in use, SGLang's (SpecForge, z-lab, EAGLE) and speculators'. They differ in names,
and in how they count the target's layers: SGLang's id j is the output of layer j (the first is 0),
which is `hidden_states[j + 1]` in Transformers; speculators' id i is `hidden_states[i]`. Outrider
counts as Transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.checkpoint import read_json
from outrider.core import Unsupported
from outrider.drafters.heads.layers import HeadConfig
from outrider.errors import reading

KINDS = ("eagle3", "mtp", "dflash", "eagle")
MODEL = "model"
SPECULATORS = "speculators_model_type"
IN_SPECULATORS = ("eagle3", "mtp", "dflash")
ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "DFlashDraftModel": "dflash",
}
"""Kinds by the architecture's name in SGLang's format."""

_COMPLETE = "complete it from the head's page"
reading_config = reading("config.json", fix=_COMPLETE)
"""Refuses a config.json of another form, as a decorator of what reads it."""

WRONG_TARGET = "use the head with the target that it was trained for"


def read_config(path: Path) -> dict[str, Any]:
    """Return the config.json of a directory. Raises Unsupported if there is none."""
    return read_json(path, "config.json")


@reading_config
def kind_of(config: Mapping[str, Any]) -> str:
    """Return what a config.json describes: one of KINDS, or "model" for a causal language model."""
    if SPECULATORS in config:
        found = str(config[SPECULATORS])
        if found not in IN_SPECULATORS:
            known = ", ".join(IN_SPECULATORS)
            raise Unsupported(f"a speculators head of the kind {found!r}", fix=f"use {known}")
        return found
    name = str((config.get("architectures") or [""])[0])
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if name.endswith(("NextN", "MTP")):  # which layout it has, its tensors tell
        return "mtp"
    if ("Eagle" in name and "CausalLM" in name) or "DFlash" in name:
        known = ", ".join(ARCHITECTURES)
        raise Unsupported(f"a head of the kind {name!r}", fix=f"use {known}, ...NextN or ...MTP")
    if config.get("draft_vocab_size") is not None:  # EAGLE's authors call it LlamaForCausalLM
        return "eagle3"
    return MODEL


@reading_config
def has_mtp(config: Mapping[str, Any]) -> bool:
    """Say whether the config.json of a target tells of an MTP layer among its weights."""
    inner = config.get("text_config") or config
    return any(inner.get(n) for n in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))


@reading_config
def head_shape(config: Mapping[str, Any], path: str | Path, kind: str | None = None) -> HeadConfig:
    """Return the shape of a head.

    path: where it is, for messages
    kind: what it is, if config.json is that of a target which has a head within it
    """
    kind = kind or kind_of(config)
    if kind == MODEL:
        raise Unsupported(f"{path} is a {kind}, not a head", fix="load it as a draft model")
    shape = dict(config.get("text_config") or config)
    if SPECULATORS in config:
        shape = {**config.get("transformer_layer_config", {})}
        shape["draft_vocab_size"] = config.get("draft_vocab_size")
    if kind == "dflash":
        shape.setdefault("rope_theta", 1e6)  # SGLang's and Qwen3's default
    try:
        size = HeadConfig.of(shape)
    except KeyError as error:
        raise Unsupported(f"{path}/config.json has no {error}", fix=_COMPLETE) from None
    if kind == "dflash":
        return replace(size, qk_norm=True)
    if kind != "mtp" and size.num_layers != 1:
        raise Unsupported(
            f"the {kind} head at {path} has {size.num_layers} layers", fix="use one with one layer"
        )
    if SPECULATORS not in config and kind != "mtp":
        # SGLang's EAGLE heads are Llama's layers, whatever `model_type` says
        bias = bool(config.get("attention_bias", False))
        size = replace(size, qk_norm=False, attention_bias=bias, output_bias=False)
        size = replace(size, output_gate=False, norm_offset=0.0)
    return replace(size, num_layers=1)


@reading_config
def head_layers(
    config: Mapping[str, Any], num_layers: int, kind: str | None = None
) -> tuple[int, ...]:
    """Return the layers whose states a head reads, as Transformers counts them.

    The last one's states are those after the final norm.

    num_layers: of the target
    """
    kind = kind or kind_of(config)
    if kind in ("mtp", "eagle"):
        return (num_layers,)
    where, key = config.get("eagle_config"), "eagle_aux_hidden_state_layer_ids"
    if kind == "dflash":
        where, key = config.get("dflash_config"), "target_layer_ids"
        if SPECULATORS in config:
            key = "aux_hidden_state_layer_ids"
    ids = config.get(key) or (where or {}).get(key)
    if ids:
        found = [int(i) + (0 if SPECULATORS in config else 1) for i in ids]
    elif kind == "dflash" and SPECULATORS not in config:
        found = _spaced(num_layers, int(config.get("num_hidden_layers") or 1))
    else:
        found = [2, num_layers // 2, num_layers - 3]
    if not all(0 <= i <= num_layers for i in found):
        raise Unsupported(
            f"a head that reads layers {ids or found} of a target with {num_layers}",
            fix=WRONG_TARGET,
        )
    return tuple(found)


def _spaced(num_layers: int, count: int) -> list[int]:
    """Return the layers that a DFlash head reads if it does not say: evenly spaced ones."""
    if count > num_layers:
        raise Unsupported(
            f"a head of {count} layers, for a target with {num_layers}", fix=WRONG_TARGET
        )
    if count == 1:
        return [num_layers // 2 + 1]
    return [round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count)]
