"""A model as its files describe it: shapes, sizes and limits. The weights are never read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.checkpoint import Tensor, examine
from outrider.doctor.finding import Finding
from outrider.errors import Unsupported

__all__ = ["Model", "find", "read_model"]

_EMBEDDING = re.compile(r"(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.weight$")
_POSITIONS = re.compile(r"(wpe|embed_positions|position_embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$|^(model\.)?output\.weight$")
_EXPERT = re.compile(r"\.experts\.")
_LAYER = re.compile(r"(?:layers|h|blocks)\.(\d+)\.")
_NOT_TEXT = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|mtp)\.")

# SGLang's own order; the last two are GPT-2's
_LENGTHS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
)


@dataclass(frozen=True)
class Model:
    """A model's files.

    name: as the user calls it
    config: of its text part
    whole: the whole config.json
    tensors: None if there are no safetensors files here
    findings: what is wrong with its files
    """

    name: str
    path: Path
    whole: Mapping[str, Any]
    tensors: tuple[Tensor, ...] | None
    findings: tuple[Finding, ...] = ()

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """What config.json says of the text part."""
        for part in ("text_config", "llm_config", "language_config"):
            if isinstance(self.whole.get(part), dict):
                return {**self.whole, **self.whole[part]}
        return self.whole

    def _number(self, *names: str) -> int | None:
        found = (self.config.get(name) for name in names)
        return next((int(n) for n in found if isinstance(n, (int, float))), None)

    @property
    def architectures(self) -> list[str]:
        """The classes that run it."""
        return [str(name) for name in self.whole.get("architectures") or ()]

    @property
    def dtype(self) -> str:
        """The numbers it was saved as; Transformers takes float32 if it does not say."""
        said = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        return str(said).removeprefix("torch.")

    @property
    def layers(self) -> int | None:
        """How many layers it has."""
        return self._number("num_hidden_layers", "n_layer", "num_layers", "n_layers")

    @property
    def hidden(self) -> int | None:
        """The width of its residual stream."""
        return self._number("hidden_size", "n_embd", "d_model")

    @property
    def intermediate(self) -> int | None:
        """The width of a feed-forward layer, of all experts that a token visits."""
        width = self._number("intermediate_size", "n_inner", "ffn_dim", "d_ff")
        if self.experts is not None:
            width = (self._number("moe_intermediate_size") or width or 0) * self.experts[0]
        return width or (4 * self.hidden if self.hidden else None)

    @property
    def heads(self) -> int | None:
        """How many query heads a layer has."""
        return self._number("num_attention_heads", "n_head", "n_heads")

    @property
    def kv_heads(self) -> int | None:
        """How many heads a layer keeps keys and values for."""
        if self.config.get("multi_query") and not self.config.get("new_decoder_architecture"):
            return 1  # Falcon's first, which also says how many heads it has
        return self._number("num_key_value_heads", "num_kv_heads", "n_head_kv") or self.heads

    @property
    def head_dim(self) -> int | None:
        """The width of a head."""
        if (dim := self._number("head_dim")) is not None:
            return dim
        return self.hidden // self.heads if self.hidden and self.heads else None

    @property
    def vocabulary(self) -> int | None:
        """How many logits a row has."""
        return self._number("vocab_size")

    @property
    def context(self) -> int | None:
        """The longest sequence, reckoned as SGLang does: a plain scaling factor counts."""
        scaling = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        factor = scaling.get("factor") or 1
        if "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3":
            factor = 1
        length = self._number(*_LENGTHS)
        return None if length is None else int(factor * length)

    @property
    def experts(self) -> tuple[int, int] | None:
        """How many experts a token visits, and how many there are."""
        of = self._number("num_experts", "num_local_experts", "n_routed_experts")
        visited = self._number("num_experts_per_tok", "num_experts_per_token", "moe_topk")
        return (visited, of) if visited and of and of > 1 else None

    @property
    def quantized(self) -> bool:
        """Whether its weights were saved in few bits."""
        return bool(self.whole.get("quantization_config"))

    @cached_property
    def loaded(self) -> tuple[Tensor, ...]:
        """The tensors that a text model loads. Tied tables count once; extra layers stay out."""
        found = [t for t in self.tensors or () if not _NOT_TEXT.search(t.name)]
        if self.layers is not None:
            found = [t for t in found if _layer(t) < self.layers]
        has_table = any(_EMBEDDING.search(t.name) for t in found)
        if has_table and self.config.get("tie_word_embeddings") is True:
            found = [t for t in found if not _HEAD.search(t.name)]
        return tuple(found)

    @property
    def tied(self) -> bool:
        """Whether the embedding table is also the head."""
        return not any(_HEAD.search(t.name) for t in self.loaded)

    def bytes_loaded(self, dtype: str | None = None) -> int | None:
        """Return the bytes of its weights in memory, or None if they are not here."""
        return None if self.tensors is None else sum(t.loaded(dtype) for t in self.loaded)

    def bytes_read(
        self, dtype: str | None = None, rows: int = 1, bits: int | None = None
    ) -> float | None:
        """Return the bytes of weights that a pass over so many rows reads, None if not known.

        Of the experts those are read that one of the rows visits, as if the router chose without
        preference.

        bits: what a copy in few bits reads instead
        """
        if self.tensors is None:
            return None
        total = 0.0
        visited, of = self.experts or (1, 1)
        for tensor in self._multiplied():
            amount = tensor.in_few_bits(bits, dtype) if bits else 0.0
            amount = amount or tensor.loaded(dtype)
            if _EXPERT.search(tensor.name):
                amount *= 1 - (1 - visited / of) ** rows
            total += amount
        return total

    def bytes_of_copy(self, bits: int, dtype: str | None = None) -> float:
        """Return the bytes that a copy in few bits adds: the weights themselves stay."""
        return sum(tensor.in_few_bits(bits, dtype) for tensor in self._multiplied())

    def _multiplied(self) -> Iterator[Tensor]:
        """Yield what each pass reads whole: tables give one row to each token."""
        for tensor in self.loaded:
            table = _EMBEDDING.search(tensor.name) and not self.tied
            if not table and not _POSITIONS.search(tensor.name):
                yield tensor

    def as_json(self) -> dict[str, Any]:
        """Return what was read, as plain values."""
        names = "architectures dtype layers hidden heads kv_heads head_dim vocabulary context"
        names += " experts quantized"
        found = {name: getattr(self, name) for name in names.split()}
        return {"name": self.name, **found, "bytes": self.bytes_loaded()}


def _layer(tensor: Tensor) -> int:
    found = _LAYER.search(tensor.name)
    return int(found[1]) if found else -1


def find(name: str) -> Path:
    """Return the directory of a model: a path, or a Hugging Face name that was downloaded."""
    path = Path(name)
    try:
        path = path.expanduser()
        is_dir, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null byte
        raise Unsupported(f"{name:.200} is no path ({error!s:.80})", fix="mend the path") from error
    if is_dir:
        return path
    if exists:
        raise Unsupported(f"{name} is a file", fix="give the directory that holds config.json")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        raise Unsupported(f"there is no directory {name}", fix="mend the path")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise Unsupported(
            f"there is no directory {name}, and no huggingface_hub to look for it in the cache",
            fix="give a directory, or pip install huggingface_hub",
        ) from error
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError) as error:
        raise Unsupported(
            f"{name} is neither a directory nor in the local Hugging Face cache",
            fix=f"download it first: hf download {name}",
        ) from error


def read_model(name: str, path: Path | None = None) -> Model:
    """Return what a model's files say. Raises Unsupported if it is not a model."""
    path = path or find(name)
    if not (path / "config.json").is_file():
        adapter = (path / "adapter_config.json").is_file()
        raise Unsupported(
            f"{name} is an adapter, not a model" if adapter else f"{name} has no config.json",
            fix="merge it into its model"
            if adapter
            else "give the directory of a Hugging Face "
            "model: config.json, *.safetensors, tokenizer.json",
        )
    found, refused = examine(path)
    config = found.config
    if not config.get("model_type") and not config.get("architectures"):
        raise Unsupported(
            f"config.json of {name} names no model_type and no architectures",
            fix="give the directory of a Hugging Face model",
        )
    findings = [
        Finding("models", "problem", f"{name}: {error.what}", "it is not loaded", error.fix)
        for error in refused
    ]
    if findings or found.tensors is not None:
        return Model(name, path, config, None if refused else found.tensors, tuple(findings))
    nothing = Finding(
        "models",
        "warning",
        f"{name}: no *.safetensors here",
        "sizes are read from their headers: cost and memory are not known",
        "put the weights beside config.json" if os.path.exists(name) else f"hf download {name}",
    )
    return Model(name, path, config, None, (nothing,))
