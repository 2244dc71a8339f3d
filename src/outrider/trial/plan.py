"""Which servers are started, with which options, and what does not apply here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.clients import draft_kind
from outrider.clients.process import sglang_command
from outrider.errors import UsageError
from outrider.redact import quoted, redact_args

__all__ = [
    "DETERMINISTIC",
    "SIDES",
    "Pair",
    "Side",
    "Wanted",
    "check_flags",
    "environment",
    "minutes",
    "pairs",
    "part_name",
]

DETERMINISTIC = "--enable-deterministic-inference"
NO_GRAPHS, NO_OVERLAP = "--disable-cuda-graph", "--disable-overlap-schedule"

Side = Literal["bare", "ours"]
SIDES: tuple[Side, Side] = ("bare", "ours")

RESERVED = (
    *("--model", "--model-path", "--host", "--port", "--enable-metrics"),
    *("--speculative-algorithm", "--speculative-draft-model-path", DETERMINISTIC),
)
"""Options of SGLang that this command gives itself."""

DRAFTS = 4
"""K of requests with a fixed drafter."""

CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
"""What SGLang needs on a CPU, if the environment does not say otherwise."""


@dataclass(frozen=True)
class Wanted:
    """What was asked for.

    requests: how many are compared
    quick: fewer kernel shapes, shorter answers, fewer concurrencies
    device: "cuda" (ROCm too) or "cpu"; None takes a GPU if there is one
    flags: SGLang's, for every server
    """

    target: str
    draft: str | None = None
    requests: int = 200
    quick: bool = False
    device: str | None = None
    flags: tuple[str, ...] = ()
    out: Path = Path("outrider-selftest")
    fresh: bool = False

    @property
    def max_tokens(self) -> int:
        """Of each answer."""
        return 32 if self.quick else 128

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """Requests at once where speed is measured."""
        return (1, 4) if self.quick else (1, 4, 16)

    @property
    def drafting(self) -> dict[str, Any]:
        """Options of a request that has drafts, whether they pay or not."""
        drafter = "ngram" if self.draft is None else draft_kind(self.draft)
        return {"drafter": drafter, "max_drafts": DRAFTS}

    @property
    def arguments(self) -> dict[str, Any]:
        """What decides whether a finished part can be used again."""
        return {
            "target": _place(self.target),
            "draft": self.draft and _place(self.draft),
            "requests": self.requests,
            "quick": self.quick,
            "flags": redact_args(self.flags),
        }


@dataclass(frozen=True)
class Pair:
    """Two servers that differ in Outrider only.

    flags: SGLang's, of both
    skip: why it does not apply here, or None
    """

    name: str
    flags: tuple[str, ...] = ()
    skip: str | None = None

    @property
    def deterministic(self) -> bool:
        """Whether both must give the same tokens, sampled ones too."""
        return DETERMINISTIC in self.flags

    def command(self, side: Side, wanted: Wanted, device: str) -> list[str]:
        """Return how one of the two is started. `serving` adds its address."""
        start = sglang_command()
        if side == "ours":
            start = [sys.executable, "-m", "outrider", "serve"]
            if wanted.draft is not None:
                start += ["--speculative-draft-model-path", wanted.draft]
        defaults = {"--device": "cpu", "--attention-backend": "outrider"} if device == "cpu" else {}
        for flag, value in defaults.items():
            if flag not in _names(wanted.flags):
                start += [flag, value]
        return [*start, "--model-path", wanted.target, *self.flags, *wanted.flags]


def part_name(pair: Pair, side: Side) -> str:
    """Return how the part of one server is called."""
    return f"{pair.name}, {side}"


def pairs(device: str, sglang: str, flags: Sequence[str]) -> list[Pair]:
    """Return every pair, those that do not apply here with the reason.

    device: "cuda", "rocm" or "cpu"
    sglang: its version
    flags: SGLang's, given for all servers
    """
    on_cpu = device == "cpu"
    given = _names(flags)
    default = "on a CPU only Outrider's own linear layers differ" if on_cpu else None
    graphs = "a CPU has no CUDA graphs" if on_cpu else None
    overlap = "on a CPU there is no device to overlap with" if on_cpu else None
    if overlap is None and sglang.startswith("0.5.11"):
        overlap = f"Outrider refuses {NO_OVERLAP} in SGLang 0.5.11"
    if NO_GRAPHS in given:
        graphs = f"{NO_GRAPHS} is given for all servers"
    if NO_OVERLAP in given:
        overlap = f"{NO_OVERLAP} is given for all servers"
    return [
        Pair("deterministic", (DETERMINISTIC,)),
        Pair("default", (), default),
        Pair("no CUDA graphs", (NO_GRAPHS,), graphs),
        Pair("no overlap", (NO_OVERLAP,), overlap),
    ]


def check_flags(flags: Sequence[str]) -> None:
    """Refuse options for the servers that this command gives itself."""
    if flags and not flags[0].startswith("-"):
        raise UsageError(
            f"{quoted(flags[0])} after --",
            fix="put TARGET and DRAFT before --, SGLang's options after",
        )
    for name in sorted(_names(flags) & {*RESERVED}):
        raise UsageError(
            f"{name} after --", fix="leave it out: this command gives it to the servers"
        )


def _place(model: str) -> str:
    """Return a model's directory, wherever the command was started; a name as it is."""
    return str(Path(model).resolve()) if os.path.isdir(model) else model


def _names(flags: Sequence[str]) -> set[str]:
    return {flag.partition("=")[0] for flag in flags if flag.startswith("--")}


def environment(device: str) -> dict[str, str]:
    """Return the environment of a server."""
    return {**(CPU_ENVIRONMENT if device == "cpu" else {}), **os.environ}


def minutes(servers: int, kernels: bool, device: str, quick: bool) -> float:
    """Return about how long it takes, for a small model; loading a large one takes longer."""
    load = 0.5 if device == "cpu" else 1.5
    work = 0.25 if quick else 1.5
    checks = 0.4 if quick else 1.0 if device == "cpu" else 3.0
    return servers * (load + work) + checks * kernels
