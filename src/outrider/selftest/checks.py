"""Every kernel against plain torch or float64: integers equal, floats within a stated bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from outrider.selftest import bitwise, verification
from outrider.selftest.attention import near_checks
from outrider.selftest.check import Check, Setting, equal, near
from outrider.selftest.verification import normal

__all__ = ["KERNELS", "all_checks"]


def _ngram_match(setting: Setting) -> Iterator[Check]:
    from outrider.kernels.ngram_match import reference, triton

    def run(dtype: torch.dtype) -> str:
        longest = 100 if setting.interpreted else 4096
        generator = torch.Generator().manual_seed(8)
        lengths = torch.tensor([0, 1, 2, 5, 17, 64, longest - 1, longest], dtype=torch.int32)
        tokens = torch.randint(0, 4, (len(lengths), longest), generator=generator)
        given: dict[str, Any] = {
            "tokens": tokens.to(dtype),
            "lengths": lengths,
            "max_drafts": torch.tensor([5, 5, 5, 5, 0, 3, 5, 9], dtype=torch.int32),
            "width": 5,
            "min_n": 2,
            "max_n": 4,
        }
        expected, found = (
            op.ngram_match(**some)
            for op, some in ((reference, given), (triton, setting.move(given)))
        )
        for what, ours, theirs in zip(("drafts", "counts"), found, expected, strict=True):
            equal(ours, theirs, what)
        return f"{len(lengths)} histories, {int(expected[1].sum())} drafts equal"

    for dtype in (torch.int32, torch.int64):
        kind = str(dtype).removeprefix("torch.")
        yield Check(f"ngram_match: {kind}", "correctness", partial(run, dtype))


def _row_invariant(setting: Setting) -> Iterator[Check]:
    from outrider.kernels.row_invariant import triton

    small, large = [(3, 100, 7), (65, 130, 70)], [(3, 100, 7), (65, 4096, 1000)]

    def linear(m: int, k: int, n: int, dtype: torch.dtype) -> str:
        x, weight, bias = (
            normal(*shape, seed=9).to(dtype).to(setting.device) for shape in ((m, k), (n, k), (n,))
        )
        exact = x.double() @ weight.double().T + bias.double()
        # one rounding of the result; sums in float32, some of whose adders truncate
        terms = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        bound = torch.finfo(dtype).eps * exact.abs() + 2.0**-19 * terms
        worst = near(triton.linear(x, weight, bias), exact, bound, "products")
        return f"{m * n} products within {worst:.2f} of eps |y| + 2^-19 |x| |W|"

    def norms(dim: int) -> str:
        x, weight = normal(5, dim, seed=10).to(setting.device), normal(dim).to(setting.device)
        wide = x.double()
        exact = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        worst = near(triton.rms_norm(x, weight, 1e-5), exact, 2e-6 + 2e-6 * exact.abs(), "norms")
        mean = wide.mean(-1, keepdim=True)
        worst = max(worst, near(triton.row_mean(x), mean, 2e-6, "means"))
        return f"5 rows within {worst:.2f} of 2e-6"

    for m, k, n in small if setting.interpreted else large:
        for dtype in (torch.bfloat16, torch.float32):
            kind = str(dtype).removeprefix("torch.")
            yield Check(f"row_invariant: linear {m} x {k} x {n}, {kind}", "correctness",
                        partial(linear, m, k, n, dtype))  # fmt: skip
    for dim in (7, 1000) if setting.interpreted else (7, 1000, 4096, 8192):
        yield Check(f"row_invariant: norms of {dim}", "correctness", partial(norms, dim))


KERNELS: dict[str, Callable[[Setting], Iterator[Check]]] = {
    "paged_attention": partial(near_checks, kernel="paged_attention"),
    "prefill_attention": partial(near_checks, kernel="prefill_attention"),
    "row_invariant": _row_invariant,
    "sample_match": verification.sample_match,
    "renorm_prob": verification.renorm_prob,
    "tree_sampling": verification.tree_sampling,
    "ngram_match": _ngram_match,
}
"""The checks of correctness of each folder of `outrider.kernels` that has a triton.py."""

BITWISE: dict[str, Callable[[Setting], Iterator[Check]]] = {
    "attention": bitwise.attention_checks,
    "layers": bitwise.layer_checks,
}


def all_checks(setting: Setting) -> list[Check]:
    """Return every check. A kernel that cannot be imported here is a check that fails."""
    found: list[Check] = []
    for section, makers in (("correctness", KERNELS), ("bitwise", BITWISE)):
        for name, make in makers.items():
            try:
                found += make(setting)
            except Exception as error:
                found.append(Check(f"{name}: import", section, partial(_again, error)))
    return found


def _again(error: Exception) -> str:
    raise error
