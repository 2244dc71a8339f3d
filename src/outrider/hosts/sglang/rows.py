"""A verify pass is a decode batch: one row for each request's last token and each draft.

A row of depth d sees its request's cache up to its own position, as if the drafts before it had
been emitted. So any attention backend of SGLang can verify, with the kernels of plain decoding, and
what it computes for a row is what it computes for one token. Only our own backend is told of trees,
where several rows stand at one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core import Ints, Proposal
from outrider.hosts.sglang.host import changed, host
from outrider.hosts.sglang.requests import ActiveRequests
from outrider.hosts.sglang.sampling import row_sampling, take


def write_slots(batch: Any, have: Ints, ahead: Ints) -> None:
    """Give each request slots for the positions from `have` up to `ahead`, in the host's table.

    A page holds positions of one request, in their order. The page that a request ends in is its
    own already, as far as it is not full: only what comes after it is allocated.

    have, ahead: [B]
    """
    new, size = ahead - have, batch.token_to_kv_pool_allocator.page_size
    owners = np.repeat(np.arange(len(new)), new)
    positions = np.arange(len(owners)) - (new.cumsum() - new)[owners] + have[owners]
    begun, pages = -(-have // size), -(-ahead // size) - -(-have // size)
    slots = host().take_slots(batch.tree_cache, int(pages.sum()) * size)
    told = np.stack([owners, positions, positions])
    if size > 1:  # which page, among those that requests end in and the new ones behind them
        fresh = positions // size - begun[owners]
        told[2] = np.where(fresh < 0, owners, len(new) + (pages.cumsum() - pages)[owners] + fresh)
    owner, position, page = to_device(told, batch.device)
    pool_index, table = batch.req_pool_indices[owner], batch.req_to_token_pool
    if size > 1:
        last = to_device(have - 1, batch.device)
        ends = table.req_to_token[batch.req_pool_indices, last] // size
        slots = torch.cat([ends, slots[::size] // size])[page] * size + position % size
    table.write((pool_index, position), slots.to(torch.int32))


def read_slots(batch: Any, owner: Tensor, position: Tensor) -> Tensor:
    """Return the slots that the host's table has for these positions."""
    return slots_at(batch, batch.req_pool_indices[owner], position)


def slots_at(batch: Any, pool_index: Tensor, position: Tensor) -> Tensor:
    """Return the same for requests given by their req_pool_index."""
    slots: Tensor = batch.req_to_token_pool.req_to_token[pool_index, position]
    return slots.to(torch.int64)


def to_device(array: NDArray[Any], device: Any) -> Tensor:
    """Copy an array to the device, without waiting for it."""
    on_host = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        on_host = on_host.pin_memory()  # the host may go on while it is copied
    return on_host.to(device, non_blocking=True)


@dataclass(frozen=True)
class TreeRows:
    """What our attention backend is told where drafts branch, as the host's `spec_info`.

    parents: [N] the row whose token each row's follows, -1 for a request's last token
    positions: left to the host, who looks for it
    """

    parents: tuple[int, ...]
    positions: None = None

    @staticmethod
    def of(proposal: Proposal) -> TreeRows | None:
        """Return the tree of a proposal's rows; None if nothing branches."""
        if proposal.is_chain:
            return None
        parents = np.full(proposal.num_rows, -1)
        parents[proposal.draft_rows] = proposal.parent_rows
        return TreeRows(tuple(parents.tolist()))


def decode_rows(
    plain: Any,
    tokens: Sequence[int],
    req_pool_indices: Tensor,
    positions: Sequence[int],
    slots: Tensor,
) -> Any:
    """Return the host's decode batch over these rows.

    req_pool_indices: [N] of the rows' requests
    slots: [N] where their keys and values go
    """
    seq_lens_cpu = torch.tensor(positions) + 1
    seq_lens = seq_lens_cpu.to(req_pool_indices.device, non_blocking=True)
    return changed(
        plain,
        input_ids=torch.tensor(tokens, device=req_pool_indices.device),
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens_cpu,
        seq_lens_sum=int(seq_lens_cpu.sum()),
        orig_seq_lens=seq_lens.to(torch.int32),
        out_cache_loc=slots,
        spec_info=None,
    )


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of a step: the host's decode batch over them.

    forward: the batch
    groups: rows of one kind, which are sampled together: see `sample`
    """

    forward: Any
    groups: Sequence[tuple[str, Tensor | None]]

    @staticmethod
    def of(
        batch: Any,
        plain: Any,
        active: ActiveRequests,
        proposal: Proposal,
    ) -> StepRows:
        """Lay the rows of a proposal out: all that the device is told goes in one copy.

        batch, plain: the host's decode batch, and the same as its workers take it
        active: the requests of the proposal
        """
        owners, starts, lens = proposal.row_owners, proposal.root_rows, active.lens
        places = np.arange(len(owners)) - starts[owners]
        told = np.empty((5, len(owners)), np.int64)
        told[0, starts] = [request.last_token for request in active.requests]
        told[0, proposal.draft_rows] = proposal.tokens.numpy()
        told[1] = members = active.members[owners]
        told[2] = lens[owners] + proposal.row_depths + 1
        told[3] = lens[owners] + places
        names, told[4], sizes = _by_kind(active.kinds, owners)
        tokens, owner, seq_lens, position, order = to_device(told, batch.device)
        pool_index = batch.req_pool_indices[owner]
        groups: list[tuple[str, Tensor | None]] = [(names[0], None)]
        if len(names) > 1:
            groups = list(zip(names, order.split(sizes), strict=True))
        is_whole = len(owners) == len(starts) == len(batch.reqs)  # a row for each request
        rows = partial(take, indices=None if is_whole else members.tolist())
        forward = changed(
            plain,
            input_ids=tokens,
            req_pool_indices=pool_index,
            seq_lens=seq_lens.to(batch.seq_lens.dtype),
            seq_lens_cpu=torch.from_numpy(told[2]).to(batch.seq_lens_cpu.dtype),
            seq_lens_sum=int(told[2].sum()),
            orig_seq_lens=seq_lens.to(batch.orig_seq_lens.dtype),
            out_cache_loc=slots_at(batch, pool_index, position),
            top_logprobs_nums=rows(plain.top_logprobs_nums),
            token_ids_logprobs=rows(plain.token_ids_logprobs),
            sampling_info=row_sampling(batch, active, proposal, owner),
            reqs=rows(plain.reqs),
            spec_info=TreeRows.of(proposal),
        )
        return StepRows(forward, groups)


def kind_groups(
    kinds: Sequence[str], device: Any, owners: Ints | None = None
) -> Sequence[tuple[str, Tensor | None]]:
    """Return the groups of a batch, for `sample`.

    owners: [N] the request of each row; by default there is one row for each
    """
    names, order, sizes = _by_kind(kinds, np.arange(len(kinds)) if owners is None else owners)
    if len(names) == 1:
        return [(names[0], None)]
    return list(zip(names, to_device(order, device).split(sizes), strict=True))


def _by_kind(kinds: Sequence[str], owners: Ints) -> tuple[list[str], Ints, list[int]]:
    """Return the kinds there are, the rows ordered by them, and how many there are of each."""
    names = list(dict.fromkeys(kinds))
    if len(names) == 1:
        return names, np.arange(len(owners)), [len(owners)]
    numbers = np.array([names.index(kind) for kind in kinds])[owners]
    return names, np.argsort(numbers, kind="stable"), np.bincount(numbers).tolist()
