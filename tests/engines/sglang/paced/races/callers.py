"""Who launches an operation: our own code, a kernel, a stand-in for a pass, or somebody else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from paced import tensor as paced_tensor

KERNELS = f"{os.sep}outrider{os.sep}kernels{os.sep}"
"""What stands for kernels here: the folder of ours that has them."""

_HERE, _TORCH = os.path.dirname(__file__), os.path.dirname(torch.__file__)
_PACED = os.path.dirname(_HERE)


@dataclass(frozen=True)
class Site:
    """Where an operation was launched.

    where: "file:line function", ours first if it is launched on behalf of our own code
    is_ours: whether it is
    is_pass: whether it is the target's pass, which we launch and SGLang runs
    """

    where: str
    is_ours: bool
    is_pass: bool = False


class Callers:
    """Knows functions by their files.

    ours: says of a file whether it is our own code
    """

    def __init__(self, ours: Callable[[str], bool]) -> None:
        self._ours = ours
        self.in_kernel = 0
        self._kinds: dict[CodeType, str] = {}
        self._sites: list[Site] = [Site("before", False)]
        self._site_numbers: dict[Any, int] = {}

    def _kind(self, code: CodeType) -> str:
        """Say what a function is: torch's, our own, a kernel, a stand-in for a pass, or others'."""
        kind = self._kinds.get(code)
        if kind is None:
            file = code.co_filename
            if self._ours(file):
                kind = "kernel" if KERNELS in file else "ours"
            elif file.startswith((_TORCH, _HERE, "<")) or file == paced_tensor.__file__:
                kind = "torch"
            else:
                kind = "pass" if file.startswith(_PACED) else "other"
            self._kinds[code] = kind
        return kind

    def asks(self, frame: FrameType | None) -> str:
        """Say who calls, as `_kind` does."""
        while frame is not None:
            kind = self._kind(frame.f_code)
            if kind != "torch":
                return kind
            frame = frame.f_back
        return "other"

    def ours_asks(self) -> bool:
        """Say whether our own code calls."""
        return self.asks(sys._getframe(1)) == "ours"

    def site(self, frame: FrameType | None) -> int | None:
        """Return the number of the place that launches an operation; None in a stand-in's own."""
        inner = None
        while frame is not None:
            kind = self._kind(frame.f_code)
            if kind == "pass" and inner is None and not self.in_kernel:
                return None
            if kind != "torch":
                inner = inner or frame
                if kind in ("ours", "kernel"):
                    break
            frame = frame.f_back
        if inner is None:
            return 0
        key: tuple[Any, ...] = inner.f_code, inner.f_lineno
        if frame is not None and frame is not inner:
            key += frame.f_code, frame.f_lineno
        number = self._site_numbers.get(key)
        if number is None:
            number = self._site_numbers[key] = len(self._sites)
            parts = [
                f"{'/'.join(Path(code.co_filename).parts[-2:])}:{line} {code.co_name}"
                for code, line in zip(key[-2::-2], key[-1::-2], strict=True)
            ]
            self._sites.append(Site(" > ".join(parts), frame is not None))
        return number
