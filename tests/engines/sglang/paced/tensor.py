"""Tensors whose values are known later: reading one waits for the pass that makes it.

The values are there from the start, because nobody computes them. What is computed from a tensor is
ready when the latest of its inputs is. What ops themselves take is booked by `work`, if it is
priced; otherwise they take no time on the device, and real time on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from paced import work
from paced.clock import real

Wait = Callable[[float], None]
"""Returns when a moment has come."""

_T = torch.Tensor
_plain = torch._C.DisableTorchFunctionSubclass

_READS = {
    _T.tolist, _T.item, _T.numpy, _T.cpu, _T.equal, torch.equal, _T.allclose, torch.allclose,
    _T.nonzero, torch.nonzero, torch.argwhere, _T.argwhere, _T.is_nonzero, torch.is_nonzero,
    _T.masked_select, torch.masked_select, _T.unique, torch.unique, _T.unique_consecutive,
    torch.unique_consecutive, _T.bincount, torch.bincount, _T.__bool__, _T.__int__, _T.__float__,
    _T.__index__, _T.__complex__, _T.__array__, _T.__contains__, _T.__repr__, _T.__format__,
    _T.__dlpack__, _T.__reduce_ex__,
}  # fmt: skip
"""What cannot go on without the values."""

_QUIET = {
    _T.size, _T.dim, _T.numel, _T.__len__, _T.stride, _T.data_ptr, _T.storage_offset, _T.is_pinned,
    _T.is_contiguous, _T.__hash__, _T.shape.__get__, _T.device.__get__, _T.dtype.__get__,
    _T.ndim.__get__, _T.is_cuda.__get__, _T.requires_grad.__get__, _T.layout.__get__,
    _T.untyped_storage, _T.element_size, _T.get_device, torch.numel, torch.is_floating_point,
    _T.is_floating_point,
}  # fmt: skip
"""What is known of a tensor without its values."""

_REPEATS = {_T.repeat_interleave, torch.repeat_interleave}
_WHERE = {torch.where, _T.where}


class Timed(torch.Tensor):
    """A tensor on the paced device.

    ready: when its values are known
    wait: how to wait for that
    """

    ready: float
    wait: Wait

    @staticmethod
    def of(values: Tensor, ready: float, wait: Wait) -> Timed:
        """Return the values as a tensor that is known later."""
        timed = values.as_subclass(Timed)
        timed.ready, timed.wait = ready, wait
        return timed

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        since, books = real(), work.current()
        kwargs = kwargs or {}
        with _plain():
            if func in _QUIET:
                result = func(*args, **kwargs)
                if books is not None:
                    books.asked(since)
                return result
            ready, wait = _latest(args, kwargs)
            if wait is not None and reads(func, args, kwargs):
                wait(ready)
                result = func(*args, **kwargs)
                # what was read is the host's
                return result.as_subclass(Tensor) if isinstance(result, Tensor) else result
            result = func(*args, **kwargs)
            if wait is None:
                return result
            if books is not None:
                ready = books.operation(func, args, kwargs, result, since, ready)
            if func is _T.__setitem__:
                _marked(args[0], ready, wait)
            return _marked(result, ready, wait)


def reads(func: Any, args: tuple, kwargs: dict) -> bool:
    """Say whether the host needs the values of a device's tensors to go on."""
    if func in _READS:
        return True
    if func is _T.__getitem__:
        return _is_mask(args[1])
    if func is _T.__setitem__:  # one value for all is a masked fill, which needs no count
        return _is_mask(args[1]) and isinstance(args[2], Tensor) and args[2].dim() > 0
    if func is _T.to:
        return _to_host(args, kwargs)
    if func in _REPEATS:
        return kwargs.get("output_size") is None and any(
            isinstance(a, Tensor) for a in (*args[1:], *kwargs.values())
        )
    return func in _WHERE and len(args) + len(kwargs) == 1


def _is_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


def _to_host(args: tuple, kwargs: dict) -> bool:
    """Say whether `Tensor.to` copies to the host and waits. There "cpu" means the host."""
    device = kwargs.get("device", args[1] if len(args) > 1 else None)
    if isinstance(device, str):
        device = torch.device(device)
    if not isinstance(device, torch.device) or device.type != "cpu":
        return False
    position = 3 if len(args) > 2 and isinstance(args[2], torch.dtype) else 2
    non_blocking = kwargs.get("non_blocking", args[position] if len(args) > position else False)
    return not non_blocking


def _latest(args: Iterable[Any], kwargs: dict) -> tuple[float, Wait | None]:
    """Return when the last of the inputs is ready."""
    ready, wait = 0.0, None
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Timed):
            if value.ready >= ready:
                ready, wait = value.ready, value.wait
        elif isinstance(value, (list, tuple)):
            for part in value:
                if isinstance(part, Timed) and part.ready >= ready:
                    ready, wait = part.ready, part.wait
    return ready, wait


def _marked(result: Any, ready: float, wait: Wait) -> Any:
    """Return a result as what is ready then. A tensor that was written to becomes one too."""
    if isinstance(result, Tensor):
        if isinstance(result, Timed):
            result.ready = max(result.ready, ready)
            return result
        if type(result) is not Tensor:
            return result
        # a view of the same object would not reach whoever holds the tensor that was written to
        result.__class__ = Timed
        result.ready, result.wait = ready, wait
        return result
    if isinstance(result, (tuple, list)):
        return type(result)([_marked(part, ready, wait) for part in result])
    return result


def run_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Call what is the device's work, whatever stands for it here: nothing in it waits."""
    ready, wait = _latest(args, kwargs)
    books = work.current()
    with _plain():
        if books is None:
            result = kernel(*args, **kwargs)
        else:
            result, ready = books.function(kernel, args, kwargs, ready)
        return result if wait is None else _marked(result, ready, wait)


class GreedyLogits(Timed):
    """Logits of which only the best token is known: [N, V] without memory.

    tokens: [N] int64 what argmax returns
    """

    tokens: Tensor

    @staticmethod
    def over(tokens: Tensor, vocabulary: int, ready: float, wait: Wait) -> GreedyLogits:
        """Return logits whose best tokens these are."""
        with _plain():
            logits = torch.zeros(1, 1).expand(len(tokens), vocabulary).as_subclass(GreedyLogits)
            logits.tokens, logits.ready, logits.wait = tokens, ready, wait
            return logits

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        since, books = real(), work.current()
        kwargs = kwargs or {}
        self = args[0] if args else None
        with _plain():
            if func in _QUIET:
                result = func(*args, **kwargs)
                if books is not None:
                    books.asked(since)
                return result
            if isinstance(self, GreedyLogits):
                if func in (torch.argmax, _T.argmax) and _last_dim(args, kwargs):
                    tokens, ready = self.tokens.clone(), self.ready
                    if books is not None:
                        ready = books.argmax(len(tokens), since, ready)
                    return Timed.of(tokens, ready, self.wait)
                if func in (_T.detach, _T.float, _T.contiguous, _T.to):
                    return self
                if func is _T.__getitem__ and args[1] == (0, 0):  # who times a pass reads one value
                    return Timed.of(torch.zeros(()), self.ready, self.wait)
                if func is _T.__getitem__ and not isinstance(args[1], tuple):
                    tokens, vocabulary = self.tokens[args[1]], self.shape[-1]
                    return GreedyLogits.over(tokens, vocabulary, self.ready, self.wait)
        raise NotImplementedError(
            f"{getattr(func, '__name__', func)} of the paced device's logits: they have a best "
            "token and nothing else; ask for greedy answers without logprobs"
        )


def _last_dim(args: tuple, kwargs: dict) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim in (-1, 1) and not kwargs.get("keepdim", False)
