"""Torch's modes and its CPU streams, with a detector behind them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paced.races.detector import Races, flat, has_storage
from paced.tensor import reads

LABEL = torch.device("privateuseone:0")
"""What our own code is told to be the device."""

_T = torch.Tensor
_device_of, _no_modes = _T.device, torch._C.DisableTorchFunction
_UNDISPATCHED = {_T.tolist, _T.numpy, _T.cpu, _T.__array__, _T.__contains__, _T.__repr__}

_CURRENT: list[Races] = []
"""The detectors that are active, in this process."""


@contextmanager
def following(races: Races) -> Iterator[Races]:
    """Follow the operations of this thread."""
    patch_streams()
    _CURRENT.append(races)
    try:
        with _Functions(races), _Operations(races):
            races.is_active = True
            yield races
    finally:
        races.is_active = False
        _CURRENT.remove(races)


class _Operations(TorchDispatchMode):
    """Sees what each operation touches."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with _no_modes():
            return self._races.operation(func, args, kwargs, lambda: func(*args, **kwargs))


def is_label(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith(LABEL.type)
    return isinstance(device, torch.device) and device.type == LABEL.type


class _Functions(TorchFunctionMode):
    """Plays the device to our own code, and sees reads that are no operations."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, races = kwargs or {}, self._races
        if func.__class__.__name__ == "method-wrapper":  # a property
            if func.__self__ is _device_of and races.asks(sys._getframe(1)) == "ours":
                return LABEL if races.is_device(args[0]) else func(*args, **kwargs)
            return func(*args, **kwargs)
        if is_label(kwargs.get("device")):
            result = func(*args, **{**kwargs, "device": "cpu"})
            races.label(result)
            return result
        if func is _T.to and len(args) > 1:
            if is_label(args[1]):
                return self._to_device(args, kwargs)
            target = args[1]
        else:
            target = kwargs.get("device") if func is _T.to else None
        if target is not None and not isinstance(target, (torch.dtype, Tensor)):
            return self._to_cpu(func, args, kwargs)
        if not reads(func, args, kwargs):
            return func(*args, **kwargs)
        return self._read(func, args, kwargs)

    def _to_device(self, args: tuple, kwargs: dict) -> Any:
        """Copy to the device."""
        source = args[0]
        result = source.to("cpu", *args[2:], **{**kwargs, "non_blocking": True})
        if not self._races.is_device(source) and result.data_ptr() == source.data_ptr():
            result = result.clone()
        self._races.label(result)
        return result

    def _to_cpu(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Copy to the CPU, if it is the device's."""
        if not self._races.is_device(args[0]):
            return func(*args, **kwargs)
        waits = reads(func, args, kwargs)
        result = func(*args, **kwargs)
        if result.data_ptr() == args[0].data_ptr():
            result = result.clone()
        with _no_modes():
            self._races.state(result).is_device = False
        if waits:
            self._waits()
        return result

    def _read(self, func: Any, args: tuple, kwargs: dict) -> Any:
        races, labelled = self._races, False
        site = races.site(sys._getframe(2))
        with _no_modes():
            for part in flat((*args, *kwargs.values())):
                if not has_storage(part):
                    continue
                labelled = labelled or races.state(part).is_device
                if func in _UNDISPATCHED and site is not None:
                    races.touch(part, False, site)
        result = func(*args, **kwargs)
        if func is _T.cpu and labelled:
            if result.data_ptr() == args[0].data_ptr():
                result = result.clone()
            with _no_modes():
                races.state(result).is_device = False
        if labelled:
            self._waits()
        return result

    def _waits(self) -> None:
        """Let the CPU wait for the current stream, if it is our own code that does."""
        races = self._races
        if not races.in_kernel and races.asks(sys._getframe(2)) == "ours":
            races.cpu_waits(races.release(torch.cpu.current_stream()))


# -- torch's streams and events of the CPU


def _followed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that does nothing if nobody follows."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(_CURRENT[-1], self, *args, **kwargs) if _CURRENT else None

    return call


@_followed
def _wait_stream(races: Races, self: Any, stream: Any) -> None:
    races.acquire(self, races.release(stream))


@_followed
def _wait_event(races: Races, self: Any, event: Any) -> None:
    if (clock := getattr(event, "race_clock", None)) is not None:
        races.acquire(self, clock)


@_followed
def _synchronize_stream(races: Races, self: Any) -> None:
    races.cpu_waits(races.release(self))


def _record_event(self: Any, event: Any = None) -> Any:
    event = torch.cpu.Event() if event is None else event
    event.record(self)
    return event


def _event_waits(self: Any, stream: Any = None) -> None:
    _wait_event(torch.cpu.current_stream() if stream is None else stream, self)


def patch_streams() -> None:
    """Give streams and events clocks. Whatever else was laid on them is kept."""
    stream: Any = torch.cpu.Stream
    stream.wait_stream, stream.wait_event = _wait_stream, _wait_event
    stream.record_event, stream.synchronize = _record_event, _synchronize_stream
    # SGLang gives its stream on CPU a `synchronize` that does nothing
    stream.__setattr__ = lambda self, name, value: (
        None if name == "synchronize" else object.__setattr__(self, name, value)
    )
    patch_events()


def patch_events() -> None:
    """Give events clocks: again, if somebody has laid something on them since."""
    event: Any = torch.cpu.Event
    if getattr(event.record, "is_followed", False):
        return
    record, synchronize, query = event.record, event.synchronize, event.query

    def recorded(self: Any, stream: Any = None) -> None:
        record(self, stream)
        if _CURRENT:
            where = torch.cpu.current_stream() if stream is None else stream
            self.race_clock = _CURRENT[-1].release(where)

    def waits(self: Any) -> None:
        if _CURRENT and (clock := getattr(self, "race_clock", None)) is not None:
            _CURRENT[-1].cpu_waits(clock)

    def synchronized(self: Any) -> None:
        synchronize(self)
        waits(self)

    def queried(self: Any) -> bool:
        done = bool(query(self))
        if done:
            waits(self)
        return done

    recorded.is_followed = True  # type: ignore[attr-defined]
    event.record, event.synchronize, event.query = recorded, synchronized, queried
    event.wait = _event_waits
    everything = torch.cpu.synchronize

    def synchronize_all(*args: Any) -> None:
        everything(*args)
        if _CURRENT:
            _CURRENT[-1].all_wait()

    torch.cpu.synchronize = synchronize_all
