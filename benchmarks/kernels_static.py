"""Compile every kernel for four GPUs, without one, and write what the machine code says.

    python benchmarks/kernels_static.py [--targets gfx942 sm_90] [--out FILE]

Where SGLang is installed, its own decode and extend kernels are compiled the same way, beside ours.
Cycles come from llvm-mca (Debian's llvm-19), if it is there: uncalibrated, for comparing two
versions of one loop. Gates on these figures: tests/kernels/test_static.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are imported

from common import write
from rich.console import Console
from rich.progress import track
from rich.table import Table

from outrider.kernels.shipped import DIMS, variants
from outrider.kernels.static import TARGETS, Variant, figures

COLUMNS = {
    "registers": "registers",
    "scratch": "scratch",
    "LDS": "local",
    "waves": "waves",
    "instr/key": "instructions",
    "bytes/key": "bytes_loaded",
    "cycles/key": "cycles",
}


def host_variants() -> Iterator[Variant]:
    """Yield SGLang's kernels with the constants and options that its launch code chooses."""
    from sglang.srt.layers.attention.triton_ops import decode_attention, extend_attention

    amd = {"num_stages": 1, "waves_per_eu": 1, "matrix_instr_nonkdim": 16, "kpack": 2}
    for dim in DIMS:
        width = 1 << (dim - 1).bit_length()
        heads = {"BLOCK_DMODEL": width, "BLOCK_DPE": 0, "BLOCK_DV": width, "Lv": dim}
        plain = {"logit_cap": 0.0, "xai_temperature_len": -1}
        kernel = decode_attention._fwd_grouped_kernel_stage1
        yield Variant(
            f"SGLang decode D{dim}",
            kernel,
            _host_types(kernel),
            {**heads, **plain, "Lk": dim, "kv_group_num": 8, "q_head_num": 64, "BLOCK_N": 32}
            | {"BLOCK_H": 16, "MIN_BLOCK_KV": 32},
            keys=32,
            options={
                t: {"num_warps": 4, **(amd if t.startswith("gfx") else {"num_stages": 2})}
                for t in TARGETS
            },
        )
        kernel = extend_attention._fwd_kernel
        for target in TARGETS:
            is_amd = target.startswith("gfx")
            rows, keys = _extend_blocks(target, dim)
            warps = 4 if is_amd or dim <= 64 else 8
            constants = {**heads, **plain, "Lq": dim, "SLIDING_WINDOW_SIZE": -1}
            constants |= {"BLOCK_M": rows, "BLOCK_N": keys, "IS_CAUSAL": True, "HAS_SINK": False}
            constants |= {"SKIP_PREFIX_CUSTOM_MASK": True, "STORE_TRANSPOSE": is_amd}
            options = {target: {"num_warps": warps, **(amd if is_amd else {"num_stages": 1})}}
            for name, mask in (("extend", False), ("verify", True)):
                yield Variant(
                    f"SGLang {name} D{dim}",
                    kernel,
                    _host_types(kernel),
                    {**constants, "USE_CUSTOM_MASK": mask},
                    keys=keys,
                    options=options,
                    unaligned=("kv_group_num",),
                )


def _extend_blocks(target: str, dim: int) -> tuple[int, int]:
    """What `_get_block_sizes_for_extend_attention` of SGLang 0.5.11 returns: rows and keys."""
    if target.startswith("gfx"):
        return 64, 64
    if target == "sm_90":
        return (128, 64) if dim <= 256 else (32, 64)
    return (128, 128) if dim <= 128 else (64, 64)


def _host_types(kernel: Any) -> dict[str, str]:
    types = {n: "i32" for n in kernel.arg_names if n.startswith("stride_")}
    types["kv_group_num"] = "i32"
    for name in ("Q", "K_Buffer", "V_Buffer", "Q_Extend", "K_Extend", "V_Extend", "O_Extend"):
        types[name] = "*bf16"
    for name in ("kv_indptr", "qo_indptr", "num_kv_splits", "window_kv_offset_ptr"):
        types[name] = "*i32"
    types |= {"kv_indices": "*i64", "mask_indptr": "*i64", "mask_ptr": "*u8"}
    types |= dict.fromkeys(("Att_Out", "Att_Lse", "sink_ptr"), "*fp32")
    types |= dict.fromkeys(("sm_scale", "sm_scale_withk", "k_scale", "v_scale"), "fp32")
    return {n: t for n, t in types.items() if n in kernel.arg_names}


def _all(host: bool) -> list[Variant]:
    return [*variants(), *(host_variants() if host else ())]


def _one(job: tuple[int, str, bool]) -> dict[str, Any]:
    index, target, host = job
    return asdict(figures(_all(host)[index], target, shutil.which("llvm-mca-19")))


def main() -> None:
    """Compile, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--out", type=Path, help="instead of the committed file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    try:
        import sglang

        host = sglang.__version__
    except ImportError:
        host = None
    jobs = [
        (i, target, bool(host))
        for target in args.targets
        for i, variant in enumerate(_all(bool(host)))
        if target in variant.options
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        done = pool.map(_one, jobs)
        rows = list(track(done, "compiling", len(jobs), console=Console(stderr=True)))
    write("kernels_static", {"host": host, "figures": rows}, args.out)
    table = Table("GPU", "kernel", *COLUMNS)
    for row in rows:
        table.add_row(row["target"], row["variant"], *(_cell(row[key]) for key in COLUMNS.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
