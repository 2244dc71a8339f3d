"""A verify pass is a decode batch: one row for each request's last token and each draft.

A row of depth d sees its request's cache up to its own position, as if the drafts before it had
been emitted. So any attention backend of SGLang can verify, with the kernels of plain decoding, and
what it computes for a row is what it computes for one token. Only our own backend is told of trees,
where several rows stand at one position.

The host's own sampler then says what it would emit at each row. What depends on the tokens so far
(penalties, grammars, custom processors) is given the drafts on the row's path.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.common import alloc_for_decode, alloc_token_slots
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from outrider.core import Ints, Law, Outcomes, Proposal

if TYPE_CHECKING:
    from outrider.hosts.sglang.roster import LiveRequest


@dataclass(frozen=True, eq=False)
class Block:
    """The cache slots of a step: for each request, those of its last token and its drafts.

    slots: [S] int64, request by request
    starts: [B] where each request's begin
    """

    slots: Tensor
    starts: Ints

    @staticmethod
    def reserve(batch: Any, max_drafts: Ints) -> Block:
        """Give each request slots for as many drafts as it may have: a draft model fills them."""
        counts = max_drafts + 1
        starts, owners = counts.cumsum() - counts, np.repeat(np.arange(len(counts)), counts)
        positions = batch.seq_lens_cpu.numpy()[owners] + np.arange(len(owners)) - starts[owners]
        owner, position = to_device(np.stack([owners, positions]), batch.device)
        return Block(write_slots(batch, owner, position), starts)

    def split(self, outcomes: Outcomes) -> tuple[Ints, Ints]:
        """Return which slots belong to the rows that were kept, and all others."""
        kept = self.starts[outcomes.owners] + outcomes.rows
        rest = np.ones(len(self.slots), np.bool_)
        rest[kept] = False
        return kept, np.flatnonzero(rest)


def write_slots(batch: Any, owner: Tensor, position: Tensor) -> Tensor:
    """Allocate a slot for each of these positions, and put it into the host's table."""
    slots: Tensor = alloc_token_slots(batch.tree_cache, len(owner))
    pool_index = batch.req_pool_indices[owner]
    batch.req_to_token_pool.write((pool_index, position), slots.to(torch.int32))
    return slots


def read_slots(batch: Any, owner: Tensor, position: Tensor) -> Tensor:
    """Return the slots that the host's table has for these positions."""
    slots: Tensor = batch.req_to_token_pool.req_to_token[batch.req_pool_indices[owner], position]
    return slots.to(torch.int64)


def to_device(array: Ints, device: Any) -> Tensor:
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
    def of(proposal: Proposal[Law]) -> TreeRows | None:
        """Return the tree of a proposal's rows; None if nothing branches."""
        if proposal.is_chain:
            return None
        parents = np.full(proposal.num_rows, -1)
        parents[proposal.draft_rows] = proposal.parent_rows
        return TreeRows(tuple(parents.tolist()))


def decode_rows(
    plain: Any, tokens: Sequence[int], lines: Tensor, positions: Sequence[int], slots: Tensor
) -> Any:
    """Return the host's decode batch over these rows, on their requests' lines of its table.

    slots: [N] where their keys and values go
    """
    seq_lens_cpu = torch.tensor(positions) + 1
    seq_lens = seq_lens_cpu.to(lines.device, non_blocking=True)
    return dataclasses.replace(
        plain,
        input_ids=torch.tensor(tokens, device=lines.device),
        req_pool_indices=lines,
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
    def plain(batch: Any, kinds: Sequence[str]) -> StepRows:
        """Advance the batch by one token for each request, as the host does without speculation.

        The device is told nothing: it has the last tokens.
        """
        batch.input_ids = batch.output_ids
        batch.out_cache_loc = alloc_for_decode(batch, token_per_req=1)
        for lens in (batch.seq_lens, batch.seq_lens_cpu, batch.orig_seq_lens):
            lens.add_(1)
        batch.seq_lens_sum += len(batch.reqs)
        return StepRows(batch.get_model_worker_batch(), kind_groups(kinds, batch.device))

    @staticmethod
    def of(
        batch: Any,
        plain: Any,
        company: Company,
        proposal: Proposal[Law],
        find_slots: Callable[[Any, Tensor, Tensor], Tensor],
    ) -> StepRows:
        """Lay the rows of a proposal out: all that the device is told goes in one copy.

        batch, plain: the host's decode batch, and the same as its workers take it
        company: the requests of the proposal
        find_slots: gives rows their slots: `write_slots` or `read_slots`
        """
        owners, starts, lens = proposal.row_owners, proposal.root_rows, company.lens
        places = np.arange(len(owners)) - starts[owners]
        told = np.empty((5, len(owners)), np.int64)
        told[0, starts] = [request.last_token for request in company.requests]
        told[0, proposal.draft_rows] = proposal.tokens.numpy()
        told[1] = members = company.members[owners]
        told[2] = lens[owners] + proposal.row_depths + 1
        told[3] = lens[owners] + places
        names, order, sizes = _by_kind(company.kinds, owners)
        told[4] = order
        tokens, owner, seq_lens, position, by_kind = to_device(told, batch.device)
        slots = find_slots(batch, owner, position)
        groups: list[tuple[str, Tensor | None]] = [(names[0], None)]
        if len(names) > 1:
            groups = list(zip(names, by_kind.split(sizes), strict=True))
        is_whole = len(owners) == len(starts) == len(batch.reqs)  # a row for each request
        rows = partial(_take, indices=None if is_whole else members.tolist())
        forward = dataclasses.replace(
            plain,
            input_ids=tokens,
            req_pool_indices=batch.req_pool_indices[owner],
            seq_lens=seq_lens.to(batch.seq_lens.dtype),
            seq_lens_cpu=torch.from_numpy(told[2]).to(batch.seq_lens_cpu.dtype),
            seq_lens_sum=int(told[2].sum()),
            orig_seq_lens=seq_lens.to(batch.orig_seq_lens.dtype),
            out_cache_loc=slots,
            lora_ids=rows(plain.lora_ids),
            top_logprobs_nums=rows(plain.top_logprobs_nums),
            token_ids_logprobs=rows(plain.token_ids_logprobs),
            sampling_info=_row_sampling(batch, company, proposal, owner),
            reqs=rows(plain.reqs),
            spec_info=TreeRows.of(proposal),
        )
        return StepRows(forward, groups)


@dataclass(frozen=True, eq=False)
class Company:
    """Those of a batch's requests that have rows in a step.

    requests: the drafters' view of them, with all that they have emitted
    members: [R] their places in the batch
    lens: [R] how many of their tokens are cached
    kinds: [R] how they are sampled
    """

    requests: Sequence[LiveRequest]
    members: Ints
    lens: Ints
    kinds: Sequence[str]


def _by_kind(kinds: Sequence[str], owners: Ints) -> tuple[list[str], Ints, list[int]]:
    """Return the kinds there are, the rows ordered by them, and how many there are of each."""
    names = list(dict.fromkeys(kinds))
    if len(names) == 1:
        return names, np.arange(len(owners)), [len(owners)]
    numbers = np.array([names.index(kind) for kind in kinds])[owners]
    return names, np.argsort(numbers, kind="stable"), np.bincount(numbers).tolist()


def _take(values: list[Any] | None, indices: Sequence[int] | None) -> list[Any] | None:
    return values if values is None or indices is None else [values[i] for i in indices]


# -- what the host would emit


def sample(
    runner: Any,
    logits_output: LogitsProcessorOutput,
    forward: Any,
    at: Tensor,
    groups: Sequence[tuple[str, Tensor | None]],
) -> Tensor:
    """Let the host sample every row, each as if it were alone. Return the tokens, [N].

    Also attaches the logprobs that were asked for to `logits_output`.

    A batch of SGLang's takes one path through its sampler: seeded, that gives a request other
    coins beside one with top-k than alone. Rows of one kind go together here, so that what a
    request gets does not depend on who is there.

    forward: the host's batch, whose `sampling_info` and logprob options have an entry for each row
    at: [N] the position of each row's token
    groups: each kind, with its rows; None for all of them
    """
    info = forward.sampling_info
    runner._preprocess_logits(logits_output, info)
    if len(groups) == 1:
        ((kind, _),) = groups
        chosen = _flagged(copy.copy(info), kind)
        tokens = _sample_kind(runner, logits_output, forward, chosen, at)
        _mend_logprobs(logits_output)
        return tokens

    tokens = torch.empty(len(forward.reqs), dtype=torch.int64, device=at.device)
    parts = []
    for kind, index in groups:
        assert index is not None
        part = LogitsProcessorOutput(next_token_logits=logits_output.next_token_logits[index])
        # only what asks about single rows needs their numbers on the host
        rows = index.tolist() if forward.return_logprob or info.has_custom_logit_processor else []
        few = dataclasses.replace(
            forward,
            top_logprobs_nums=_take(forward.top_logprobs_nums, rows),
            token_ids_logprobs=_take(forward.token_ids_logprobs, rows),
        )
        chosen = _flagged(_expand(info, rows, index), kind)
        tokens[index] = _sample_kind(runner, part, few, chosen, at[index])
        parts.append((rows, part))
    _merge_logprobs(logits_output, parts, len(forward.reqs))
    _mend_logprobs(logits_output)
    return tokens


def kind_groups(kinds: Sequence[str], device: Any) -> Sequence[tuple[str, Tensor | None]]:
    """Return the groups of a batch with one row for each request, for `sample`."""
    names, order, sizes = _by_kind(kinds, np.arange(len(kinds)))
    if len(names) == 1:
        return [(names[0], None)]
    return list(zip(names, to_device(order, device).split(sizes), strict=True))


def _sample_kind(runner: Any, output: Any, forward: Any, info: Any, at: Tensor) -> Tensor:
    tokens: Tensor = runner.sampler(
        output,
        info,
        forward.return_logprob,
        forward.top_logprobs_nums,
        forward.token_ids_logprobs,
        at,
    )
    return tokens.to(torch.int64)


def sampling_kind(params: Any) -> str:
    """Name the path that a request alone takes through the host's sampler."""
    if params.top_k <= 1:
        return "greedy"
    filtered = params.top_k != TOP_K_ALL or params.top_p != 1.0
    return ("min_p" if params.min_p > 0 else "filtered") if filtered or params.min_p else "plain"


def _flagged(info: Any, kind: str) -> Any:
    """Set the host's flags for rows that are all of this kind."""
    info.is_all_greedy = kind == "greedy"
    info.need_top_k_sampling = info.need_top_p_sampling = kind in ("filtered", "min_p")
    info.need_min_p_sampling = kind == "min_p"
    return info


_TENSORS = (
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
)
_LOGPROBS = ("next_token_top_logprobs", "next_token_token_ids_logprobs")


def _merge_logprobs(output: Any, parts: list[tuple[list[int], Any]], total: int) -> None:
    """Put the parts' logprobs together in row order."""
    if parts[0][1].next_token_logprobs is None:
        return
    first = parts[0][1].next_token_logprobs
    output.next_token_logprobs = first.new_empty(total)
    for rows, part in parts:
        output.next_token_logprobs[rows] = part.next_token_logprobs
    for name in (f"{stem}_{end}" for stem in _LOGPROBS for end in ("val", "idx")):
        if all(getattr(part, name) is None for _, part in parts):
            continue
        merged: list[Any] = [[]] * total
        for rows, part in parts:
            for row, value in zip(rows, getattr(part, name) or [[]] * len(rows), strict=True):
                merged[row] = value
        setattr(output, name, merged)


def _mend_logprobs(output: Any) -> None:
    """Make what a row did not ask for an empty tensor.

    SGLang's scheduler calls `tolist` on what its sampler leaves as a list for a row without
    `token_ids_logprob` beside one with it, and dies of it.
    """
    for name in _TENSORS:
        values = getattr(output, name)
        if values is not None:
            mended = [v if isinstance(v, Tensor) else torch.tensor(v) for v in values]
            setattr(output, name, mended)


def _expand(info: Any, rows: Sequence[int], index: Tensor) -> Any:
    """Return the host's sampling parameters with an entry for each of `rows`, without penalties.

    The host's own `filter_batch` picks entries; it does not mind one that is picked repeatedly.
    """
    expanded = copy.copy(info)
    expanded.penalizer_orchestrator = _NoPenalties()
    expanded.filter_batch(list(rows), index)
    return expanded


class _NoPenalties:
    is_required = False

    def filter(self, keep_indices: Tensor) -> None:
        """Do nothing."""


def _row_sampling(batch: Any, company: Company, proposal: Proposal[Law], owner: Tensor) -> Any:
    """Return the host's sampling parameters with an entry for each row of the proposal."""
    info = batch.sampling_info
    if _is_greedy_only(info) and not batch.has_grammar:
        rows = copy.copy(info)
    else:
        rows = _expand(info, company.members[proposal.row_owners].tolist(), owner)
    # under overlap the host adds penalties up before the step: one step late
    rows.grammars = rows.acc_additive_penalties = rows.acc_scaling_penalties = None
    needs_paths = info.penalizer_orchestrator.is_required or batch.has_grammar or rows.custom_params
    if not needs_paths:
        return rows
    paths = proposal.paths()
    if info.penalizer_orchestrator.is_required:
        penalties = _copied(info.penalizer_orchestrator, owner)
        for depth in range(proposal.max_depth):
            tokens = [path[depth] if depth < len(path) else -1 for path in paths]
            advance(penalties, tokens, owner.device)
        rows.penalizer_orchestrator = penalties
    owners = [company.requests[r] for r in proposal.row_owners.tolist()]
    if batch.has_grammar:
        rows.grammars = [
            request.req.grammar and _RowGrammar(request.req.grammar, path)
            for request, path in zip(owners, paths, strict=True)
        ]
    if rows.custom_params:
        rows.custom_params = [
            _row_params(params, [*request.output, *path])
            for params, request, path in zip(rows.custom_params, owners, paths, strict=True)
        ]
    return rows


def _is_greedy_only(info: Any) -> bool:
    """Say whether the most likely token is all that the sampler looks for, whatever the row."""
    is_plain = info.logit_bias is None and not info.has_custom_logit_processor
    return bool(info.is_all_greedy and is_plain)


# -- penalties


def _copied(orchestrator: Any, index: Tensor) -> Any:
    """Return a copy of the host's penalties with an entry for each of `index`."""
    copied = copy.copy(orchestrator)
    copied.penalizers = {}
    for kind, penalizer in orchestrator.penalizers.items():
        twin = copied.penalizers[kind] = copy.copy(penalizer)
        twin._orchestrator_ref = weakref.ref(copied)
        twin.filter(index)
    return copied


def advance(orchestrator: Any, tokens: Sequence[int], device: Any) -> None:
    """Let the host's penalties count one more output token of each entry; -1 is none."""
    still = [i for i, token in enumerate(tokens) if token < 0]
    ids = torch.tensor([max(token, 0) for token in tokens], device=device)
    states = [
        (penalizer, name, value[still].clone())
        for penalizer in orchestrator.penalizers.values()
        if still and penalizer.is_prepared()
        for name, value in vars(penalizer).items()
        if isinstance(value, Tensor)
    ]
    orchestrator.cumulate_output_tokens(ids)
    for penalizer, name, before in states:
        getattr(penalizer, name)[still] = before


class Penalties:
    """Keeps the host's penalties in step with what was emitted: in spec v1 nobody else does.

    It also mends a gap of the host's: a retracted request comes back with its penalties empty.
    """

    def __init__(self) -> None:
        # how many output tokens of each request its penalties have counted
        self._counted: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def renew(self, batch: Any) -> None:
        """Count all output tokens of a batch whose penalties the host has just made."""
        for req in batch.reqs:
            self._counted[req] = 0
        self._count(batch, [req.output_ids for req in batch.reqs])

    def catch_up(self, batch: Any, requests: Sequence[LiveRequest]) -> None:
        """Count the output tokens that are not counted yet. requests: all of the batch"""
        if batch.sampling_info.penalizer_orchestrator.is_required:
            self._count(batch, [request.output for request in requests])

    def _count(self, batch: Any, outputs: Sequence[list[int]]) -> None:
        orchestrator = batch.sampling_info.penalizer_orchestrator
        if not orchestrator.is_required:
            return  # nobody here has penalties; whoever comes with some has them counted
        fresh = [
            self._fresh(req, output) if has_penalties(req) else []
            for req, output in zip(batch.reqs, outputs, strict=True)
        ]
        for j in range(max(map(len, fresh), default=0)):
            tokens = [new[j] if j < len(new) else -1 for new in fresh]
            advance(orchestrator, tokens, batch.device)

    def _fresh(self, req: Any, output: list[int]) -> list[int]:
        """Return the output tokens that are not counted yet, and count them."""
        before, self._counted[req] = self._counted.get(req, 0), len(output)
        return output[before:]


def has_penalties(req: Any) -> bool:
    """Say whether it matters what a request has emitted. For others nothing is counted."""
    p = req.sampling_params
    penalties = p.frequency_penalty, p.presence_penalty, p.repetition_penalty - 1, p.min_new_tokens
    return any(penalties)


# -- grammars and custom processors


def can_roll_back(grammar: Any) -> bool:
    """Say whether a grammar can be asked about drafts: some backends cannot go back."""
    return type(grammar).rollback is not BaseGrammarObject.rollback


class _RowGrammar:
    """A request's grammar as it would be after the drafts on a row's path."""

    def __init__(self, grammar: Any, path: Sequence[int]) -> None:
        self._grammar, self._path = grammar, path
        self.finished = grammar.finished
        self.allocate_vocab_mask = grammar.allocate_vocab_mask
        self.apply_vocab_mask = grammar.apply_vocab_mask
        self.move_vocab_mask = grammar.move_vocab_mask

    def is_terminated(self) -> bool:
        """Let the host ask for a mask: `fill_vocab_mask` looks."""
        return False

    def fill_vocab_mask(self, vocab_mask: Tensor, idx: int) -> None:
        """Write the mask of the tokens that may follow the path, if the path itself may be."""
        with self._after_path() as possible:
            if possible and not self._grammar.is_terminated():
                self._grammar.fill_vocab_mask(vocab_mask, idx)

    @contextmanager
    def _after_path(self) -> Iterator[bool]:
        accepted = 0
        try:
            for token in self._path:
                if self._grammar.is_terminated():
                    break
                self._grammar.accept_token(token)
                accepted += 1
        except ValueError:
            pass  # no such text: the target cannot agree with this draft, nor reach the row
        try:
            yield accepted == len(self._path)
        finally:
            if accepted:
                self._grammar.rollback(accepted)


def _row_params(params: Any, output: list[int]) -> Any:
    """Return a request's custom parameters, with a request that has emitted this."""
    if not isinstance(params, dict) or "__req__" not in params:
        return params
    req = copy.copy(params["__req__"])
    req.output_ids = output
    return {**params, "__req__": req}
