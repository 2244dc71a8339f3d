"""Whether the files of a checkpoint fit together: config.json, the index and the headers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.checkpoint.files import AGAIN, check_files, pairs, read_json
from outrider.checkpoint.weights import Tensor, has_pickles, model_files, read_header
from outrider.errors import Unsupported

_CONVERT = "convert it to safetensors: load it where you trust it, and save_pretrained"

_LAYERS = re.compile(r"(^n_layers?|layers|depth|blocks|stages)$")
_COUNTS = re.compile(r"^(num|n)_|(experts|heads|groups|size|width|dim|rank|embd|inner)$")
_LABELS = re.compile(r"labels$")
_LENGTHS = re.compile(r"(positions?|ctx|length|window|seq_len|chunk_size|params|tokens)$")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "vocab_size")
_TEXT = ("text_config", "llm_config", "language_config")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_FEW_LAYERS, _MOST_LAYERS = 256, 4096
_MOST = 1 << 16  # of what is counted, unless a tensor is wider
_WIDEST = 1 << 21  # of tensors that are not here


@dataclass(frozen=True)
class Checkpoint:
    """What the files in a directory say.

    config: config.json
    tensors: of the weights, by the headers of their files; None if there are no safetensors
    """

    path: Path
    config: Mapping[str, Any]
    tensors: tuple[Tensor, ...] | None

    @property
    def stored(self) -> int:
        """The bytes of its weights."""
        return sum(tensor.stored for tensor in self.tensors or ())

    @property
    def count(self) -> int:
        """How many numbers its weights have."""
        return sum(tensor.count for tensor in self.tensors or ())


def checked(path: Path) -> Checkpoint:
    """Return what a model's files say. Raises Unsupported if they are not to be loaded."""
    found, refused = examine(path)
    if not refused and not found.tensors:
        refused = (Unsupported(f"no safetensors in {path}", fix="put the weights there"),)
    for error in refused or misfits(found):
        raise error
    return found


def examine(path: Path) -> tuple[Checkpoint, tuple[Unsupported, ...]]:
    """Return what the files of a model or head say, and all for which they are not to be loaded.

    Raises Unsupported if there is no config.json that can be read.
    """
    config = read_json(path, "config.json")
    tensors: list[Tensor] = []
    refused = list(_unsafe(path, config))
    try:
        files = model_files(path)
    except Unsupported as error:
        return Checkpoint(path, config, None), (*refused, error)
    for file in files:
        try:
            tensors += read_header(file)
        except Unsupported as error:
            refused.append(error)
    if not files and has_pickles(path):
        what = f"the weights in {path} are no safetensors, and other forms can run code"
        refused.append(Unsupported(what, fix=_CONVERT))
    return Checkpoint(path, config, tuple(tensors) if files else None), tuple(refused)


def _unsafe(path: Path, config: Mapping[str, Any]) -> Iterator[Unsupported]:
    """Yield why Transformers would read other files than those that are checked, or run code."""
    try:
        check_files(path)
    except Unsupported as error:
        yield error
    if (path / "adapter_config.json").exists():
        yield Unsupported(f"{path} has an adapter", fix="merge it into its model")
    if any(path.glob("shard-*.safetensors")):
        yield Unsupported(f"{path} is a distributed checkpoint", fix="consolidate it")
    for key, value in pairs(config):
        # the name of a repository there is code that the library `kernels` downloads and runs
        is_code = "implementation" in key and "/" in str(value)
        if is_code or (key in ("kernel_config", "fusion_config", "transformers_weights") and value):
            yield Unsupported(
                f"config.json in {path} has {key:.80}={value!r:.80}",
                fix="leave it out: no code and no other files are loaded for a checkpoint",
            )


def misfits(found: Checkpoint) -> Iterator[Unsupported]:
    """Yield the first size in config.json that the weights of a model cannot have.

    What Transformers would build is held against the weights where it is installed. This is what
    can be told without it, and what must be true before it reads config.json: it makes lists of
    so many layers and labels there.
    """
    config, count, widest = found.config, _MOST_LAYERS, _WIDEST
    limits: list[tuple[str, Any, float]] = []
    if found.tensors is not None:
        count = len(found.tensors)
        widest = max((max(t.shape, default=0) for t in found.tensors), default=0)
        text = next((config[k] for k in _TEXT if isinstance(config.get(k), dict)), config)
        limits += [(key, text.get(key), widest) for key in _WIDTHS]
        limits += [(key, text.get(key), count) for key in _DEPTHS]
    limits += [(key, value, _most(key, widest, count)) for key, value in pairs(config)]
    for key, value, most in limits:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and not (key in (*_WIDTHS, *_DEPTHS)) <= value <= most:
            yield Unsupported(
                f"config.json in {found.path} has {key:.80}={value:,}, and its weights allow 1 "
                f"to {most:,}",
                fix=AGAIN,
            )
            return


def _most(key: str, widest: int, count: int) -> float:
    """Return the largest number that config.json may have for a key, anywhere in it."""
    if _LAYERS.search(key):
        return min(_MOST_LAYERS, max(_FEW_LAYERS, count))
    if _LABELS.search(key):
        return _MOST
    if _COUNTS.search(key) and not _LENGTHS.search(key):
        return max(_MOST, widest)
    return math.inf if key == "time_step_limit" else 2**63 - 1
