"""The device: a queue of passes, its memory, and the log of what it did."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.engines.costs import DeviceProfile, PassCost
from paced.clock import SPIN, excused, now, real, wait_until
from paced.heads import STATE, PacedHead
from paced.prices import Prices
from paced.tensor import GreedyLogits, Timed
from paced.texts import HEADER, VOCABULARY, Answers
from paced.work import Work

QUIET_SECONDS = 0.25
"""The log is written when nothing was queued for so long: not while passes are being timed."""


def parts_file(log: Path) -> Path:
    """Return the file beside a log that has the work between passes by part."""
    return log.with_suffix(".parts.json")


@dataclass
class Pass:
    """One pass in the log. All times are of the server's own clock: see `log.virtual`.

    kind: decode, prefill, draft_decode, draft_prefill or head_decode
    queued: when the host launched it
    start, done: when the device begins and ends it
    read: when the host first asked for its result, and would have waited
    rows: of the batch
    context: cached tokens that are read
    requests: how many
    position: the sum over requests of the last known token's position: what grows is output
    excused: seconds by which this clock was behind real time when the pass was queued
    launches, launching: kernels launched by then since the server began, and the CPU seconds that
        were charged for it; 0 if the device's work is not priced
    """

    kind: str
    queued: float
    start: float
    done: float
    rows: int
    context: int
    requests: int
    position: int
    read: float = 0.0
    excused: float = 0.0
    launches: int = 0
    launching: float = 0.0


class Device:
    """Runs the passes of a target and of a draft model, one after the other.

    reads_each_row: whether a decode pass reads a request's cache once for each of its rows, as all
        attention backends do but Outrider's own
    prices: of the work between passes, which otherwise is the CPU's
    """

    def __init__(
        self,
        profile: DeviceProfile,
        log: Path | None = None,
        spin: float = SPIN,
        reads_each_row: bool = False,
        prices: Prices | None = None,
    ) -> None:
        self.profile, self.reads_each_row = profile, reads_each_row
        self._spin = spin
        self._free_at = 0.0
        self._answers = Answers()
        self._told: tuple[int, int] | None = None  # layers, and the size of a state
        self._memory = np.zeros(0, dtype=np.int64)
        # ready times are unique: passes of one queue never end together
        self._unread: dict[float, Pass] = {}
        self._passes: list[Pass] = []
        self.work = None if prices is None else Work(prices, self._run_kernels)
        if log is not None:
            threading.Thread(target=self._write_when_quiet, args=(log,), daemon=True).start()

    # -- the queue

    @property
    def free_at(self) -> float:
        """When the last pass that was queued is done."""
        return self._free_at

    def wait(self, ready: float) -> None:
        """Return when a moment has come, as a read of what is ready then does."""
        found = self._unread.pop(ready, None)
        if found is not None and not found.read:
            found.read = now()
        wait_until(ready, self._spin)

    def enqueue(
        self,
        kind: str,
        rows: int,
        context: int,
        requests: int,
        position: int,
        queued: float | None = None,
    ) -> float:
        """Queue a pass. Return when it is done.

        queued: when it was launched; by default now
        """
        queued = now() if queued is None else queued
        whose, _, _ = kind.rpartition("_")
        model: PassCost = getattr(self.profile, whose or "target")
        decode = kind.endswith("decode")
        cost = model.decode(rows, context) if decode else model.prefill(rows)
        start = max(queued, self._free_at)
        self._free_at = start + cost
        made = Pass(kind, queued, start, self._free_at, rows, context, requests, position)
        self._unread[self._free_at] = made
        self._passes.append(made)
        return self._free_at

    def _run_kernels(self, launched: float, seconds: float, after: float) -> float:
        """Queue kernels between passes. Return when their results are ready.

        They do not wait for a pass that they need nothing of: on a GPU they may run beside it.
        Passes that are queued later begin later by their time.
        """
        self._free_at = max(self._free_at, launched) + seconds
        ready = max(after, launched) + seconds
        if (source := self._unread.get(after)) is not None:
            self._unread[ready] = source  # who reads this reads what the pass made
        return ready

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as one of the device, if operations on it are priced."""
        if self.work is None or isinstance(tensor, Timed):
            return tensor
        return Timed.of(tensor, 0.0, self.wait)

    def hold(self, tensor: Any) -> None:
        """Make a tensor that others refer to one of the device, if operations on it are priced."""
        if self.work is not None and type(tensor) is torch.Tensor:
            held: Any = tensor
            held.__class__, held.ready, held.wait = Timed, 0.0, self.wait

    def _launched(self) -> float:
        """Return when a pass is launched if that begins now."""
        return now() + (0.0 if self.work is None else self.work.prices.launch_of_pass)

    def note_launch(self, since: float) -> None:
        """Book the launch of the last pass, whose values have just been made up.

        since: real time when that began
        """
        if self.work is None:
            return
        made = self._passes[-1]
        self.work.pass_launched(made.kind, since)
        made.excused = excused()
        made.launches, made.launching = self.work.launches, self.work.launching

    # -- what a model runner asks for

    def head(self, folder: Path, num_layers: int) -> PacedHead:
        """Return a head whose passes this device runs. From now on the target tells states."""
        if self.profile.head is None:
            raise ValueError(f"{self.profile.name} has no costs of a head")

        def enqueue(rows: int) -> float:
            return self.enqueue("head_decode", rows, 0, rows, 0, self._launched())

        made = PacedHead(folder, num_layers, enqueue, self.wait, self.note_launch)
        self._told = len(made.hidden_layers), made.config.hidden_size
        return made

    def forward(self, batch: Any, req_to_token: torch.Tensor, slots: int, is_draft: bool) -> Any:
        """Queue the pass of a batch of SGLang's. Return its logits and, if asked for, its states.

        slots: how many the cache has
        """
        if batch.return_logprob:
            raise NotImplementedError("logprobs on the paced device: ask for none")
        since = real()
        with torch._C.DisableTorchFunctionSubclass():
            made = self._forward(batch, req_to_token, slots, is_draft)
        self.note_launch(since)
        return made

    def _forward(self, batch: Any, req_to_token: torch.Tensor, slots: int, is_draft: bool) -> Any:
        mode = batch.forward_mode
        if mode.is_decode():
            return self._decode(batch, req_to_token, is_draft)
        if mode.is_target_verify():
            return self._verify(batch, req_to_token)
        if mode.is_extend():
            self._resize(slots)
            return self._prefill(batch, req_to_token, is_draft)
        raise NotImplementedError(f"{mode} on the paced device")

    def _decode(self, batch: Any, req_to_token: torch.Tensor, is_draft: bool) -> Any:
        launched = self._launched()  # what follows is the device's work, or launching it
        lines, positions = batch.req_pool_indices.numpy(), batch.positions.numpy()
        if len(lines) > 1:  # rows of a request stand together, its last token first
            roots = np.empty(len(lines), dtype=bool)
            roots[0] = True
            np.not_equal(lines[1:], lines[:-1], out=roots[1:])
            requests, position = int(np.count_nonzero(roots)), int(positions[roots].sum())
        else:
            requests, position = 1, int(positions[0])
        kind = "draft_decode" if is_draft else "decode"
        context = int(positions.sum()) if self.reads_each_row else position
        ready = self.enqueue(kind, len(lines), context, requests, position, launched)
        return self._said(lines, positions, req_to_token, ready, is_draft)

    def _verify(self, batch: Any, req_to_token: torch.Tensor) -> Any:
        """Queue a pass that reads each request's cache once, whatever the backend."""
        launched, width = self._launched(), batch.spec_info.draft_token_num
        lens, positions = batch.seq_lens.numpy(), batch.positions.numpy()
        context = int(lens.sum())
        ready = self.enqueue("decode", len(positions), context, len(lens), context, launched)
        lines = np.repeat(batch.req_pool_indices.numpy(), width)
        return self._said(lines, positions, req_to_token, ready, is_draft=False)

    def _prefill(self, batch: Any, req_to_token: torch.Tensor, is_draft: bool) -> Any:
        ids = batch.input_ids.numpy()
        kind = "draft_prefill" if is_draft else "prefill"
        requests, launched = len(batch.extend_seq_lens_cpu), self._launched()
        ready = self.enqueue(kind, len(ids), 0, requests, 0, launched)
        self._memory[batch.out_cache_loc.numpy()] = ids
        ends = np.cumsum(batch.extend_seq_lens_cpu) - 1
        lines, positions = batch.req_pool_indices.numpy(), batch.positions.numpy()
        logits, _ = self._said(lines, positions[ends], req_to_token, ready, is_draft)
        if is_draft or self._told is None:
            return logits, None
        owners = np.repeat(lines, batch.extend_seq_lens_cpu)
        return logits, self._states(self._headers(owners, req_to_token), positions, ready)

    def _headers(self, lines: np.ndarray, req_to_token: torch.Tensor) -> np.ndarray:
        found: np.ndarray = self._memory[req_to_token.numpy()[lines, :HEADER]]
        return found

    def _said(
        self,
        lines: np.ndarray,
        positions: np.ndarray,
        req_to_token: torch.Tensor,
        ready: float,
        is_draft: bool,
    ) -> tuple[Any, Any]:
        """Return the logits after each row, and its states if there is a head."""
        headers = self._headers(lines, req_to_token)
        if is_draft:
            return self._draft_logits(headers, positions, ready), None
        tokens = torch.from_numpy(self._answers.target(headers, positions))
        logits = GreedyLogits.over(tokens, VOCABULARY, ready, self.wait)
        states = None if self._told is None else self._states(headers, positions, ready)
        return logits, states

    def _states(self, headers: np.ndarray, positions: np.ndarray, ready: float) -> Timed:
        """Return the states of all layers that are told, [N, layers * H]: see `heads`."""
        assert self._told is not None
        layers, size = self._told
        states = torch.zeros(len(positions), layers, size)
        states[..., :STATE] = torch.from_numpy(self._answers.states(headers, positions))[:, None]
        return Timed.of(states.flatten(1), ready, self.wait)

    def _draft_logits(self, headers: np.ndarray, positions: np.ndarray, ready: float) -> Timed:
        best, confidences = self._answers.draft(headers, positions)
        logits = np.zeros((len(best), VOCABULARY), dtype=np.float32)
        chances = confidences.clip(2 / VOCABULARY, 1 - 1e-6)
        # one token stands out, all others are alike: softmax gives it this chance
        logits[np.arange(len(best)), best] = np.log(chances * (VOCABULARY - 1) / (1 - chances))
        return Timed.of(torch.from_numpy(logits), ready, self.wait)

    def _resize(self, slots: int) -> None:
        if slots > len(self._memory):
            self._memory = np.concatenate(
                [self._memory, np.zeros(slots - len(self._memory), dtype=np.int64)]
            )

    # -- the log

    def _write_when_quiet(self, file: Path) -> None:
        written = 0
        while True:
            time.sleep(QUIET_SECONDS)
            count = len(self._passes)
            if count and self._passes[-1].done < now() - QUIET_SECONDS and count > written:
                with file.open("a") as out:
                    for made in self._passes[written:count]:
                        out.write(json.dumps(vars(made)) + "\n")
                if self.work is not None:
                    self.work.write(parts_file(file))
                written = count
                self._unread.clear()
