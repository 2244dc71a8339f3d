"""The detector: it follows the operations of a thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paced.races.callers import Callers
from paced.races.cells import Cells, cells_of, indexed, steps
from paced.races.clocks import Clocks

PLANTS = ("no waits", "stray")
"""Faults to plant in our own code: its streams wait for nothing; what it does on the scheduler's
stream is on a stream that nobody waits for."""

_COPIES = {"aten::copy_", "aten::_to_copy"}
_no_modes = torch._C.DisableTorchFunction


@dataclass
class Report:
    """What was found.

    races: "site on stream races with site on stream", and how often
    unfenced: the same, with what SGLang does itself. On CUDA SGLang 0.5.23 has a fence against
        these: its scheduler waits until a pass has read its tables.
    ours: how many operations our own code launched, by stream
    cells: how many cells of the device's tensors it touched, by stream
    waits: how often it let streams wait for each other
    """

    races: dict[str, int] = field(default_factory=dict)
    unfenced: dict[str, int] = field(default_factory=dict)
    ours: dict[str, int] = field(default_factory=dict)
    cells: dict[str, int] = field(default_factory=dict)
    waits: int = 0


class Races(Clocks, Callers):
    """Finds races between the operations of one thread.

    ours: says of a file whether it is our own code
    plant: a fault of PLANTS
    """

    def __init__(self, ours: Callable[[str], bool], plant: str | None = None) -> None:
        assert plant is None or plant in PLANTS
        Clocks.__init__(self)
        Callers.__init__(self, ours)
        self.plant, self.is_active = plant, False
        self.runner: Any = None  # SGLang's, of the target
        self._plans: dict[Any, Any] = {}
        self._found: dict[Any, list[Any]] = {}
        self._counts: dict[int, list[int]] = {}
        self._stray, self._waits = torch.cpu.Stream(), 0
        self.name(self._stray, "stray")

    def acquire(self, stream: Any, clock: np.ndarray) -> None:
        """Let what a stream does from now on come after this."""
        if self.ours_asks():
            self._waits += 1
            if self.plant == "no waits":
                return
        super().acquire(stream, clock)

    # -- what is touched

    @staticmethod
    def state(tensor: Tensor) -> Cells:
        """Return what is known of a tensor's storage."""
        storage: Any = tensor.untyped_storage()
        found: Cells | None = storage.__dict__.get("races")
        if found is None:
            found = storage.races = Cells()
        return found

    def is_device(self, tensor: Any) -> bool:
        """Say whether a tensor is the device's."""
        with _no_modes():
            return (
                isinstance(tensor, Tensor) and has_storage(tensor) and self.state(tensor).is_device
            )

    def label(self, *values: Any) -> None:
        """Make tensors the device's: also those in lists, and the attributes of objects."""
        for value in values:
            if isinstance(value, Tensor):
                with _no_modes():
                    if has_storage(value):
                        self.state(value).is_device = True
            elif isinstance(value, (list, tuple)):
                self.label(*value)
            elif hasattr(value, "__dict__"):
                for name, part in list(vars(value).items()):
                    if isinstance(part, Tensor) and not name.endswith("_cpu"):
                        self.label(part)

    def touch(
        self, tensor: Tensor, is_write: bool, site: int, indices: Any = None, cells: Any = None
    ) -> None:
        """Note that the current stream reads a tensor, or writes to it, or to a part of it.

        indices: that it is indexed by
        cells: elements of its storage, if that is not how it is touched
        """
        if not tensor.numel():
            return
        stream: Any = torch.cpu.current_stream()
        ours = self._sites[site].is_ours
        if ours and self.plant == "stray" and stream.__dict__.get("is_main"):
            stream = self._stray
        clock, state = self.clock(stream), self.state(tensor)
        number = self.number(stream)
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if state.cells is None and (indices is not None or cells is not None or not whole):
            state.split(tensor)
        if state.cells is None:
            if ours and state.is_device:
                self._count(number, 1)
            self._touch_whole(state, is_write, number, clock, site)
            return
        if cells is not None:
            cells = steps(cells, state)
        elif indices is not None:
            cells = indexed(tensor, indices, state)
        else:
            cells = cells_of(tensor, state)
        if ours and state.is_device:
            self._count(
                number, cells.stop - cells.start if isinstance(cells, slice) else len(cells)
            )
        self._touch_cells(state, cells, is_write, number, clock, site)

    def _count(self, number: int, cells: int) -> None:
        counts = self._counts.setdefault(number, [0, 0])
        counts[0] += 1
        counts[1] += cells

    def _touch_whole(
        self, state: Cells, is_write: bool, number: int, clock: np.ndarray, site: int
    ) -> None:
        if state.write is not None:
            stream, at, before = state.write
            if at > clock[stream]:
                self._race(state, (stream, before, True), (number, site, is_write))
        if not is_write:
            state.readers[number] = int(clock[number]), site
            return
        for stream, (at, before) in state.readers.items():
            if at > clock[stream]:
                self._race(state, (stream, before, False), (number, site, True))
        state.write, state.readers = (number, int(clock[number]), site), {}

    def _touch_cells(
        self, state: Cells, cells: Any, is_write: bool, number: int, clock: np.ndarray, site: int
    ) -> None:
        streams, at, sites = state.write
        mine = streams[cells]
        bad = at[cells] > clock[mine]
        if bad.any():
            for stream, before in {
                *zip(mine[bad].tolist(), sites[cells][bad].tolist(), strict=True)
            }:
                self._race(state, (stream, before, True), (number, site, is_write))
        if not is_write:
            if number not in state.readers:
                state.readers[number] = np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
            when, who = state.readers[number]
            when[cells], who[cells] = clock[number], site
            return
        for stream, (when, who) in state.readers.items():
            bad = when[cells] > clock[stream]
            if bad.any():
                for before in {*who[cells][bad].tolist()}:
                    self._race(state, (stream, before, False), (number, site, True))
            when[cells] = 0
        streams[cells], at[cells], sites[cells] = number, clock[number], site

    def _race(self, state: Cells, before: Any, after: Any) -> None:
        if self._sites[before[1]].is_ours or self._sites[after[1]].is_ours:
            found = self._found.setdefault((before, after), [0, set()])
            found[0] += 1
            found[1].add(state)

    def report(self) -> Report:
        """Return what was found so far."""

        def told(touch: Any) -> str:
            stream, site, is_write = touch
            verb = "writes" if is_write else "reads"
            return f"{self._sites[site].where} {verb} on {self._names[stream]}"

        made = Report(waits=self._waits)
        for (before, after), (count, states) in self._found.items():
            if any(state.is_device for state in states):
                key = f"{told(after)}, races with: {told(before)}"
                sites = self._sites[before[1]], self._sites[after[1]]
                told_of = made.races
                if not all(site.is_ours or site.is_pass for site in sites):
                    told_of = made.unfenced
                told_of[key] = told_of.get(key, 0) + count
        for number, (touches, cells) in self._counts.items():
            made.ours[self._names[number]], made.cells[self._names[number]] = touches, cells
        return made

    # -- following a thread

    def plan(self, func: Any) -> tuple[list[tuple[int, str, bool]], bool, bool]:
        """Return which arguments an operation touches: place, name, whether it writes; and more.

        Second: whether its tensors are all on one device. Third: whether it indexes.
        """
        found = self._plans.get(func)
        if found is None:
            arguments, schema = [], func._schema
            for place, argument in enumerate(schema.arguments):
                if "Tensor" not in str(argument.type):
                    continue
                alias = argument.alias_info
                if alias is None or alias.is_write:
                    arguments.append((place, argument.name, alias is not None))
            indexes = schema.name in ("aten::index", "aten::index_put_", "aten::index_select")
            indexes = indexes or schema.name == "aten::_index_put_impl_"
            found = self._plans[func] = arguments, schema.name not in _COPIES, indexes
        return found

    def operation(self, func: Any, args: tuple, kwargs: dict, call: Callable[[], Any]) -> Any:
        """Run an operation, and note what it touches."""
        arguments, on_one, indexes = self.plan(func)
        frame = sys._getframe(2)
        site = self.site(frame)
        inputs: list[tuple[str, Tensor, bool]] = []
        for place, name, is_write in arguments:
            value = args[place] if place < len(args) else kwargs.get(name)
            for part in flat(value):
                if has_storage(part):
                    inputs.append((name, part, is_write))
        if site is not None and inputs:
            for name, part, is_write in inputs:
                if indexes and name == "self" and part.dim():
                    given = args[2] if func._schema.name == "aten::index_select" else args[1]
                    if isinstance(given, Tensor):
                        given = [given] if args[1] in (0, -part.dim()) else None
                    self.touch(part, is_write, site, given or None)
                else:
                    self.touch(part, is_write, site)
        result = call()
        labelled = any(self.state(x).is_device for _, x, _ in inputs if x.dim())
        for made in flat(result):
            if not has_storage(made):
                continue
            storage: Any = made.untyped_storage()
            if "races" not in storage.__dict__:
                self.state(made).is_device = labelled
                if site is not None:
                    self.touch(made, True, site)
        if labelled and on_one and site is not None and self._sites[site].is_ours:
            for name, part, _ in inputs:
                if part.dim() and name != "indices" and (name != "values" or part.numel() > 1):
                    self.state(part).is_device = True
        return result


def flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from flat(part)


def has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu"
