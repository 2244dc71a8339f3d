"""Every kernel as it is launched, for compilation ahead of time: what the static gates look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.kernels import launch_options
from outrider.kernels.ngram_match import triton as ngram_match
from outrider.kernels.paged_attention import triton as paged
from outrider.kernels.paged_attention.layout import FIELDS, Tile
from outrider.kernels.prefill_attention import triton as prefill
from outrider.kernels.renorm_prob import triton as renorm_prob
from outrider.kernels.row_invariant import triton as row_invariant
from outrider.kernels.sample_match import triton as sample_match
from outrider.kernels.static import TARGETS, Variant
from outrider.kernels.tree_sampling import triton as tree_sampling

DIMS = (64, 96, 128, 256)
TILES = (16, 32, 64)

_TYPES = {
    **dict.fromkeys(("slots", "tails", "rows", "lens", "parts"), "*i32"),
    **dict.fromkeys(("part_acc", "part_stats"), "*fp32"),
    **dict.fromkeys(("scale", "softcap", "out_scale"), "fp32"),
    "tiles": "*i64",
    "window": "i32",
}
_UNALIGNED = ("slots", "tails", "tiles", "rows", "lens", "parts", "window")


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
    return {target: launch_options(warps) for target in TARGETS}


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
        rows = Tile().for_prefill("gfx942", dim, same_bits=False).rows
        yield attention(prefill._prefill, f"prefill D{dim} rows{rows}", dim=dim, rows=rows)
    yield attention(prefill._prefill, "prefill D128 rows16")
    yield attention(paged._partial, "paged D128 rows16 fp16", dtype="fp16")
    yield attention(paged._partial, "paged D128 rows16 fp8 cache", kv_dtype="fp8")
    yield attention(paged._partial, "paged D128 rows16 page16", page=16)
    yield attention(paged._partial, "paged D128 rows16 group6", group=6, heads=12)
    yield attention(
        paged._partial, "paged D256 rows16 softcap window", dim=256, softcap=True, window=True
    )


def layer_variants() -> Iterator[Variant]:
    """Yield what goes with attention: the fold of its splits, linear layers and norms."""
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


def sampling_variants() -> Iterator[Variant]:
    """Yield what works on whole rows of the vocabulary."""
    tokens = dict.fromkeys(("predicts", "accept_index", "accept_token_num", "nodes"), "*i32")
    tree = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling")
    probs = ("probs", "target_probs", "draft_probs", "uniform_samples", "coins")
    types = {
        **tokens,
        **dict.fromkeys(tree, "*i64"),
        **dict.fromkeys(probs, "*fp32"),
        **dict.fromkeys(("threshold_single", "threshold_acc"), "fp32"),
        **dict.fromkeys("STV", "i32"),
    }
    for name, limits, by_mass in (("top_k", "*i32", False), ("top_p", "*fp32", True)):
        tile = {"BLOCK": renorm_prob.BLOCK, "WIDE": renorm_prob.WIDE, "P": renorm_prob.PIVOTS}
        yield _variant(
            renorm_prob.renorm_kernel,
            f"{name}_renorm_prob",
            {**types, "limits": limits, "out": "*fp32"},
            {**tile, "BY_MASS": by_mass},
            _plain(renorm_prob.NUM_WARPS),
        )
    yield _variant(tree_sampling.walk_kernel, "tree walk", types, {}, _plain(1))
    block = {"BLOCK": tree_sampling.BLOCK}
    warps = _plain(tree_sampling.NUM_WARPS)
    yield _variant(tree_sampling.draw_kernel, "tree draw", types, block, warps)
    yield from _verify_variants()


def _verify_variants() -> Iterator[Variant]:
    """Yield sampling by keyed coins, and the comparison with 8 drafts: V = 151,936."""
    integers = ("seeds", "positions", "tokens", "drafts", "parents", "rows_start", "accepted")
    types = {
        **dict.fromkeys((*integers, "num_accepted", "next_tokens"), "*i64"),
        **dict.fromkeys(("p", "q", "logits", "temperature", "top_p", "min_p"), "*fp32"),
        **dict.fromkeys(("best", "mass"), "*fp64"),
        **dict.fromkeys(("top_k", "winner"), "*i32"),
        **dict.fromkeys(("V", "S", "D", "max_drafts", "stride"), "i32"),
    }
    split = {"SPLIT": sample_match.SPLIT, "SPLITS": 64, "DRAFTS": 8, "BLOCK": 1024}
    for kind in ("fp32", "bf16"):
        logits = {**types, "logits": f"*{kind}"}
        yield _variant(sample_match.draw_kernel, f"sample draw {kind}", logits, split, _plain(4))
        tall = {**split, "BLOCK": 2048}
        yield _variant(sample_match.pick_kernel, f"sample pick {kind}", logits, tall, _plain(8))
    walk = {"DEPTHS": 8, "ROWS": 32}
    yield _variant(sample_match.match_kernel, "match", types, walk, _plain(1))


def lookup_variants() -> Iterator[Variant]:
    """Yield the lookup of drafts."""
    types = dict.fromkeys(("tokens", "lengths", "max_drafts", "drafts", "num_drafts"), "*i32")
    yield _variant(
        ngram_match.match_kernel,
        "ngram_match",
        {**types, "stride": "i32", "width": "i32"},
        {"MIN_N": 2, "MAX_N": 4, "WIDTH": 8, "BLOCK": ngram_match.BLOCK},
        _plain(ngram_match.NUM_WARPS),
    )


def variants() -> list[Variant]:
    """Return every kernel that this package launches, in the configurations it ships."""
    return [
        *attention_variants(),
        *layer_variants(),
        *sampling_variants(),
        *lookup_variants(),
    ]
