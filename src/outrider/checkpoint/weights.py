"""The weights by the headers of their files: names, shapes and sizes. The data is never read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from outrider.checkpoint.files import AGAIN, parse_json, read_json, real_file
from outrider.errors import Unsupported, reading

INDEX = "model.safetensors.index.json"

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number, by the names that --dtype takes."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_LARGEST_HEADER = 64 << 20  # safetensors' own limit is 100 MB
_MOST_DIMS = 16
_PLAIN = re.compile(r"[^/\\\x00]{1,255}")
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
_BITS |= {f"{kind}{bits}": bits for kind in "IU" for bits in (8, 16, 32, 64)}
_BITS |= {"BF16": 16, "F16": 16, "F32": 32, "F64": 64}
_BITS |= {f"F8_{kind}": 8 for kind in ("E4M3", "E5M2", "E8M0", "E4M3FNUZ", "E5M2FNUZ")}
_GROUPS = (32, 64, 128, 256)  # as in `kernels.quantized_linear`, which needs torch


@dataclass(frozen=True)
class Tensor:
    """A tensor by its file's header.

    dtype: as safetensors names it: "BF16"
    stored: bytes in the file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: int

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    def loaded(self, dtype: str | None) -> int:
        """Return its bytes once loaded: floats become `dtype`, packed numbers stay as they are."""
        return self.count * BYTES[dtype] if dtype and self.dtype in _FLOATS else self.stored

    def in_few_bits(self, bits: int, dtype: str | None) -> float:
        """Return the bytes of its copy in few bits; 0 for what is not a matrix of floats.

        8 bits: a scale for each output. 4 bits: a scale and a zero for each group of inputs.
        """
        if len(self.shape) != 2 or self.dtype not in _FLOATS:
            return 0.0
        each = self.loaded(dtype) / self.count
        group = next((g for g in _GROUPS if self.shape[1] % g == 0), None)
        if bits == 4 and group is not None:
            return self.count / 2 + 2 * each * self.count / group
        return self.count + each * self.shape[0]


def model_files(root: Path) -> list[Path]:
    """Return the files with a model's weights, as Transformers looks for them; [] without any.

    Raises Unsupported if the index names anything but files of the directory.
    """
    if (root / "model.safetensors").exists():
        return [root / "model.safetensors"]
    if not (root / INDEX).exists():
        return head_files(root)
    shards = read_json(root, INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise Unsupported(f"{INDEX} in {root} has no weight_map", fix=AGAIN)
    for name in {*map(str, shards.values())}:
        if not _PLAIN.fullmatch(name) or not name.endswith(".safetensors"):
            raise Unsupported(
                f"{INDEX} in {root} names {name!r:.80}, which is no safetensors file in it",
                fix=AGAIN,
            )
    return [root / name for name in sorted({*map(str, shards.values())})]


def head_files(root: Path) -> list[Path]:
    """Return all safetensors files of a directory: heads have no index."""
    return sorted(root.glob("*.safetensors"))


def has_pickles(root: Path) -> bool:
    """Say whether there are weights of a form that may hold code."""
    return any(file for form in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in root.glob(form))


def read_header(file: Path) -> list[Tensor]:
    """Return the tensors that a safetensors file names. Raises Unsupported saying what it is.

    They fill the file without gaps, and each has the bytes that its shape and type take.
    """
    where = f"{file.name} in {file.parent}"
    try:
        with real_file(file, file.parent).open("rb") as opened:
            actual = opened.seek(0, 2)
            opened.seek(0)
            start = opened.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise Unsupported(f"{where} is a Git LFS pointer, not the weights", fix=AGAIN)
            if len(start) < 8 or length > min(actual - 8, _LARGEST_HEADER):
                raise Unsupported(f"{where} is not a safetensors file", fix=AGAIN)
            content = opened.read(length)
    except OSError as error:
        raise Unsupported(f"{where} cannot be read ({error.strerror})", fix=AGAIN) from error
    header = parse_json(content, f"the header of {where}")
    with reading(f"the header of {where}", fix=AGAIN):
        found = {n: _tensor(n, one) for n, one in header.items() if n != "__metadata__"}
        end = 0
        for begins, ends, tensor in sorted(found.values(), key=lambda one: one[:2]):
            if begins != end or ends - begins != tensor.stored:
                raise ValueError(f"{tensor.name:.80} has {ends - begins:,} bytes at {begins:,}")
            end = ends
    if actual != 8 + length + end:
        raise Unsupported(
            f"{where} has {actual:,} bytes instead of {8 + length + end:,}", fix=AGAIN
        )
    return [tensor for _, _, tensor in found.values()]


def _tensor(name: str, told: Any) -> tuple[int, int, Tensor]:
    """Return where the data of a tensor begin and end, and the tensor."""
    begins, ends = told["data_offsets"]
    shape = tuple(told["shape"])
    numbers = (begins, ends, *shape)
    if len(shape) > _MOST_DIMS or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{name:.80} has sizes that are none")
    bits = prod(shape) * _BITS[told["dtype"]]
    return begins, ends, Tensor(name, told["dtype"], shape, -(-bits // 8))
