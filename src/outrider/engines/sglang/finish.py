"""What follows from an outcome for SGLang's requests: where they end, logprobs, states, slots."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH

from outrider.core import FinishReason
from outrider.engines.sglang.sampling.sampler import LOGPROB_LISTS
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.device import owners_and_places, to_device
from outrider.serving.values import Settled


def would_keep(
    version: SglangVersion, req: Any, tokens: Sequence[int]
) -> tuple[int, FinishReason | None]:
    """Return how many of these tokens plain decoding would append, and why it would end there.

    A copy of the request is asked, in the order of SGLang's own decode. Its grammar is the real
    one, which is put back.
    """
    twin, kept, accepted = copy.copy(req), 0, 0
    twin.output_ids = req.output_ids[:]
    try:
        for token in tokens:
            kept += 1
            twin.output_ids.append(token)
            version.check_finished(twin)
            if twin.finished() or kept == len(tokens):
                break
            if req.grammar is not None:
                req.grammar.accept_token(token)
                accepted += 1
                if req.grammar.is_terminated():
                    break  # plain decoding needs one more step to see it
    except ValueError:
        pass  # SGLang will meet the same, and end the request
    finally:
        if accepted:
            req.grammar.rollback(accepted)
    if not twin.finished():
        return kept, None
    is_length = isinstance(twin.finished_reason, FINISH_LENGTH)
    return kept, FinishReason.LENGTH if is_length else FinishReason.STOP


def has_left(req: Any) -> bool:
    """Say whether SGLang has ended a request, or taken it out of the batch."""
    return bool(req.finished() or req.is_retracted)


def order_slots(settled: Settled, version: SglangVersion, runner: Any, main: Any) -> None:
    """Put the slots of a tree's path into the order of its tokens: in the table, nothing is copied.

    What is not on the path goes behind it. A request that has left the batch has no row in the
    table.

    main: the scheduler's own stream, which reads the table next, when a request ends
    """
    outcomes, sizes = settled.outcomes, settled.proposal.num_drafts + 1
    moved, sources = [], []
    for r, request in enumerate(settled.members.requests):
        path = outcomes.rows[outcomes.starts[r] : outcomes.starts[r + 1]]
        if not has_left(request.req) and (path != np.arange(len(path))).any():
            moved.append((version.kv(request.req).req_pool_idx, request.length - 1))
            sources.append(np.concatenate([path, np.setdiff1d(np.arange(sizes[r]), path)]))
    if not moved:
        return
    owners, places = owners_and_places(np.array([len(rows) for rows in sources]))
    pool_indices, bases = np.array(moved)[owners].T
    packed = np.stack([pool_indices, bases + np.concatenate(sources), bases + places])
    table = runner.req_to_token_pool
    device = torch.get_device_module(runner.device)
    is_cpu = torch.device(runner.device).type == "cpu"
    with nullcontext() if is_cpu else device.stream(main):
        index, at, to = to_device(packed, runner.device)
        table.write((index, to), table.req_to_token[index, at])
    if not is_cpu:
        device.current_stream().wait_stream(main)


def attach_hidden(settled: Settled, output: Any) -> None:
    """Give requests the hidden states of the rows that were kept."""
    if output.hidden_states is None or not len(settled.running):
        return
    rows, starts = settled.kept_rows().tolist(), settled.outcomes.starts.tolist()
    for r, request in enumerate(settled.members.requests):
        req = request.req
        if req.return_hidden_states and not has_left(req):
            kept = output.hidden_states[rows[starts[r] : starts[r + 1]]].tolist()
            if req.return_hidden_states == "last":  # 0.5.23 has this
                req.hidden_states[:] = kept[-1:]
            else:
                req.hidden_states += kept


def order_logprobs(settled: Settled, output: Any, batch_size: int) -> None:
    """Put the logprobs of the rows that were kept where SGLang looks for them: [B, most]."""
    outcomes = settled.outcomes
    most = int(outcomes.num_tokens.max(initial=1))
    places = np.arange(len(outcomes.tokens)) - outcomes.starts[outcomes.owners]
    members = settled.members.places[outcomes.owners]
    rows = settled.kept_rows()
    values = output.next_token_logprobs.new_zeros(batch_size, most)
    values[members, places] = output.next_token_logprobs[rows]
    output.next_token_logprobs = values
    for name, nothing in LOGPROB_LISTS.items():
        if (found := getattr(output, name)) is not None:
            ordered = [nothing() for _ in range(batch_size * most)]
            for row, at in zip(rows.tolist(), (members * most + places).tolist(), strict=True):
                ordered[at] = found[row]
            setattr(output, name, ordered)
