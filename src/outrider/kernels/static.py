"""Compile kernels ahead of time, without a GPU, and read what their machine code says.

What can be known before anyone has a GPU: registers, scratch, local memory and with them the waves
that fit; the matrix instructions and the width of the loads in each loop; the layouts that decide
in which order a row is summed.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300X
    "gfx950": GPUTarget("hip", "gfx950", 64),  # MI355X
    "sm_80": GPUTarget("cuda", 80, 32),  # A100
    "sm_90": GPUTarget("cuda", 90, 32),  # H100
}

FP8 = {"gfx942": "fp8e4b8", "gfx950": "fp8e4nv", "sm_80": "fp8e5", "sm_90": "fp8e4nv"}
"""What "fp8" means: the 8-bit type that each processor converts."""

LOCAL_BYTES = {"gfx942": 65_536, "gfx950": 163_840, "sm_80": 166_912, "sm_90": 232_448}
"""Shared memory (LDS) that the programs of one processor have together."""


@dataclass(frozen=True)
class Variant:
    """A kernel as it is launched: the types of its arguments, its constants and its options.

    types:     argument -> "*bf16", "i32", "fp32", ...
    constants: its constexpr arguments
    keys:      keys that one turn of its loop takes; 0 if it has no such loop
    options:   of the launch, by target
    unaligned: arguments not known to be divisible by 16
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    keys: int = 0
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    unaligned: tuple[str, ...] = ()

    def compile(self, target: str) -> Any:
        """Return Triton's compiled kernel for a name in TARGETS."""
        names = self.kernel.arg_names
        types = {n: t.replace("fp8", FP8[target]) for n, t in self.types.items()}
        signature = {n: "constexpr" if n in self.constants else types[n] for n in names}
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if n not in self.constants
            and n not in self.unaligned
            and signature[n][0] in "*i"  # pointers and integers, not floats
        }
        source = ASTSource(self.kernel, signature, constexprs=self.constants, attrs=attrs)
        gpu = TARGETS[target]
        return triton.compile(source, target=gpu, options=self.options.get(target, {}))


@dataclass(frozen=True)
class Figures:
    """What the machine code of one variant says.

    registers: of each lane; scratch: bytes of it that did not fit
    local:     shared memory (LDS) of one program, in bytes
    waves:     (warps) that fit on one SIMD (on NVIDIA: on one SM) by registers and local memory
    matrix:    matrix instructions in the loop that has most of them
    scores:    layout of the first product, whose rows are then reduced, in Triton's GPU dialect
    widest_loads: global loads in that loop, by bits of a lane
    instructions, bytes_loaded: of that loop, for each key; bytes from global memory by one program
    """

    variant: str
    target: str
    registers: int
    scratch: int
    local: int
    waves: int
    matrix: int
    scores: str
    loads: dict[str, int]
    instructions: float
    bytes_loaded: float
    cycles: float | None = None


def figures(variant: Variant, target: str, llvm_mca: str | None = None) -> Figures:
    """Compile a variant and read its figures. llvm_mca: path of the tool, for cycles on AMD."""
    compiled = variant.compile(target)
    warps = compiled.metadata.num_warps
    gpu = TARGETS[target]
    if gpu.backend == "hip":
        code = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s*(\d+)", code)
        scratch = _number(r"\.private_segment_fixed_size:\s*(\d+)", code)
        body = code.split(".amdgpu_metadata")[0]
        loops = _loops(body, "hip")
        by_registers = min(8, 512 // max(8, -(-registers // 8) * 8))
        programs = LOCAL_BYTES[target] // max(1, compiled.metadata.shared)
        waves = min(by_registers, max(1, programs * warps // 4)) if programs else 0
    else:
        usage, code = _disassemble(compiled.asm["cubin"])
        registers = _number(r"REG:(\d+)", usage)
        scratch = _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)
        loops = _loops(code, "cuda")
        by_registers = 65_536 // (-(-max(registers, 16) // 8) * 8 * 32)
        programs = LOCAL_BYTES[target] // max(1, compiled.metadata.shared + 1024)
        waves = min(64, by_registers // warps * warps, programs * warps)
    mma = "v_mfma" if gpu.backend == "hip" else "MMA"
    loop = max(loops, key=lambda lines: (sum(mma in line for line in lines), len(lines)))
    loads = _loads(loop, gpu.backend)
    lanes = gpu.warp_size * warps
    keys = variant.keys or 1
    return Figures(
        variant=variant.name,
        target=target,
        registers=registers,
        scratch=scratch,
        local=compiled.metadata.shared,
        waves=waves,
        matrix=sum(mma in line for line in loop),
        scores=_first_product(compiled.asm["ttgir"]),
        loads=loads,
        instructions=round(len(loop) * warps / keys, 2),
        bytes_loaded=round(sum(int(b) // 8 * n for b, n in loads.items()) * lanes / keys, 1),
        cycles=_cycles(loop, target, llvm_mca, keys) if gpu.backend == "hip" else None,
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if not found:
        raise ValueError(f"no {pattern!r} in the compiler's output")
    return int(found.group(1))


def _first_product(ttgir: str) -> str:
    """Return the layout of the first product's result, without its share of rows among warps."""
    product = re.search(r"(?:tt\.dot|warp_group_dot)\b.*-> tensor<\w+, (#\w+)>", ttgir)
    if not product:
        return ""
    layout = re.search(rf"^{product.group(1)} = (.*)$", ttgir, re.M)
    return re.sub(r"warpsPerCTA = \[\d+, ", "warpsPerCTA = [*, ", layout.group(1)) if layout else ""


def _loops(code: str, backend: str) -> list[list[str]]:
    """Return the instructions of each innermost loop; of the whole kernel if it has none."""
    if backend == "hip":
        label, jump = r"(\.LBB\w+):", r"s_c?branch\w*\s+(\.LBB\w+)"
    else:
        # an instruction is its own label: its address
        label, jump = r"\s+/\*([0-9a-f]{4,})\*/", r"\bBRA\b.*?0x([0-9a-f]+)"
    lines = code.splitlines()
    labels = {_key(m.group(1)): i for i, x in enumerate(lines) if (m := re.match(label, x))}
    ends: dict[int, int] = {}  # a loop may branch back from several places
    for i, line in enumerate(lines):
        m = re.search(jump, line)
        # not <=: a branch to itself ends an NVIDIA kernel
        if m and labels.get(_key(m.group(1)), i) < i:
            ends[labels[_key(m.group(1))]] = i + 1
    inner = [a for a, b in ends.items() if not any(a < c and d <= b for c, d in ends.items())]
    return [_instructions(lines[a : ends[a]]) for a in inner] or [_instructions(lines)]


def _key(label: str) -> str:
    return label if label.startswith(".") else label.lstrip("0")


def _instructions(lines: list[str]) -> list[str]:
    sass = [m.group(1) for x in lines if (m := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", x))]
    return sass or [x for x in lines if re.match(r"\s+[a-z]\w+_\w+", x)]


def _loads(loop: list[str], backend: str) -> dict[str, int]:
    """Count the loads from global memory by bits of a lane."""
    loads: dict[str, int] = {}
    for line in loop:
        if backend == "hip":
            m = re.match(r"\s*(?:global|buffer)_load_(?:lds_)?(\w+)", line)
            sizes = {"dwordx4": "128", "dwordx3": "96", "dwordx2": "64", "dword": "32"}
            bits = m and sizes.get(m.group(1), "8" if "byte" in m.group(1) else "16")
        else:
            m = re.search(r"\b(?:LDG|LDGSTS)\.(\S+)", line)
            wide = m and re.search(r"(?:^|\.)(128|64)(?:\.|$)", m.group(1))
            bits = m and (wide.group(1) if wide else "16" if "16" in m.group(1) else "32")
        if bits:
            loads[bits] = loads.get(bits, 0) + 1
    return loads


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Return (resource usage, machine code) by the tool inside Triton's package."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True)
            for flag in ("-res-usage", "-sass")
        )
    return usage.stdout, code.stdout


def _cycles(loop: list[str], target: str, llvm_mca: str | None, keys: int) -> float | None:
    if llvm_mca is None or not os.path.exists(llvm_mca):
        return None
    rounds = 20
    command = [llvm_mca, "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={target}", f"-iterations={rounds}"]
    done = subprocess.run(command, input="\n".join(loop) + "\n", capture_output=True, text=True)
    found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    return round(int(found.group(1)) / rounds / keys, 2) if found else None
