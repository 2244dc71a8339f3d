"""Operations whose rows do not depend on how many rows there are.

*Linear layers.* A matrix product picks its algorithm, and with it the order of its sums, by its
shape. In tiles of a fixed number of rows the shape never changes.

On a GPU the products are Triton's (`row_invariant.triton`), and so are the means inside norms.

*Functions of single elements.* On CPU these run in vectors, with a scalar version for what is left
at the end of a thread's share; the two differ in the last bit (`silu`, `exp`, `cos`). Rows padded
to whole vectors, in calls too small to be shared among threads, never meet the scalar version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from outrider.kernels import use_triton

__all__ = ["ROWS", "RowInvariant", "elementwise", "in_tiles"]

ROWS = 16
"""The rows of a tile. On CPU, products of 16 rows cost about what products of one row cost."""

VECTOR = 64
"""A multiple of the elements that one round of a vector loop takes, whatever the type."""

SERIAL = 32768
"""Up to so many elements, torch does not share a call among threads."""


def in_tiles(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a row-wise product to x, [.., K], in tiles of ROWS rows, padded with zeros."""
    flat = x.reshape(-1, x.shape[-1])
    count = len(flat)
    if count % ROWS:
        flat = F.pad(flat, (0, 0, 0, -count % ROWS))
    tiles = [product(tile) for tile in torch.split(flat, ROWS)]
    out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    return out[:count].view(*x.shape[:-1], out.shape[-1])


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of single elements to x, each element always by its vector version."""
    width = x.shape[-1]
    if x.device.type != "cpu":
        return function(x)
    if width % VECTOR == 0 and x.numel() <= SERIAL:
        return function(x.contiguous())
    flat = F.pad(x.reshape(-1, width), (0, -width % VECTOR)).contiguous()
    rows = max(1, SERIAL // flat.shape[-1])
    parts = [function(part) for part in torch.split(flat, rows)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[:, :width].reshape(x.shape)


_ELEMENTWISE = {
    getattr(home, name)
    for home in (torch, torch.Tensor, F)
    for name in ("cos", "erf", "exp", "gelu", "pow", "sigmoid", "silu", "sin", "softplus", "tanh")
    if hasattr(home, name)
}


_MEANS = {torch.mean, torch.Tensor.mean}
_MATMULS = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}


class RowInvariant(TorchFunctionMode):
    """While active, a model's layers are row invariant. Its modules and weights are untouched.

    triton: whether products run as Triton kernels; None: as `use_triton` says for their device
    """

    def __init__(self, triton: bool | None = None) -> None:
        super().__init__()
        self._triton = triton

    @staticmethod
    def is_active() -> bool:
        """Whether one is active in this thread: a second one would tile every product again."""
        active = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        return any(isinstance(mode, RowInvariant) for mode in active)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Reroute linear layers, products with a matrix (SGLang's head), `addmm` with a bias
        vector (GPT-2's) or with rows (LoRA's), and functions of single elements; on a GPU also
        means of rows."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and self._is_by_triton(args[0].device):
            return _by_triton(func, args, kwargs)
        if func is F.linear:
            x, *rest = args
            return in_tiles(lambda tile: func(tile, *rest, **kwargs), x)
        if func in _MATMULS and args[1].dim() == 2:
            x, weight = args
            return in_tiles(lambda tile: func(tile, weight, **kwargs), x)
        if func is torch.addmm and args[0].dim() == 1:
            bias, x, weight = args
            return in_tiles(lambda tile: func(bias, tile, weight, **kwargs), x)
        if func is torch.addmm:
            return _addmm(*args, **kwargs)
        if func is torch.Tensor.addmm_:
            return _addmm(*args, **kwargs, out=args[0])
        if func in _ELEMENTWISE:
            x, *rest = args
            return elementwise(lambda part: func(part, *rest, **kwargs), x)
        return func(*args, **kwargs)

    def _is_by_triton(self, device: torch.device) -> bool:
        return use_triton(device) if self._triton is None else self._triton


def _addmm(
    rows: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """beta rows + alpha x @ weight. rows: [N, M]; x: [N, K]; weight: [K, M]."""
    found = in_tiles(lambda tile: tile @ weight, x) * alpha
    found = found + rows * beta if beta else found
    return found if out is None else out.copy_(found)


def _by_triton(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reroute a call to a Triton kernel, which has one tile for every number of rows."""
    from outrider.kernels.row_invariant import triton

    if func is F.linear:
        return triton.linear(*args, **kwargs)
    if func in _MATMULS and args[1].dim() == 2:
        return triton.linear(args[0], args[1].t())
    if func is torch.addmm and args[0].dim() == 1:
        return triton.linear(args[1], args[2].t(), args[0])
    if func in _MEANS and args[1:] == (-1,) and kwargs == {"keepdim": True}:
        return triton.row_mean(args[0])
    if func is getattr(F, "rms_norm", None):
        return _rms_norm(*args, **kwargs)
    return func(*args, **kwargs)


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    from outrider.kernels.row_invariant import triton

    flat = x.flatten(-len(shape))
    flat_weight = None if weight is None else weight.flatten()
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return triton.rms_norm(flat, flat_weight, eps).view(x.shape)
