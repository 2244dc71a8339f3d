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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from outrider.core import Law, Proposal


@dataclass(frozen=True)
class Block:
    """The cache slots of a step: for each request, those of its last token and its drafts.

    slots: [S] int64, request by request
    starts: [B + 1] where each request's begin, and S
    """

    slots: Tensor
    starts: tuple[int, ...]

    def rows(self, num_drafts: Sequence[int]) -> list[int]:
        """Return which slots belong to the rows of a proposal, in row order."""
        return [s + i for s, k in zip(self.starts, num_drafts, strict=False) for i in range(k + 1)]

    def split(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the slots of these rows of each request, and all others."""
        index = torch.tensor(
            [start + row for start, mine in zip(self.starts, rows, strict=False) for row in mine]
        )
        index = index.to(self.slots.device)
        rest = torch.ones(len(self.slots), dtype=torch.bool, device=self.slots.device)
        rest[index] = False
        return self.slots[index], self.slots[rest]


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
        parents = [-1] * proposal.num_rows
        for row, parent in zip(proposal.draft_rows, proposal.parent_rows, strict=True):
            parents[row] = parent
        return TreeRows(tuple(parents))


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


def verify_batch(
    batch: Any, plain: Any, last_tokens: Sequence[int], proposal: Proposal[Law], block: Block
) -> Any:
    """Return the host's decode batch over all rows of the proposal.

    plain: the host's decode batch as it would be without drafts
    last_tokens: [B] the token that each request's next one follows
    """
    device = batch.device
    owners, depths = list(proposal.row_owners), torch.tensor(proposal.row_depths)
    owner = torch.tensor(owners, dtype=torch.int64)
    on_device = owner.to(device, non_blocking=True)
    seq_lens_cpu = batch.seq_lens_cpu[owner] + depths.to(batch.seq_lens_cpu.dtype) + 1
    ahead = (depths + 1).to(device, non_blocking=True)

    roots = torch.tensor(last_tokens, dtype=torch.int64)
    input_ids = torch.empty(proposal.num_rows, dtype=torch.int64, device=device)
    input_ids[list(proposal.root_rows)] = roots.to(device, non_blocking=True)
    if proposal.parents:
        input_ids[list(proposal.draft_rows)] = proposal.tokens.to(device, non_blocking=True)

    return dataclasses.replace(
        plain,
        input_ids=input_ids,
        req_pool_indices=batch.req_pool_indices[on_device],
        seq_lens=batch.seq_lens[on_device] + ahead.to(batch.seq_lens.dtype),
        seq_lens_cpu=seq_lens_cpu,
        seq_lens_sum=int(seq_lens_cpu.sum()),
        orig_seq_lens=batch.orig_seq_lens[on_device] + ahead.to(batch.orig_seq_lens.dtype),
        out_cache_loc=block.slots[block.rows(proposal.num_drafts)],
        lora_ids=_take(plain.lora_ids, owners),
        top_logprobs_nums=_take(plain.top_logprobs_nums, owners),
        token_ids_logprobs=_take(plain.token_ids_logprobs, owners),
        sampling_info=_row_sampling(batch, proposal, on_device),
        reqs=_take(plain.reqs, owners),
        spec_info=TreeRows.of(proposal),
    )


def _take(values: list[Any] | None, indices: Sequence[int]) -> list[Any] | None:
    return None if values is None else [values[i] for i in indices]


# -- what the host would emit


def sample(runner: Any, logits_output: LogitsProcessorOutput, forward: Any, at: Tensor) -> Tensor:
    """Let the host sample every row, each as if it were alone. Return the tokens, [N].

    Also attaches the logprobs that were asked for to `logits_output`.

    A batch of SGLang's takes one path through its sampler: seeded, that gives a request other
    coins beside one with top-k than alone. Rows of one kind go together here, so that what a
    request gets does not depend on who is there.

    forward: the host's batch, whose `sampling_info` and logprob wishes have an entry for each row
    at: [N] the position of each row's token
    """
    info = forward.sampling_info
    runner._preprocess_logits(logits_output, info)
    kinds: dict[str, list[int]] = {}
    for row, req in enumerate(forward.reqs):
        kinds.setdefault(_kind(req.sampling_params), []).append(row)
    if len(kinds) == 1:
        (kind,) = kinds
        chosen = _flagged(copy.copy(info), kind)
        tokens = _sample_kind(runner, logits_output, forward, chosen, at)
        _mend_logprobs(logits_output)
        return tokens

    tokens = torch.empty(len(forward.reqs), dtype=torch.int64, device=at.device)
    parts = []
    for kind, rows in kinds.items():
        index = torch.tensor(rows, device=at.device)
        part = LogitsProcessorOutput(next_token_logits=logits_output.next_token_logits[index])
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


def _kind(params: Any) -> str:
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


def _row_sampling(batch: Any, proposal: Proposal[Law], owner: Tensor) -> Any:
    """Return the host's sampling parameters with an entry for each row of the proposal."""
    info = batch.sampling_info
    rows = _expand(info, proposal.row_owners, owner)
    rows.grammars = None
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
    if batch.has_grammar:
        rows.grammars = [
            batch.reqs[r].grammar and _RowGrammar(batch.reqs[r].grammar, path)
            for r, path in zip(proposal.row_owners, paths, strict=True)
        ]
    if rows.custom_params:
        rows.custom_params = [
            _row_params(params, path)
            for params, path in zip(rows.custom_params, paths, strict=True)
        ]
    return rows


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
        self.catch_up(batch)

    def catch_up(self, batch: Any) -> None:
        """Count the output tokens that are not counted yet."""
        orchestrator = batch.sampling_info.penalizer_orchestrator
        fresh = [req.output_ids[self._counted[req] :] for req in batch.reqs]
        for req in batch.reqs:
            self._counted[req] = len(req.output_ids)
        if orchestrator.is_required:
            for j in range(max(map(len, fresh), default=0)):
                tokens = [new[j] if j < len(new) else -1 for new in fresh]
                advance(orchestrator, tokens, batch.device)


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


def _row_params(params: Any, path: Sequence[int]) -> Any:
    """Return a request's custom parameters, with a request that has the path in its output."""
    if not path or not isinstance(params, dict) or "__req__" not in params:
        return params
    req = copy.copy(params["__req__"])
    req.output_ids = [*req.output_ids, *path]
    return {**params, "__req__": req}
