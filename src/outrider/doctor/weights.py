"""The weights by the headers of their files: names, shapes and sizes. The data is never read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from outrider.doctor.finding import Finding
from outrider.errors import OTHER_FORM

__all__ = ["BYTES", "Tensor", "read_header", "read_tensors"]

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number, by the names that --dtype takes."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_LARGEST_HEADER = 100 << 20  # safetensors' own limit
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


def read_tensors(name: str, files: list[Path]) -> tuple[tuple[Tensor, ...] | None, list[Finding]]:
    """Return the tensors of all files, None if not all can be read, and what is wrong with them."""
    tensors: list[Tensor] = []
    findings = []
    for file in files:
        try:
            tensors += read_header(file)
        except (OSError, ValueError) as error:
            what = f"{name}: {file.name} {error}"
            findings.append(
                Finding("models", "problem", what, "no host can load it", "download it again")
            )
    return (None if findings else tuple(tensors)), findings


def read_header(file: Path) -> list[Tensor]:
    """Return the tensors that a safetensors file names. Raises ValueError saying what it is."""
    if not file.is_file():
        raise ValueError("is missing")
    actual = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start == b"version ":
            raise ValueError("is a Git LFS pointer, not the weights")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(actual, _LARGEST_HEADER):
            raise ValueError("is not a safetensors file")
        content = opened.read(length)
    tensors, end = [], 0
    try:
        for name, one in json.loads(content).items():
            if name != "__metadata__":
                first, last = one["data_offsets"]
                end = max(end, last)
                shape = tuple(int(length) for length in one["shape"])
                tensors.append(Tensor(name, str(one["dtype"]), shape, last - first))
    except OTHER_FORM as error:
        raise ValueError("has a broken header") from error
    if actual != 8 + length + end:
        raise ValueError(f"has {actual:,} bytes instead of {8 + length + end:,}")
    return tensors
