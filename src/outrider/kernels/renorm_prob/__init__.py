"""Top-k and top-p over rows of probabilities: what falls out becomes 0, the rest sums to 1.

The functions have the names, arguments and meaning of those in `sgl_kernel` and FlashInfer.
"""

from __future__ import annotations

from torch import Tensor

from outrider.kernels import use_triton
from outrider.kernels.renorm_prob import reference

__all__ = ["top_k_renorm_prob", "top_p_renorm_prob"]


def top_k_renorm_prob(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """Keep the k largest of each row, and all that equal the last of them; make the row sum to 1.

    probs: [N, V] floating point, >= 0. A row with a NaN becomes NaN.
    top_k: [N] integers, or one for all; below 1 counts as 1
    -> [N, V] float32
    """
    _check(probs, top_k, "top_k")
    if isinstance(top_k, Tensor) and top_k.is_floating_point():
        raise TypeError(f"top_k must hold integers, not {top_k.dtype}")
    if use_triton(probs.device):
        from outrider.kernels.renorm_prob import triton

        return triton.top_k_renorm_prob(probs, top_k)
    return reference.top_k_renorm_prob(probs, top_k)


def top_p_renorm_prob(probs: Tensor, top_p: Tensor | float) -> Tensor:
    """Keep the fewest largest whose mass reaches top_p, and all that equal the last of them.

    probs: [N, V] floating point, >= 0, rows that sum to about 1. A row with a NaN becomes NaN.
    top_p: [N] floating point, or one for all; 1 and more keeps everything
    -> [N, V] float32, rows that sum to 1
    """
    _check(probs, top_p, "top_p")
    if use_triton(probs.device):
        from outrider.kernels.renorm_prob import triton

        return triton.top_p_renorm_prob(probs, top_p)
    return reference.top_p_renorm_prob(probs, top_p)


def _check(probs: Tensor, limit: Tensor | float, name: str) -> None:
    if probs.dim() != 2 or not probs.is_floating_point() or probs.shape[-1] == 0:
        raise ValueError(
            f"probs must be [N, V] floating point, not {list(probs.shape)} of "
            f"{probs.dtype}: flatten the leading dimensions"
        )
    if probs.stride(-1) != 1:
        raise ValueError("the rows of probs must be contiguous: call probs.contiguous()")
    if isinstance(limit, Tensor):
        if limit.shape not in ((), (len(probs),)):
            raise ValueError(
                f"{name} must hold one value for each of {len(probs)} rows, not {list(limit.shape)}"
            )
        if limit.device != probs.device:
            raise ValueError(f"{name} is on {limit.device}, probs on {probs.device}: move it")
