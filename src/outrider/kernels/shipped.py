"""Every kernel as it is launched, for compilation ahead of time: what the static gates look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.kernels.paged_attention import triton as paged
from outrider.kernels.paged_attention.layout import FIELDS, Tile
from outrider.kernels.prefill_attention import triton as prefill
from outrider.kernels.row_invariant import triton as row_invariant
from outrider.kernels.static import TARGETS, Variant

DIMS = (64, 96, 128, 256)
TILES = (16, 32, 64)

_TYPES = {
    **dict.fromkeys(("slots", "rows", "lens", "parts"), "*i32"),
    **dict.fromkeys(("part_acc", "part_stats"), "*fp32"),
    **dict.fromkeys(("scale", "softcap", "out_scale"), "fp32"),
    "tiles": "*i64",
    "window": "i32",
}
_UNALIGNED = ("slots", "tiles", "rows", "lens", "parts", "window")


def attention(
    kernel: Any,
    name: str,
    *,
    rows: int = 16,
    dim: int = 128,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    group: int = 8,
    heads: int = 64,
    page: int = 1,
    softcap: bool = False,
    window: bool = False,
) -> Variant:
    """Return a kernel of paged or prefill attention for one kind of model and tile."""
    tile = Tile(rows=rows)
    kv = kv_dtype or dtype
    types = {**_TYPES, "q": f"*{dtype}", "k_cache": f"*{kv}", "v_cache": f"*{kv}"}
    types["out"] = f"*{dtype}"
    width = max(64, 1 << (dim - 1).bit_length())
    constants = {
        "H": heads,
        "G": group,
        "D": dim,
        "BLOCK_D": width,
        "BLOCK_M": rows,
        "BLOCK_N": tile.keys,
        "BLOCK_G": 1 << (group - 1).bit_length(),
        "SPLIT": tile.split,
        "PAGE": page,
        "SOFTCAP": softcap,
        "WINDOW": window,
        "FIELDS": len(FIELDS),
    }
    has_loop = "BLOCK_N" in kernel.arg_names
    folds = kernel is prefill._prefill
    options = {target: tile.options(target, dim, folds, softcap) for target in TARGETS}
    if not has_loop:
        options = _plain(1)
    return _variant(kernel, name, types, constants, options, tile.keys if has_loop else 0)


def _plain(warps: int) -> dict[str, dict[str, Any]]:
    return {target: {"num_warps": warps, "enable_fp_fusion": False} for target in TARGETS}


def _variant(
    kernel: Any,
    name: str,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, dict[str, Any]],
    keys: int = 0,
) -> Variant:
    names = kernel.arg_names
    types = {**{n: "i32" for n in names if n.startswith("stride_")}, **types}
    return Variant(
        name=name,
        kernel=kernel,
        types={n: t for n, t in types.items() if n in names and n not in constants},
        constants={n: value for n, value in constants.items() if n in names},
        keys=keys,
        options=options,
        unaligned=tuple(n for n in _UNALIGNED if n in names),
    )


def attention_variants() -> Iterator[Variant]:
    """Yield the attention kernels: those with a loop over keys, which must use matrix cores."""
    for dim in DIMS:
        for rows in TILES:
            yield attention(paged._partial, f"paged D{dim} rows{rows}", dim=dim, rows=rows)
        rows = Tile.for_prefill(dim).rows
        yield attention(prefill._prefill, f"prefill D{dim} rows{rows}", dim=dim, rows=rows)
    yield attention(prefill._prefill, "prefill D128 rows16")
    yield attention(paged._partial, "paged D128 rows16 fp16", dtype="fp16")
    yield attention(paged._partial, "paged D128 rows16 fp8 cache", kv_dtype="fp8")
    yield attention(paged._partial, "paged D128 rows16 page16", page=16)
    yield attention(paged._partial, "paged D128 rows16 group6", group=6, heads=12)
    yield attention(
        paged._partial, "paged D256 rows16 softcap window", dim=256, softcap=True, window=True
    )


def other_variants() -> Iterator[Variant]:
    """Yield all other kernels."""
    for dim in DIMS:
        yield attention(paged._combine, f"combine D{dim}", dim=dim)
    tile = {
        "BLOCK_M": row_invariant.BLOCK_M,
        "BLOCK_N": row_invariant.BLOCK_N,
        "BLOCK_K": row_invariant.BLOCK_K,
    }
    bf16 = dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
    sizes = dict.fromkeys(("num_rows", "N", "K"), "i32")
    yield _variant(
        row_invariant._linear,
        "linear",
        {**bf16, **sizes},
        {**tile, "HAS_BIAS": True, "stride_wk": 1},
        {target: row_invariant.options(target) for target in TARGETS},
    )
    plain = _plain(4)
    width = {"D": 4096, "BLOCK_D": 4096}
    norm = {**bf16, "eps": "fp32"}
    yield _variant(row_invariant._rms_norm, "rms_norm", norm, {**width, "HAS_WEIGHT": True}, plain)
    yield _variant(row_invariant._row_mean, "row_mean", bf16, width, plain)


def variants() -> list[Variant]:
    """Return every kernel that this package launches, in the configurations it ships."""
    return [*attention_variants(), *other_variants()]
