"""Forward batches: every pass of ours is one of SGLang's decode batches, with rows of our choice.

A verify pass has one row for each request's last token and each draft. A row of depth d sees its
request's cache up to its own position, as if the drafts before it had been emitted. So any
attention backend of SGLang can verify, with the kernels of plain decoding, and what it computes for
a row is what it computes for one token. Only our own backend knows trees, where several rows
stand at one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core import Ints, Proposal
from outrider.engines.sglang.copies import changed
from outrider.engines.sglang.sampling.sampler import row_sampling, take
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.device import DeviceRows, to_device
from outrider.serving.values import Members

Groups = Sequence[tuple[str, Tensor | None]]
"""Rows that are sampled together: their kind, and which they are; None for all. See `sample`."""


@dataclass(frozen=True, eq=False)
class SglangBatch:
    """A decode batch of SGLang's.

    batch: the scheduler's own, with the sampling parameters that are not copied
    worker_batch: the same as SGLang's workers take it
    """

    version: SglangVersion
    batch: Any
    worker_batch: Any

    @property
    def index(self) -> Tensor:
        """[B] the requests' rows in the table of slots."""
        index: Tensor = self.worker_batch.req_pool_indices
        return index

    def slots_at(self, index: Tensor, position: Tensor) -> Tensor:
        """Return the slots that the table has for these positions."""
        slots: Tensor = self.batch.req_to_token_pool.req_to_token[index, position]
        return slots.to(torch.int64)


def forward_batch(
    worker_batch: Any,
    tokens: Tensor,
    index: Tensor,
    seq_lens: Tensor,
    longest: Tensor | Ints,
    slots: Tensor,
    **others: Any,
) -> Any:
    """Return SGLang's decode batch over these rows.

    tokens, index, seq_lens, slots: [N] of the rows: their tokens, their requests' rows in the table
        of slots, their lengths with the row, and where their keys and values go
    longest: [N] on the CPU: `seq_lens`, or the largest that they may be
    others: fields that differ from those of `worker_batch`
    """
    seq_lens_cpu = torch.from_numpy(longest) if isinstance(longest, np.ndarray) else longest
    return changed(
        worker_batch,
        input_ids=tokens,
        req_pool_indices=index,
        seq_lens=seq_lens.to(worker_batch.seq_lens.dtype),
        seq_lens_cpu=seq_lens_cpu.to(worker_batch.seq_lens_cpu.dtype),
        seq_lens_sum=int(seq_lens_cpu.sum()),
        orig_seq_lens=seq_lens.to(worker_batch.orig_seq_lens.dtype),
        out_cache_loc=slots,
        **{"spec_info": None, **others},
    )


def copied_rows(
    worker_batch: Any,
    tokens: Sequence[int],
    index: Tensor,
    positions: Sequence[int],
    slots: Tensor,
    **others: Any,
) -> Any:
    """Return the same of tokens and positions that the CPU knows."""
    packed = np.array([tokens, positions], np.int64)
    token, position = to_device(packed, index.device)
    return forward_batch(worker_batch, token, index, position + 1, packed[1] + 1, slots, **others)


@dataclass(frozen=True)
class TreeRows:
    """What our attention backend needs where drafts branch, as SGLang's `spec_info`.

    parents: [N] the row whose token each row's follows, -1 for a request's last token
    positions: left to SGLang, which looks for it
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


def last_token_rows(
    own: SglangBatch, last_tokens: Tensor, kinds: Sequence[str]
) -> tuple[Any, Groups]:
    """Return one row for each request: the device knows its last token and its length.

    last_tokens: by row of the table of slots
    """
    plain = own.worker_batch
    index, lens = plain.req_pool_indices, plain.seq_lens
    tokens, slots = last_tokens[index], own.slots_at(index, lens)
    forward = forward_batch(plain, tokens, index, lens + 1, plain.seq_lens_cpu + 1, slots)
    return forward, kind_groups(kinds, index.device)


def proposal_rows(own: SglangBatch, members: Members, proposal: Proposal) -> tuple[Any, Groups]:
    """Return the rows of a proposal: all that goes to the device goes in one copy."""
    owners, starts = proposal.row_owners, proposal.root_rows
    places = np.arange(len(owners)) - starts[owners]
    packed = np.empty((5, len(owners)), np.int64)
    packed[0, starts] = [request.last_token for request in members.requests]
    packed[0, proposal.draft_rows] = proposal.tokens.numpy()
    packed[1] = places_in_batch = members.places[owners]
    packed[2] = members.lens[owners] + proposal.row_depths + 1
    packed[3] = members.lens[owners] + places
    names, packed[4], sizes = _by_kind(members.columns.kinds, places_in_batch)
    tokens, owner, seq_lens, position, order = to_device(packed, own.index.device)
    groups: Groups = [(names[0], None)]
    if len(names) > 1:
        groups = list(zip(names, order.split(sizes), strict=True))
    index = own.index[owner]
    forward = forward_batch(
        own.worker_batch,
        tokens,
        index,
        seq_lens,
        packed[2],
        own.slots_at(index, position),
        sampling_info=row_sampling(own.version, own.batch, members, proposal, owner),
        spec_info=TreeRows.of(proposal),
        **_of_rows(own.worker_batch, places_in_batch),
    )
    return forward, groups


def device_rows(own: SglangBatch, members: Members, drafts: DeviceRows) -> tuple[Any, Groups]:
    """Return the rows of drafts that only the device knows."""
    shape, owner = drafts.layout.shape, drafts.layout.owner
    owners = shape.row_owners
    forward = forward_batch(
        own.worker_batch,
        drafts.tokens,
        drafts.owner_index,
        drafts.seq_lens,
        drafts.longest,
        drafts.slots,
        sampling_info=row_sampling(own.version, own.batch, members, shape, owner),
        **_of_rows(own.worker_batch, owners),
    )
    return forward, kind_groups(members.columns.kinds, owner.device, owners)


def _of_rows(worker_batch: Any, owners: Ints) -> dict[str, Any]:
    """Return the fields that have an entry for each request, with one for each row.

    owners: [N] the rows' requests
    """
    names = ("top_logprobs_nums", "token_ids_logprobs", "reqs")
    is_whole = len(owners) == len(worker_batch.reqs) and (owners == np.arange(len(owners))).all()
    pick = partial(take, indices=None if is_whole else owners.tolist())
    return {name: pick(getattr(worker_batch, name)) for name in names}


def kind_groups(kinds: Sequence[str], device: Any, owners: Ints | None = None) -> Groups:
    """Return the groups of a batch's rows.

    owners: [N] the request of each row; by default there is one row for each
    """
    names, order, sizes = _by_kind(kinds, np.arange(len(kinds)) if owners is None else owners)
    if len(names) == 1:
        return [(names[0], None)]
    return list(zip(names, to_device(order, device).split(sizes), strict=True))


def _by_kind(kinds: Sequence[str], owners: Ints) -> tuple[list[str], Ints, list[int]]:
    """Return the kinds there are, the rows ordered by them, and how many there are of each."""
    names = list(dict.fromkeys(kinds))
    if len(names) > 1:
        numbers = np.array([names.index(kind) for kind in kinds])[owners]
        counts = np.bincount(numbers, minlength=len(names))
        found = [(name, count) for name, count in zip(names, counts.tolist(), strict=True) if count]
        order = np.argsort(numbers, kind="stable")
        return [name for name, _ in found], order, [count for _, count in found]
    return names, np.arange(len(owners)), [len(owners)]
