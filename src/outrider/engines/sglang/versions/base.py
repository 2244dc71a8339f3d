"""What differs between the versions of SGLang that Outrider knows: one method for each difference.

Modules that need one of these are given the version; they know no version themselves. Beside each
version stands its contract, which lists the names of SGLang that Outrider relies on.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

from torch import Tensor


class SglangVersion(Protocol):
    """The SGLang that runs here.

    contract: what we rely on in it
    accepted: the field of a request that counts its accepted drafts
    caches: classes of prefix caches; texts enter by their `insert`
    prefix_lens, extend_lens: the fields of a prefill batch for `prefill_lens`
    graph_runner: the attribute of a model runner that has its captured graphs
    """

    contract: ModuleType
    accepted: str
    caches: tuple[str, ...]
    prefix_lens: str
    extend_lens: str
    graph_runner: str

    # -- arguments

    def arguments(self, server_args: Any) -> Any:
        """Return the server's arguments as SGLang completed them."""

    def current_arguments(self) -> Any:
        """Return the same of this process; None before they are known."""

    # -- requests

    def check_sent(self, made: Any) -> None:
        """Raise if the scheduler could not read a request that is sent to it."""

    def kv(self, req: Any) -> Any:
        """Return what has a request's `req_pool_idx`, `kv_committed_len` and `kv_allocated_len`."""

    def check_finished(self, req: Any) -> None:
        """Let a request see whether its last token ends it."""

    def count_step(self, req: Any, accepted: int) -> None:
        """Count a step of a request."""

    def report_accepted(self, result: Any, accepted: list[int]) -> None:
        """Note in a step's result how many drafts of each request were accepted."""

    def pick_sampling(self, info: Any, rows: list[int], index: Tensor) -> None:
        """Leave these entries of a batch's sampling parameters; one may be picked repeatedly.

        rows: may be left empty if nothing in `info` asks about single requests
        index: the same on the device
        """

    # -- memory and passes

    def prefill_lens(self, batch: Any) -> tuple[Any, Any]:
        """Return of each request of a prefill batch how much is cached, and how much is read."""
        return getattr(batch, self.prefix_lens), getattr(batch, self.extend_lens)

    def slots_per_step(self) -> int:
        """Return how many slots a request may need in a step."""

    def alloc_slots(self, tree_cache: Any, count: int) -> Tensor:
        """Return so many slots, taken from the prefix cache if need be."""

    def attention_tp_size(self) -> int:
        """Return over how many ranks attention heads are spread."""

    def draft_worker(self, target_worker: Any, server_args: Any, **options: Any) -> Any:
        """Return a worker of SGLang's that has the draft model's weights."""

    def draft_batch(self, batch: Any, runner: Any) -> Any:
        """Return what a draft model's runner takes for this batch."""

    def return_states(self, runner: Any) -> None:
        """Let graphs of this process that are yet to be made return hidden states."""

    def run_target(self, worker: Any, batch: Any, *, is_verify: bool, states: bool) -> Any:
        """Run the target over a batch as its workers take it.

        is_verify: whether the worker leaves the sampling to us
        states: whether the hidden states of all rows are wanted
        """

    def graph_sizes(self, runner: Any) -> tuple[int, ...]:
        """Return the numbers of rows for which SGLang has captured graphs, if it has."""
        return tuple(getattr(getattr(runner, self.graph_runner, None), "capture_bs", ()))
