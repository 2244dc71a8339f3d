"""What one step reads from the device and copies to it, on a machine without a device.

Tensors are labelled as the device's: what the worker is given, what is made with the label as
`device=`, and what is computed from such a tensor. Then every torch call of our own code is looked
at:

* a *read* needs a value on the host (`tolist`, `item`, a boolean mask, `.cpu()`, ...);
* a *copy* brings host values to the device (`torch.tensor(..., device=)`, `.to(device)`, a Python
  list or a host tensor as an index, ...);
* a *mix* is an operation over tensors of both, which a GPU refuses: it is refused here too.

What SGLang does is not counted, but labels are followed through it.

$OUTRIDER_RECORD names a JSON-lines file: a server on the paced device then writes a line for each
decode step of Outrider's worker.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paced.tensor import GreedyLogits, Timed, reads

VARIABLE = "OUTRIDER_RECORD"
DEVICE = torch.device("cpu:0")
"""The label. Plain "cpu" is the host."""

_T = torch.Tensor
_WITH_VALUES = {torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray}
_EMPTY = {
    torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.rand, torch.randint,
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.linspace,
}  # fmt: skip
_NEW_WITH_VALUES = {_T.new_tensor}
_INDEXING = {_T.__getitem__, _T.__setitem__}
_HERE = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__)


class MixedDevices(RuntimeError):
    """An operation over tensors of the host and of the device."""


@dataclass
class Step:
    """What one step did, each as "file:line function".

    requests: of the batch
    """

    requests: int = 0
    reads: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    mixes: list[str] = field(default_factory=list)


class Recorder(TorchFunctionMode):
    """Follows the label through torch calls, and notes what our own code does.

    ours: says of a file whether it is our own code
    step: where to note; None only follows the label
    """

    def __init__(self, ours: Callable[[str], bool], step: Step | None = None) -> None:
        super().__init__()
        self._ours, self.step = ours, step

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__class__.__name__ == "method-wrapper":  # a property
            return func(*args, **kwargs)
        tensors = list(_tensors((*args, *kwargs.values())))
        device = [t for t in tensors if is_labelled(t)]
        host = [t for t in tensors if not is_labelled(t) and t.dim() > 0]
        target = _target(args, kwargs)
        caller = self._caller()
        if caller is not None:
            self._note(func, args, kwargs, device, host, target, caller)
        result = func(*args, **_unlabelled(kwargs))
        to_host = func is _T.cpu or (func is _T.to and target is not None and not _is_ours(target))
        written = func is _T.__setitem__ or getattr(func, "__name__", "").endswith("_")
        if to_host or func is _T.numpy:
            _label(result, False)
        elif written and isinstance(args[0], Tensor):
            _label(result, is_labelled(args[0]))  # stays where it was
        elif device or (target is not None and _is_ours(target)):
            _label(result, True)
        return result

    def _note(
        self, func: Any, args: tuple, kwargs: dict, device: list[Tensor], host: list[Tensor],
        target: torch.device | None, caller: str,
    ) -> None:  # fmt: skip
        step = self.step
        if step is None:
            return
        where = f"{caller} {getattr(func, '__name__', func)}"
        to_device = target is not None and _is_ours(target)
        if func in _WITH_VALUES or func in _NEW_WITH_VALUES:
            if to_device or (func in _NEW_WITH_VALUES and device):
                step.copies.append(where)
        elif func is _T.to and to_device:
            step.copies += [where] * (not device)
        elif func is _T.copy_ and device and host:
            (step.copies if is_labelled(args[0]) else step.reads).append(where)
        elif func is _T.to and device and target is not None:
            step.reads.append(where)  # back to the host, waiting or not
        elif func in _INDEXING and is_labelled(args[0]):
            step.copies += [where] * _host_indices(args)
            step.reads += [where] * reads(func, args, kwargs)
        elif device and host and func not in _EMPTY:
            step.mixes.append(where)
            raise MixedDevices(f"{where}: tensors of the host and of the device")
        elif device and reads(func, args, kwargs):
            step.reads.append(where)

    def _caller(self) -> str | None:
        """Return where our code calls, or None if somebody else does."""
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith((_TORCH, "<")) and file != __file__:
                if not self._ours(file):
                    return None
                name = "/".join(Path(file).parts[-3:])
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return None


class OnDevice(torch.Tensor):
    """A tensor of the device: it says so, and is a plain one otherwise."""

    device = property(lambda self: DEVICE)
    __torch_function__ = torch._C._disabled_torch_function_impl


class TimedOnDevice(Timed):
    """What a pass made, or what was computed from it."""

    device = property(lambda self: DEVICE)


class LogitsOnDevice(GreedyLogits):
    """What a pass of the target made."""

    device = property(lambda self: DEVICE)


_LABELLED = {torch.Tensor: OnDevice, Timed: TimedOnDevice, GreedyLogits: LogitsOnDevice}
_PLAIN = {labelled: plain for plain, labelled in _LABELLED.items()}


def is_labelled(tensor: Tensor) -> bool:
    """Say whether a tensor is the device's. What a pass made is, until it is copied."""
    is_copy = tensor.__dict__.get("paced_copy", False)
    return type(tensor) in _PLAIN or (isinstance(tensor, Timed) and not is_copy)


def label(*values: Any) -> None:
    """Make tensors the device's: also those in lists, and the attributes of objects."""
    for value in values:
        if isinstance(value, Tensor):
            _label(value, True)
        elif isinstance(value, (list, tuple)):
            label(*value)
        elif hasattr(value, "__dict__"):
            for name, part in vars(value).items():
                if isinstance(part, Tensor) and not name.endswith("_cpu"):
                    _label(part, True)


def _label(value: Any, is_device: bool) -> None:
    if isinstance(value, Tensor):
        known = _LABELLED if is_device else _PLAIN
        value.__class__ = known.get(type(value), type(value))
        value.__dict__["paced_copy"] = not is_device
    elif isinstance(value, (list, tuple)):
        for part in value:
            _label(part, is_device)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_ours(device: torch.device) -> bool:
    return device.type == "cpu" and device.index == 0


def _target(args: tuple, kwargs: dict) -> torch.device | None:
    """Return the device that a call names."""
    found = kwargs.get("device")
    if found is None:
        found = next((a for a in args[1:] if isinstance(a, torch.device)), None)
    if found is None and len(args) > 1 and isinstance(args[1], str) and args[1].startswith("cpu"):
        found = args[1]
    return torch.device(found) if isinstance(found, str) else found


def _unlabelled(kwargs: dict) -> dict:
    """Return the arguments with the machine's own device for the label."""
    if kwargs.get("device") is None:
        return kwargs
    return {**kwargs, "device": "cpu"}


def _host_indices(args: tuple) -> int:
    """Count what must be copied to index a tensor of the device, or to write to it."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    parts = [*index, *args[2:]]
    return sum(
        isinstance(part, (list, np.ndarray))
        or (isinstance(part, Tensor) and part.dim() > 0 and not is_labelled(part))
        for part in parts
    )


# -- in a server


def is_outrider(file: str) -> bool:
    """Say whether a file is Outrider's own code."""
    return f"{os.sep}outrider{os.sep}" in file and "site-packages" not in file


def register(file: Path) -> None:
    """Record every decode step of Outrider's worker into a file."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        runner = self.model_runner
        was, runner.device = runner.device, str(DEVICE)
        label(runner.req_to_token_pool)
        try:
            with Recorder(is_outrider):
                original(self, *args, **kwargs)
        finally:
            runner.device = was

    prepared = Step()  # what was done for the next step before its launch

    def prepare(original: Any, self: Any, batch: Any) -> None:
        label(batch, batch.req_to_token_pool)
        was, batch.device = batch.device, str(DEVICE)
        try:
            with Recorder(is_outrider, prepared):
                original(self, batch)
        finally:
            batch.device = was

    def step(original: Any, self: Any, batch: Any, given: Any) -> Any:
        noted = None
        if batch.forward_mode.is_decode():
            noted = Step(requests=len(batch.reqs))
            noted.copies, prepared.copies = prepared.copies, []
            noted.reads, prepared.reads = prepared.reads, []
        runner, pool = self.model_runner, batch.token_to_kv_pool_allocator
        label(given, batch, batch.sampling_info, batch.req_to_token_pool, pool)
        was, batch.device = batch.device, str(DEVICE)
        runner_was, runner.device = runner.device, str(DEVICE)
        try:
            with Recorder(is_outrider, noted):
                return original(self, batch, given)
        finally:
            batch.device, runner.device = was, runner_was
            if noted is not None:
                with file.open("a") as out:
                    out.write(json.dumps(asdict(noted)) + "\n")

    def kernel(original: Any, *args: Any) -> Any:
        """Call what stands for a kernel here: its reads and copies are the device's own affair."""
        with torch._C.DisableTorchFunction():
            result = original(*args)
        label(result)
        return result

    ours = "outrider.engines.sglang"
    hooks = {
        "outrider.kernels.ngram_match.reference.ngram_match": kernel,
        f"{ours}.workers.base.OutriderWorker._begin": init,
        f"{ours}.workers.base.OutriderWorker._launch": step,
        f"{ours}.carried.Carried.prepare_for_decode": prepare,
    }
    for name, hook in hooks.items():
        HookRegistry.register(name, hook, HookType.AROUND)
