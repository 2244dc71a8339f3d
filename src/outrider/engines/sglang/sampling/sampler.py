"""What SGLang would emit at each row: its own sampler says, each row as if it were alone.

What depends on the tokens so far (penalties, grammars, custom processors) is given the drafts on
the row's path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from outrider.core import Proposal
from outrider.engines.sglang.copies import changed
from outrider.engines.sglang.sampling.grammars import RowGrammar
from outrider.engines.sglang.sampling.penalties import advance, copied
from outrider.engines.sglang.sampling.processors import row_params
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.values import Members


def sample(
    version: SglangVersion,
    runner: Any,
    logits_output: LogitsProcessorOutput,
    forward: Any,
    at: Tensor,
    groups: Sequence[tuple[str, Tensor | None]],
) -> Tensor:
    """Let SGLang sample every row, each as if it were alone. Return the tokens, [N].

    Also attaches the logprobs that were asked for to `logits_output`.

    A batch of SGLang's takes one path through its sampler: seeded, that gives a request other
    coins beside one with top-k than alone. Rows of one kind go together here, so that what a
    request gets does not depend on the rest of the batch.

    forward: SGLang's batch, whose `sampling_info` and logprob options have an entry for each row
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
        # only what asks about single rows needs their numbers on the CPU
        rows = index.tolist() if forward.return_logprob or info.has_custom_logit_processor else []
        few = changed(
            forward,
            top_logprobs_nums=take(forward.top_logprobs_nums, rows),
            token_ids_logprobs=take(forward.token_ids_logprobs, rows),
        )
        chosen = _flagged(_expand(version, info, rows, index), kind)
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


LOGPROB_LISTS: dict[str, Callable[[], Any]] = {
    "next_token_top_logprobs_val": lambda: torch.empty(0),
    "next_token_top_logprobs_idx": lambda: torch.empty(0, dtype=torch.int64),
    "next_token_token_ids_logprobs_val": lambda: torch.empty(0),
    "next_token_token_ids_logprobs_idx": list,
}
"""What a row may have beside its token's logprob, and what stands for none."""


def _merge_logprobs(output: Any, parts: list[tuple[list[int], Any]], total: int) -> None:
    """Put the parts' logprobs together in row order."""
    if parts[0][1].next_token_logprobs is None:
        return
    first = parts[0][1].next_token_logprobs
    output.next_token_logprobs = first.new_empty(total)
    for rows, part in parts:
        output.next_token_logprobs[rows] = part.next_token_logprobs
    for name in LOGPROB_LISTS:
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
    for name, nothing in LOGPROB_LISTS.items():
        values = getattr(output, name)
        if values is not None and nothing is not list:
            mended = [v if isinstance(v, Tensor) else torch.tensor(v) for v in values]
            setattr(output, name, mended)


def _expand(version: SglangVersion, info: Any, rows: Sequence[int], index: Tensor) -> Any:
    """Return SGLang's sampling parameters with an entry for each of `rows`, without penalties."""
    expanded = copy.copy(info)
    expanded.penalizer_orchestrator = _NoPenalties()
    version.pick_sampling(expanded, list(rows), index)
    return expanded


class _NoPenalties:
    is_required = False

    def filter(self, keep_indices: Tensor) -> None:
        """Do nothing."""


def row_sampling(
    version: SglangVersion, batch: Any, members: Members, proposal: Proposal, owner: Tensor
) -> Any:
    """Return SGLang's sampling parameters with an entry for each row of the proposal."""
    info = batch.sampling_info
    if _is_greedy_only(info) and not batch.has_grammar:
        rows = copy.copy(info)
    else:
        places = members.places[proposal.row_owners]
        rows = _expand(version, info, places.tolist(), owner)
    # under overlap SGLang adds penalties up before the step: one step late
    rows.grammars = rows.acc_additive_penalties = rows.acc_scaling_penalties = None
    needs_paths = info.penalizer_orchestrator.is_required or batch.has_grammar or rows.custom_params
    if not needs_paths:
        return rows
    paths = proposal.paths()
    if info.penalizer_orchestrator.is_required:
        penalties = copied(info.penalizer_orchestrator, owner)
        for depth in range(proposal.max_depth):
            tokens = [path[depth] if depth < len(path) else -1 for path in paths]
            advance(penalties, tokens, owner.device)
        rows.penalizer_orchestrator = penalties
    owners = [members.requests[r] for r in proposal.row_owners.tolist()]
    if batch.has_grammar:
        grammars = [
            request.req.grammar and RowGrammar(request.req.grammar, path)
            for request, path in zip(owners, paths, strict=True)
        ]
        if any(grammars):  # the requests that have one may have ended
            rows.grammars = grammars
    if rows.custom_params:
        rows.custom_params = [
            row_params(params, request, path)
            for params, request, path in zip(rows.custom_params, owners, paths, strict=True)
        ]
    return rows


def _is_greedy_only(info: Any) -> bool:
    """Say whether the most likely token is all that the sampler looks for, whatever the row."""
    is_plain = info.logit_bias is None and not info.has_custom_logit_processor
    return bool(info.is_all_greedy and is_plain)


def take(values: list[Any] | None, indices: Sequence[int] | None) -> list[Any] | None:
    """Return these of the values; all of them without indices."""
    return values if values is None or indices is None else [values[i] for i in indices]
