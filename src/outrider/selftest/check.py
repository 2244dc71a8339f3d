"""A check, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Check", "Mismatch", "Outcome", "Setting", "equal", "near"]


class Mismatch(Exception):
    """A result that is not what it should be."""


@dataclass(frozen=True)
class Setting:
    """Where the kernels run, and how thoroughly they are looked at.

    device: "cuda" (ROCm too), or "cpu" for Triton's interpreter, which gets smaller shapes
    arch:   the processor: "gfx942", "sm_90", ...
    """

    device: torch.device
    arch: str
    quick: bool = False

    @property
    def interpreted(self) -> bool:
        """Return whether kernels run in Triton's interpreter."""
        return self.device.type != "cuda"

    @property
    def is_amd(self) -> bool:
        """Return whether the kernels are compiled as for AMD."""
        return self.arch.startswith("gfx")

    def move(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a kernel with their tensors on the device."""
        on_device = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        return {**given, **{name: x.to(self.device, copy=True) for name, x in on_device.items()}}


@dataclass(frozen=True)
class Outcome:
    """What came of a check. One that nobody promised is reported and fails nothing."""

    name: str
    section: str
    passed: bool
    promised: bool
    detail: str
    seconds: float

    @property
    def failed(self) -> bool:
        """Return whether a promise was broken."""
        return self.promised and not self.passed

    @property
    def kernel(self) -> str:
        """Return the kernel that was checked."""
        return self.name.split(":")[0]


@dataclass(frozen=True)
class Check:
    """Something to be tried. `run` returns what it found, or raises.

    name:    begins with the kernel's
    section: "correctness" or "bitwise"
    """

    name: str
    section: str
    run: Callable[[], str]
    promised: bool = True

    def outcome(self) -> Outcome:
        """Run it. Whatever it raises is a failure of this check and of no other."""
        started = time.perf_counter()
        try:
            detail, passed = self.run(), True
        except Exception as error:
            said = (str(error).strip() or "no message").splitlines()
            detail, passed = said[-1] if isinstance(error, Mismatch) else _say(error, said), False
        seconds = time.perf_counter() - started
        return Outcome(self.name, self.section, passed, self.promised, detail, seconds)


def _say(error: Exception, lines: list[str]) -> str:
    # Triton's messages show source first; the cause is in the exception that it was raised from
    cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else ""
    return f"{type(error).__name__}: {lines[0]}{cause}"[:400]


def equal(found: Tensor, expected: Tensor, what: str) -> int:
    """Return how many numbers were compared; raise Mismatch unless all are equal."""
    found, expected = found.cpu(), expected.cpu()
    if found.shape != expected.shape:
        raise Mismatch(f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}")
    if not torch.equal(found, expected):
        wrong = (found != expected).nonzero()
        at = tuple(wrong[0].tolist())
        raise Mismatch(
            f"{what}: {len(wrong)} of {found.numel()} differ, the first at {list(at)}: "
            f"{found[at].item()}, expected {expected[at].item()}"
        )
    return found.numel()


def near(found: Tensor, exact: Tensor, bound: Tensor | float, what: str) -> float:
    """Return the largest error in units of its bound; raise Mismatch if that is above 1.

    exact: float64; bound: one for all, or one for each
    """
    error = (found.double() - exact).abs() / bound
    worst = float(error.max()) if error.numel() else 0.0
    if not worst <= 1:  # so that a NaN is caught too
        raise Mismatch(f"{what}: an error is {worst:.3g} times its bound")
    return worst
