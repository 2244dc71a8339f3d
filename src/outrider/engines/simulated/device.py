"""The device: a queue of passes on a virtual clock, and a target whose answers are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.core import Bools, Ints, Outcomes, Proposal
from outrider.engines.costs import DeviceProfile
from outrider.engines.in_process import InProcessRequest
from outrider.engines.simulated.costs import CpuCosts


class VirtualClock:
    """The CPU's time: it passes only by `spend` and `wait_until`."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> float:
        """Return the seconds since the beginning."""
        return self._seconds

    def spend(self, seconds: float) -> None:
        """Let the CPU work for so long."""
        self._seconds += seconds

    def wait_until(self, moment: float) -> None:
        """Let the CPU wait until then, unless that is over."""
        self._seconds = max(self._seconds, moment)


@dataclass(eq=False)
class SimulatedRequest(InProcessRequest):
    """A request whose answer is known. answer: what the target emits, if nothing ends it"""

    answer: Sequence[int] = ()


class SimulatedDevice:
    """Runs the passes of a target and of draft models, one after the other.

    A pass starts when it was launched and the passes before it are done.

    profile: what passes cost
    vocab_size: token ids lie below. The last one is emitted where an answer has no token
    cpu: what the CPU's work costs
    clock: the CPU's
    log: of each pass: its kind, rows, and when it was launched, began and ended
    """

    def __init__(
        self, profile: DeviceProfile, vocab_size: int, cpu: CpuCosts | None = None
    ) -> None:
        self.profile, self.vocab_size = profile, vocab_size
        self.cpu = CpuCosts() if cpu is None else cpu
        self.clock = VirtualClock()
        self.log: list[tuple[str, int, float, float, float]] = []
        self._free_at = 0.0
        self._other = vocab_size - 1
        self._answers = np.full((0, 0), self._other)  # by row of the engine's tables

    def queue(self, kind: str, rows: int, seconds: float) -> float:
        """Launch a pass. Return when it is done."""
        launched = self.clock.now()
        begun = max(launched, self._free_at)
        self._free_at = begun + seconds
        self.log.append((kind, rows, launched, begun, self._free_at))
        return self._free_at

    def draft_pass(self, rows: int, context: int, num_requests: int) -> None:
        """Run a pass of a draft model, and read its drafts."""
        cost = self.profile.draft.decode(rows, context)
        self.clock.wait_until(self.queue("draft", rows, cost))
        cpu = self.cpu
        self.clock.spend(cpu.pass_fixed + cpu.pass_request * num_requests)

    # -- what the engine calls

    def prefill(self, reqs: Sequence[InProcessRequest]) -> tuple[Tensor, float]:
        """Read prompts. Return the first token of each answer, and when it can be read."""
        for req in reqs:
            assert isinstance(req, SimulatedRequest)
            self._write(req)
        self.clock.spend(self.cpu.launch)
        tokens = sum(req.length for req in reqs)
        ready = self.queue("prefill", tokens, self.profile.target.prefill(tokens))
        rows = np.array([req.row for req in reqs])
        return torch.from_numpy(self._answers[rows, 0]), ready

    def _write(self, req: SimulatedRequest) -> None:
        height, width = self._answers.shape
        if req.row >= height or len(req.answer) >= width:
            shape = max(height, req.row + 1), max(width, len(req.answer) + 1)
            larger = np.full(shape, self._other)
            larger[:height, :width] = self._answers
            self._answers = larger
        self._answers[req.row] = self._other
        self._answers[req.row, : len(req.answer)] = req.answer

    def decode(
        self, reqs: Sequence[InProcessRequest], proposal: Proposal, informed: bool
    ) -> tuple[Tensor, float]:
        """Run a decode pass. Return what is emitted after each row, and when it can be read."""
        cpu, owners = self.cpu, proposal.row_owners
        self.clock.spend(cpu.decide(len(reqs)) if informed else cpu.launch)
        lengths = np.array([req.on_device.length for req in reqs], np.int64)
        context, rows = int(lengths.sum()) - len(reqs), proposal.num_rows
        ready = self.queue("decode", rows, self.profile.target.decode(rows, context))
        emitted = np.array([len(req.on_device.output) for req in reqs], np.int64)
        table = np.array([req.row for req in reqs], np.int64)[owners]
        places = np.minimum(emitted[owners] + proposal.row_depths, self._answers.shape[1] - 1)
        tokens = self._answers[table, places]
        tokens[~_agree(proposal, tokens)] = self._other
        return torch.from_numpy(tokens), ready

    def commit(self, outcomes: Outcomes) -> None:
        """Do nothing: nothing is cached."""

    def release(self, reqs: Sequence[InProcessRequest]) -> None:
        """Do nothing: the next request of a row writes its own answer."""

    def wait(self, ready: float) -> None:
        """Let the CPU wait until the result of a pass can be read."""
        self.clock.wait_until(ready)

    def note_read(self, num_requests: int) -> None:
        """Let the CPU settle a step."""
        self.clock.spend(self.cpu.settle(num_requests))


def _agree(proposal: Proposal, following: Ints) -> Bools:
    """Return which rows have drafts that agree with their answers, and so have all above them.

    following: [N] what the answer has after each row, if it agrees
    """
    agree: Bools = np.ones(proposal.num_rows, np.bool_)
    if not len(proposal.parents):
        return agree
    rows, above, drafts = proposal.draft_rows, proposal.parent_rows, proposal.tokens.numpy()
    agree[rows] = following[above] == drafts
    depths = proposal.row_depths[rows]
    for depth in range(2, int(depths.max()) + 1):
        deep = depths == depth
        agree[rows[deep]] &= agree[above[deep]]
    return agree
