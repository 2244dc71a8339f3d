"""Heads as people publish them: one loader for all kinds, in SGLang's format and speculators'.

Both keep `config.json` (see `formats`) beside safetensors. A tensor that is missing, unknown or of
another shape is an error that names it. Pickled weights are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoint import check_files, head_files, read_header
from outrider.core import Unsupported
from outrider.drafters.heads.dflash import Block, DFlashHead
from outrider.drafters.heads.eagle import EagleHead
from outrider.drafters.heads.eagle3 import Eagle3Head, Eagle3Norms
from outrider.drafters.heads.formats import (
    KINDS,
    MODEL,
    WRONG_TARGET,
    head_layers,
    head_shape,
    kind_of,
    read_config,
)
from outrider.drafters.heads.layers import HeadConfig
from outrider.drafters.heads.mtp import MTPHead, embedding_first, own_names

AnyHead = Eagle3Head | MTPHead | DFlashHead | EagleHead

UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""What a checkpoint may hold that drafting has no use for: `t2d` follows from `d2t`."""

AGAIN = "download the head again"
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


@torch.inference_mode(mode=False)  # weights made in a caller's could not be used outside it
def load_head(
    path: str | Path,
    embedding: Tensor,
    num_layers: int,
    dtype: torch.dtype | None = None,
    *,
    lm_head: Tensor | None = None,
    kind: str | None = None,
) -> AnyHead:
    """Return the head in a directory, for a target.

    embedding: the target's, [V, H]; the head shares it unless it brings its own
    num_layers: of the target; says which layers' states are read if the checkpoint does not
    dtype: of the head's weights; the target's by default
    lm_head: the target's, [V, H], for heads that do not bring their own
    kind: what to read if the directory is that of a target which has a head within it: "mtp"
    """
    path = Path(path)
    config = read_config(path)
    found = kind_of(config)
    within = found == MODEL and kind is not None
    if kind is not None and kind not in (KINDS if found == MODEL else (found,)):
        raise Unsupported(f"{path} as {kind!r}: it is a {found}", fix="leave the kind out")
    kind = kind or found
    size = head_shape(config, path, kind)
    layers = head_layers(config, num_layers, kind)
    given = _weights(path, _names_of(kind, within))
    if size.num_layers > len(given):
        raise Unsupported(f"the head at {path} lacks most of its layers", fix=AGAIN)
    try:
        with torch.device("meta"):  # no memory is taken before all shapes are known to be right
            head = _make(kind, config, size, layers, given, path)
    except RuntimeError as error:  # sizes whose product is beyond 64 bits
        raise Unsupported(f"the head at {path} cannot be made ({error})", fix=AGAIN) from error
    for name, shared in ((EMBEDDING, embedding), (LM_HEAD, lm_head)):
        if name not in given and shared is not None and _may_share(name, head, config):
            if shared.shape != (size.vocab_size, size.hidden_size):
                raise Unsupported(
                    f"the head at {path} is for embeddings of {size.vocab_size} x "
                    f"{size.hidden_size}, and these are {shared.shape[0]} x {shared.shape[1]}",
                    fix=WRONG_TARGET,
                )
            given[name] = shared
    _check(head, given, path)
    if config.get("model_type") == "mimo" and kind == "mtp":
        embedding_first(given)
    head = _make(kind, config, size, layers, given, path)
    for name, parameter in head.state_dict(keep_vars=True).items():
        parameter.data = given[name] if name == "d2t" else given[name].to(parameter.dtype)
    return head.to(dtype or embedding.dtype).to(embedding.device).eval().requires_grad_(False)


def _may_share(name: str, head: AnyHead, config: Mapping[str, Any]) -> bool:
    """Say whether a tensor that the checkpoint lacks is the target's."""
    if name == EMBEDDING or isinstance(head, (MTPHead, EagleHead)):
        return True
    whole = head.config.draft_vocab_size == head.config.vocab_size
    # an EAGLE-3 head has its own, unless its config.json has no draft vocabulary (as in SGLang)
    return whole and (isinstance(head, DFlashHead) or config.get("draft_vocab_size") is None)


def _make(
    kind: str,
    config: Mapping[str, Any],
    size: HeadConfig,
    layers: tuple[int, ...],
    given: dict[str, Tensor],
    path: Path,
) -> AnyHead:
    """Return a head of the kind, with weights to be filled in."""
    if kind == "eagle3":
        return Eagle3Head(size, layers, size.hidden_size, Eagle3Norms.of(config))
    if kind == "dflash":
        return DFlashHead(size, layers, Block.of(config, path))
    if kind == "eagle":
        return EagleHead(size, layers[0], bias="fc.bias" in given)
    if "eh_proj.weight" not in given:
        raise Unsupported(f"no MTP tensors in {path}", fix="name a directory that has them")
    attention = "layer.self_attn."
    size = replace(
        size,
        qk_norm=f"{attention}q_norm.weight" in given,
        attention_bias=f"{attention}q_proj.bias" in given,
        output_bias=f"{attention}o_proj.bias" in given,
    )
    return MTPHead(size, layers[0])


Naming = Callable[[list[str]], Mapping[str, str]]
"""Maps the names of all tensors in a directory to ours; what is left out is not read."""


def _names_of(kind: str, within: bool) -> Naming:
    """Return how the tensors of a kind are named.

    within: whether they are among those of a target, which are not the head's
    """

    def named(names: list[str]) -> Mapping[str, str]:
        own = {name: name.removeprefix("model.") for name in names}
        if kind == "eagle3":
            return {name: _eagle3_name(ours) for name, ours in own.items()}
        if kind == "mtp":
            shared = {n: ours for n, ours in own.items() if ours in (EMBEDDING, LM_HEAD)}
            return own_names(names) if within else {n: n for n in names} | shared | own_names(names)
        return own

    return named


EAGLE3_NAMES = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
"""Other names that EAGLE-3's tensors go by, and SpecForge's for them."""


def _eagle3_name(name: str) -> str:
    for theirs, ours in EAGLE3_NAMES.items():
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    return name


def _weights(path: Path, naming: Naming) -> dict[str, Tensor]:
    """Return the head's tensors in a directory, by our names. Others are not read."""
    from safetensors import safe_open

    files = head_files(path)
    if not files:
        raise Unsupported(f"no safetensors in {path}", fix="convert the head's weights")
    check_files(path)
    places = {tensor.name: file for file in files for tensor in read_header(file)}
    renamed = naming([*places])
    twice = sorted(ours for ours, count in Counter(renamed.values()).items() if count > 1)
    if twice:
        raise Unsupported(f"the head at {path} has {', '.join(twice)} twice", fix=AGAIN)
    found: dict[str, Tensor] = {}
    for file in files:
        own = [name for name, where in places.items() if where == file and name in renamed]
        try:
            with safe_open(file, "pt") as opened:
                found |= {renamed[name]: opened.get_tensor(name) for name in own}
        except Exception as error:  # a library's own class, without a base in common
            raise Unsupported(f"{file}: {error}", fix=AGAIN) from error
    return {name: tensor for name, tensor in found.items() if name not in UNUSED}


def _check(head: AnyHead, given: dict[str, Tensor], path: Path) -> None:
    """Refuse weights unless every tensor is there, is known, has its shape and is finite."""
    expected = head.state_dict()
    same = {"d2t"} if head.config.draft_vocab_size == head.config.vocab_size else set()
    missing = sorted(expected.keys() - given.keys() - same)
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
        kinds = "a checkpoint of this kind, complete and not quantized"
        raise Unsupported(f"the {head.name} head at {path}: {'; '.join(said)}", fix=f"use {kinds}")
    broken = sorted(name for name, tensor in given.items() if not tensor.isfinite().all())
    if broken:
        raise Unsupported(f"the head at {path}: NaN or infinity in {', '.join(broken)}", fix=AGAIN)
    if "d2t" in expected:
        given.setdefault("d2t", torch.zeros(expected["d2t"].shape, dtype=torch.int64))
        reach = torch.arange(len(given["d2t"])) + given["d2t"]
        if ((reach < 0) | (reach >= head.config.vocab_size)).any():
            raise Unsupported(f"the head at {path}: d2t leaves the vocabulary", fix=AGAIN)
