"""What differs between the versions of SGLang that Outrider knows: one method for each difference.

All other modules here know no version. `host_0_5_11` and `host_0_5_23` say how it is in theirs, lay
the hooks that only they need, and make the worker that their scheduler calls. Beside each of them
stands its contract, which lists every name that Outrider relies on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

from torch import Tensor

from outrider.hosts.sglang.contract import known_contract


class Host(ABC):
    """The SGLang that runs here.

    contract: what we rely on in it
    accepted: the field of a request that counts its accepted drafts
    caches: classes of prefix caches: texts enter by their `insert`
    prefix_lens, extend_lens: the fields of a prefill batch: what of each request is cached, and how
        many tokens of it are read
    """

    contract: ModuleType
    accepted: str
    caches: tuple[str, ...]
    prefix_lens: str
    extend_lens: str

    @abstractmethod
    def register(self, name: str) -> None:
        """Make an algorithm of this name known, if that takes more than hooks."""

    @abstractmethod
    def hooks(self) -> dict[str, tuple[Callable[..., Any], str]]:
        """Return what this version is hooked by: where, what is called, and how."""

    def front_hooks(self) -> dict[str, tuple[Callable[..., Any], str]]:
        """Return what the HTTP server is hooked by, in the processes that have one."""
        from outrider.hosts.sglang.front import FRONT

        return FRONT

    # -- arguments

    @abstractmethod
    def arguments(self, server_args: Any) -> Any:
        """Return the server's arguments as SGLang completed them."""

    @abstractmethod
    def current_arguments(self) -> Any:
        """Return the same of this process; None before they are known."""

    # -- requests

    def check_sent(self, made: Any) -> None:  # noqa: B027 - nothing to do in most versions
        """Raise if the scheduler could not read a request that is sent to it."""

    @abstractmethod
    def cache_of(self, req: Any) -> Any:
        """Return what has a request's `req_pool_idx`, `kv_committed_len` and `kv_allocated_len`."""

    @abstractmethod
    def check_end(self, req: Any) -> None:
        """Let a request see whether its last token ends it."""

    @abstractmethod
    def count_step(self, req: Any, accepted: int) -> None:
        """Count a step of a request."""

    @abstractmethod
    def count_accepted(self, result: Any, accepted: list[int]) -> None:
        """Note in a step's result how many drafts of each request were accepted."""

    @abstractmethod
    def pick(self, info: Any, rows: list[int], index: Tensor) -> None:
        """Leave these entries of a batch's sampling parameters; one may be picked repeatedly.

        rows: may be left empty if nothing in `info` asks about single requests
        index: the same on the device
        """

    # -- memory and passes

    @abstractmethod
    def slots_per_step(self) -> int:
        """Return how many slots a request may need in a step."""

    @abstractmethod
    def take_slots(self, tree_cache: Any, count: int) -> Tensor:
        """Return so many slots, taken from the prefix cache if need be."""

    @abstractmethod
    def attention_tp_size(self) -> int:
        """Return over how many ranks attention heads are spread."""

    @abstractmethod
    def draft_worker(self, target_worker: Any, server_args: Any, **options: Any) -> Any:
        """Return a worker of SGLang's that has the draft model's weights."""

    @abstractmethod
    def draft_batch(self, batch: Any, runner: Any) -> Any:
        """Return what a draft model's runner takes for this batch."""

    @abstractmethod
    def return_states(self, runner: Any) -> None:
        """Let graphs of this process that are yet to be made return hidden states."""

    @abstractmethod
    def run_target(self, worker: Any, batch: Any, *, is_verify: bool, states: bool) -> Any:
        """Run the target over a batch as its workers take it.

        is_verify: whether the worker leaves the sampling to us
        states: whether the hidden states of all rows are wanted
        """

    @abstractmethod
    def graph_sizes(self, runner: Any) -> tuple[int, ...]:
        """Return the numbers of rows for which the host has captured graphs, if it has."""


@lru_cache(maxsize=1)
def host() -> Host:
    """Return the host for the SGLang that is installed, which must be one we know."""
    contract = known_contract()
    if contract is None:
        raise RuntimeError("this SGLang has no contract file")
    if contract.VERSION == "0.5.11":
        from outrider.hosts.sglang.host_0_5_11 import Sglang0511

        return Sglang0511()
    from outrider.hosts.sglang.host_0_5_23 import Sglang0523

    return Sglang0523()


def changed(batch: Any, **fields: Any) -> Any:
    """Return a copy of the host's batch in which these fields are others.

    `dataclasses.replace` does the same 15 times slower: it calls `__init__` with 100 arguments.
    """
    made = object.__new__(type(batch))
    made.__dict__.update(batch.__dict__, **fields)
    return made
