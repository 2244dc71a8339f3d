"""The device's work between passes: taken out of the clock here, priced as on a GPU.

Sampling, lookups, gathers and writes to tables are launched by the CPU and done by a GPU. Here they
are PyTorch's CPU operations on the scheduler's core. Each of them is *booked*: its real time is
excused from the clock (`clock.excuse`), its launch is charged to the CPU, and its kernel is queued
on the device, by the same prices for bare SGLang and for Outrider.

An operation is the device's if one of its tensors is: `tensor.Timed` sees it. Operations on the
CPU's own tensors, and reads, which wait and then copy to the CPU, are not booked.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paced import clock
from paced.prices import LOGITS, Prices

Queue = Callable[[float, float, float], float]
"""Queues kernels: when they were launched, their seconds, and when their inputs are ready. Returns
when their results are."""

_T = torch.Tensor
_INDEXING = {_T.__getitem__, _T.__setitem__}
_WRITES = {_T.__setitem__, _T.__iadd__, _T.__isub__, _T.__imul__, _T.__iand__, _T.__ior__}
_OTHERS = (os.path.dirname(__file__), os.path.dirname(torch.__file__), "<")
_ALLOCATES = ("empty", "new_empty", "resize_")


@dataclass(slots=True)
class Part:
    """The work of one place in the code, since the server began. Times in seconds.

    calls: operations, views among them
    real: what they took here, and was excused
    launches: kernels that a GPU would have launched
    launching: what was charged to the CPU instead
    device: what was queued on the device
    """

    calls: int = 0
    real: float = 0.0
    launches: int = 0
    launching: float = 0.0
    device: float = 0.0


@dataclass
class Work:
    """The books of a process's device.

    queue: of the device
    parts: by the name of the function or of the file that asked for the work
    launches, launching: of all parts
    """

    prices: Prices
    queue: Queue
    parts: dict[str, Part] = field(default_factory=dict)
    launches: int = 0
    launching: float = 0.0
    # launches of functions that stand for kernels
    _counted: dict[str, int] = field(default_factory=dict)
    _owners: dict[CodeType, str | None] = field(default_factory=dict)
    # what an operation, or a question, takes before and after it looks at the clock
    _unseen: float = 0.0
    _unseen_asked: float = 0.0
    # whether a function is running that is booked as a whole
    _is_inside: bool = False

    def book(
        self,
        part: str,
        since: float,
        launches: int,
        num_bytes: int = 0,
        after: float = 0.0,
        launching: float | None = None,
        is_queued: bool = True,
    ) -> float:
        """Book work that has just been done. Return when its result is ready.

        since: real time when it began
        num_bytes: that its kernels read and write
        after: when its inputs are ready
        launching: CPU seconds, if not those of the launches
        is_queued: whether the device's time is queued; that of a pass already is
        """
        if self._is_inside:
            return after
        prices = self.prices
        if launching is None:
            launching = launches * prices.launch if launches else prices.view
        device, ready = 0.0, after
        if launches and is_queued:
            device = prices.on_device(launches, num_bytes)
            ready = self.queue(since - clock.excused() + launching, device, after)
        own = self.parts.get(part)
        if own is None:
            own = self.parts[part] = Part()
        own.calls += 1
        own.launches += launches
        own.launching += launching
        own.device += device
        self.launches += launches
        self.launching += launching
        taken = clock.real() - since + self._unseen
        own.real += taken
        clock.excuse(taken - launching)
        return ready

    def operation(
        self, func: Any, args: tuple, kwargs: dict, result: Any, since: float, after: float
    ) -> float:
        """Book one torch operation. Return when its result is ready."""
        launches = 0 if _is_view(func, args, result) else 1
        num_bytes = _bytes_moved(func, args, kwargs, result) if launches else 0
        return self.book(self._caller(), since, launches, num_bytes, after)

    def argmax(self, rows: int, since: float, after: float) -> float:
        """Book the search for the best token of each row of a target's logits."""
        return self.book(self._caller(), since, 1, rows * LOGITS, after)

    def asked(self, since: float) -> None:
        """Book a question that needs no kernel: a shape, a length."""
        if not self._is_inside:
            clock.excuse(clock.real() - since + self._unseen_asked - self.prices.ask)

    def pass_launched(self, part: str, since: float) -> None:
        """Book the launch of a pass, whose values were made up here."""
        prices = self.prices
        launches, launching = prices.graph_inputs + 1, prices.launch_of_pass
        self.book(part, since, launches, launching=launching, is_queued=False)

    def function(
        self, kernel: Callable[..., Any], args: tuple, kwargs: dict, after: float
    ) -> tuple[Any, float]:
        """Call a function that is the device's work, whatever stands for it here.

        Its launches are counted at its first call. Returns its result, and when that is ready.
        """
        if self._is_inside:
            return kernel(*args, **kwargs), after
        since, name = clock.real(), kernel.__name__
        self._is_inside = True
        try:
            if name in self._counted:
                result = kernel(*args, **kwargs)
            else:
                with Launches() as counting:
                    result = kernel(*args, **kwargs)
                self._counted[name] = max(1, counting.number)
        finally:
            self._is_inside = False
        num_bytes = sum(map(_num_bytes, _tensors((*args, *kwargs.values(), result))))
        return result, self.book(name, since, self._counted[name], num_bytes, after)

    def calibrate(self, tensor: Tensor) -> None:
        """Measure what the clock does not see of operations on a tensor, and excuse that too."""
        queue, self.queue = self.queue, lambda launched, seconds, after: after
        unseen = _charged(lambda: tensor + 1) - self.prices.launch
        asked = _charged(lambda: len(tensor)) - self.prices.ask
        self.queue, self._unseen, self._unseen_asked = queue, unseen, asked
        self.parts.clear()
        self.launches, self.launching = 0, 0.0

    def write(self, file: Path) -> None:
        """Write the parts, since the server began."""
        made = {name: asdict(part) for name, part in list(self.parts.items())}
        file.write_text(json.dumps(made))

    def _caller(self) -> str:
        """Return the name of the file that asked for an operation of torch's."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            if code not in self._owners:
                is_other = code.co_filename.startswith(_OTHERS)
                self._owners[code] = None if is_other else Path(code.co_filename).stem
            if (owner := self._owners[code]) is not None:
                return owner
            frame = frame.f_back
        return "unknown"


class Launches(TorchDispatchMode):
    """Counts the kernels that operations would launch on a GPU."""

    counting: Launches | None = None

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __enter__(self) -> Launches:
        Launches.counting = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Launches.counting = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        returns = func._schema.returns
        aliases = [r.alias_info for r in returns if r.alias_info is not None]
        is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
        is_view = is_view or func._schema.name.partition("::")[2].startswith(_ALLOCATES)
        self.number += not is_view
        return func(*args, **(kwargs or {}))


def one_launch(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what is a single kernel on a GPU: it is counted as one."""
    counting = Launches.counting
    before = 0 if counting is None else counting.number
    result = kernel(*args, **kwargs)
    if counting is not None:
        counting.number = before + 1
    return result


_current: Work | None = None


def current() -> Work | None:
    """Return the books of this process's device, if its work is priced."""
    return _current


def use(work: Work | None) -> None:
    """Book all further work of this process here."""
    global _current
    _current = work


def _charged(probe: Callable[[], Any], blocks: int = 40, calls: int = 50) -> float:
    """Return the seconds that a call takes by this process's clock, when nothing disturbs it."""
    found = []
    for _ in range(blocks):
        began = clock.now()
        for _ in range(calls):
            probe()
        found.append((clock.now() - began) / calls)
    return min(found)


# -- what an operation moves


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_view(func: Any, args: tuple, result: Any) -> bool:
    """Say whether an operation computes nothing."""
    if func in _WRITES or _writes(getattr(func, "__name__", "")):
        return False
    made = result[0] if isinstance(result, (list, tuple)) and result else result
    if not isinstance(made, Tensor):
        return True
    return bool(args) and isinstance(args[0], Tensor) and torch._C._is_alias_of(made, args[0])


def _writes(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _bytes_moved(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """Return the bytes that a kernel reads and writes: of a table, those of the chosen items."""
    if func in _INDEXING:
        items = args[2:] if func is _T.__setitem__ else (result,)
        return 2 * sum(map(_num_bytes, _tensors(items)))
    return sum(map(_num_bytes, _tensors((*args, *kwargs.values(), result))))
