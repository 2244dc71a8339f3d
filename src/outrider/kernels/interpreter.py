"""Triton's interpreter, made trustworthy: kernels run on CPU, as a GPU would compute, and checked.

Stock, the interpreter multiplies bfloat16 bit patterns in `tl.dot` and truncates where hardware
rounds. Inside `interpreter.checked()`

* bfloat16 converts exactly, rounds to nearest even, and takes part in nothing but loads, stores,
  casts and `tl.dot`: kernels do their arithmetic in float32, as matrix cores do;
* `tl.dot` adds products in steps of 16 along the inner dimension, each step rounded once to
  float32: a row's result depends on the order of its own terms, and on no other row;
* every active lane of a load or store must lie inside a tensor argument (`OutOfBounds`);
* what one program writes no other program may read or write in the same launch (`Race`);
* programs run in any order that is asked for.

Set TRITON_INTERPRET=1 before the first kernel is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

MFMA_K = 16
"""How many products a matrix instruction adds at once: v_mfma_f32_16x16x16, mma.m16n8k16."""


class OutOfBounds(Exception):
    """A lane reads or writes outside of every tensor argument."""


class Race(Exception):
    """Two programs of a launch touch the same address, and one of them writes."""


class Traffic:
    """Bytes that the kernels launched so far have read, by tensor."""

    def __init__(self) -> None:
        self._by_address: Counter[int] = Counter()

    def read(self, tensor: torch.Tensor) -> int:
        """Return how many bytes were read of a tensor that was a kernel's argument."""
        return self._by_address[tensor.data_ptr()]

    def add(self, address: int, count: int) -> None:
        """Count bytes read of the tensor at an address."""
        self._by_address[address] += count


@contextmanager
def checked(shuffle: int | None = None) -> Iterator[Traffic]:
    """Run the kernels launched inside faithfully, with every access checked and counted.

    shuffle: a seed for the order in which the programs of a launch run
    """
    builder, executor = stock.interpreter_builder, stock.GridExecutor
    stock_class = type(builder)
    builder.__class__ = _Builder
    builder.launch = _Launch(shuffle)
    stock.GridExecutor = _Executor
    stock.InterpretedFunction.__call__ = _call_device_function
    try:
        yield builder.launch.traffic
    finally:
        stock.InterpretedFunction.__call__ = _stock_call
        stock.GridExecutor = executor
        builder.__class__ = stock_class


def _bf16_to_f32(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _f32_to_bf16(values: Any) -> Any:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


class _Launch:
    """What one launch may touch, and what its programs have touched."""

    def __init__(self, shuffle: int | None) -> None:
        self._shuffle = shuffle
        self.traffic = Traffic()
        self.begin([])

    def begin(self, tensors: list[torch.Tensor]) -> None:
        spans = sorted(_span(tensor) for tensor in tensors)
        self._starts = np.array([start for start, _ in spans], np.uint64)
        self._ends = np.array([end for _, end in spans], np.uint64)
        self._accesses: dict[bool, list[tuple[int, Any]]] = {True: [], False: []}
        self.program = 0

    def order(self, count: int) -> Any:
        if self._shuffle is None:
            return np.arange(count)
        return np.random.default_rng(self._shuffle).permutation(count)

    def touch(self, pointers: TensorHandle, mask: TensorHandle, writes: bool) -> None:
        lanes = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].ravel()
        if not lanes.size:
            return
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        span = np.searchsorted(self._starts, lanes, side="right") - 1
        bad = (span < 0) | (lanes + size > self._ends[np.maximum(span, 0)])
        if bad.any():
            what = "write" if writes else "read"
            raise OutOfBounds(f"{what} of {bad.sum()} of {lanes.size} lanes, {self.program=}")
        self._accesses[writes].append((self.program, np.unique(lanes)))
        if not writes:
            for i, lanes_there in enumerate(np.bincount(span)):
                self.traffic.add(int(self._starts[i]), int(lanes_there * size))

    def end(self) -> None:
        writes = self._accesses[True]
        if not writes:
            return
        address = np.concatenate([lanes for _, lanes in writes])
        program = np.concatenate([np.full(len(lanes), p) for p, lanes in writes])
        order = np.lexsort((program, address))
        address, program = address[order], program[order]
        shared = (address[1:] == address[:-1]) & (program[1:] != program[:-1])
        if shared.any():
            raise Race(f"{shared.sum()} addresses are written by more than one program")
        for reader, lanes in self._accesses[False]:
            at = np.minimum(np.searchsorted(address, lanes), len(address) - 1)
            if ((address[at] == lanes) & (program[at] != reader)).any():
                raise Race(f"program {reader} reads what another program writes")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    rest = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr(), tensor.data_ptr() + int(rest)


_stock_call = stock.InterpretedFunction.__call__


def _call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel's helper: `tl` is patched already, by the launch. Doing so again is slow."""
    if function.fn.__globals__.get("tl") is tl:
        return function.rewrite()(*args, **kwargs)
    return _stock_call(function, *args, **kwargs)


class _Executor(stock.GridExecutor):  # type: ignore[misc]
    def _init_args_hst(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = super()._init_args_hst(args, kwargs)
        values = [*args, *kwargs.values()]
        stock.interpreter_builder.launch.begin([x for x in values if isinstance(x, torch.Tensor)])
        return args, kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        super().__call__(*args, **kwargs)
        stock.interpreter_builder.launch.end()


class _Builder(InterpreterBuilder):  # type: ignore[misc]
    launch: _Launch

    # The stock loop counts programs up; which program runs at each count is the launch's choice.
    def set_grid_dim(self, *dim: int) -> None:
        super().set_grid_dim(*dim)
        self.programs = self.launch.order(int(np.prod(dim)))

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        shape = self.grid_dim
        self.launch.program = int(self.programs[np.ravel_multi_index((x, y, z), shape)])
        super().set_grid_idx(*(int(i) for i in np.unravel_index(self.launch.program, shape)))

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        self.launch.touch(ptrs, mask, writes=False)
        return super().create_masked_load(ptrs, mask, other, *rest)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self.launch.touch(ptrs, mask, writes=True)
        return super().create_masked_store(ptrs, value, mask, *rest)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target:
            return src
        if source == tl.bfloat16:
            wide = TensorHandle(_bf16_to_f32(src.data), tl.float32)
            return wide if target == tl.float32 else self.cast_impl(wide, dst_type)
        if target == tl.bfloat16:
            return TensorHandle(_f32_to_bf16(src.data.astype(np.float32)), tl.bfloat16)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if target == tl.bfloat16 and source.primitive_bitwidth == 8:
            return self.cast_impl(super().create_fp_to_fp(src, tl.float32, rounding), dst_type)
        if tl.bfloat16 in (source, target):
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        _no_bf16(lhs, rhs)
        return super().binary_op(lhs, rhs, op)

    def unary_op(self, arg: Any, op: Any) -> Any:
        _no_bf16(arg)
        return super().unary_op(arg, op)

    def create_dot(self, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if not a.dtype.is_floating():
            return super().create_dot(a, b, d, *rest)
        x, y = (self.cast_impl(h, tl.float64).data for h in (a, b))
        total = d.data.astype(np.float32)
        for k in range(0, x.shape[-1], MFMA_K):
            # products are exact in float64 and their sum nearly so: one rounding a step
            step = np.matmul(x[..., k : k + MFMA_K], y[..., k : k + MFMA_K, :])
            total = (total + step).astype(np.float32)
        return TensorHandle(total, d.dtype.scalar)


def _no_bf16(*handles: Any) -> None:
    if any(h.dtype.scalar == tl.bfloat16 for h in handles):
        raise TypeError("arithmetic on bfloat16: cast to float32 first")
