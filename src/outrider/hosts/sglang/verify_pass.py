"""Verification by SGLang's own TARGET_VERIFY: each request's cache is read once.

A verify pass of decode rows (`rows`) computes for each row what plain decoding computes, on any
attention backend. But only our own backend reads a request's cache once for all of its rows; the
others read it once for each, which is expensive for long contexts. They have a pass of their own
for several tokens of a request, with kernels of their own: the distribution is the same up to
rounding, the bits are not. And every request has as many rows as any may have.

So where the same tokens are promised, rows verify. Elsewhere control may choose, by measured times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor

from outrider.core import Ints, Proposal
from outrider.hosts.sglang.host import changed
from outrider.hosts.sglang.requests import ActiveRequests
from outrider.hosts.sglang.rows import decode_rows, read_slots, to_device

TOLERANCE = 0.05
"""How far the logits of the two passes may be apart, as a share of their spread."""


class VerifyPass:
    """Runs TARGET_VERIFY over the drafts of a step.

    run: runs the target over a batch
    width: rows of each request
    most: tokens of a request
    is_checked: whether it was found to agree with decode rows
    """

    def __init__(self, run: Callable[[Any], Any], width: int, most: int) -> None:
        self._run, self.width, self._most, self.is_checked = run, width, most, False

    def can_run(self, active: ActiveRequests, proposal: Proposal) -> bool:
        """Say whether these drafts can be verified so: chains, with room for padding behind."""
        fits = int(active.lens.max()) + self.width <= self._most
        return fits and proposal.is_chain and int(proposal.num_drafts.max()) < self.width

    def run(self, batch: Any, plain: Any, active: ActiveRequests, proposal: Proposal) -> Any:
        """Return the host's result with the logits of the proposal's rows, as a pass of rows has.

        batch, plain: the host's decode batch, and the same as its workers take it
        """
        owners, starts = proposal.row_owners, proposal.root_rows
        index = owners * self.width + np.arange(len(owners)) - starts[owners]
        tokens = np.repeat([request.last_token for request in active.requests], self.width)
        tokens[index[proposal.draft_rows]] = proposal.tokens.numpy()
        result = self._launch(batch, plain, active, tokens)
        output = result.logits_output
        output.next_token_logits = output.next_token_logits[to_device(index, batch.device)]
        output.hidden_states = None
        return result

    def agrees(self, batch: Any, plain: Any, active: ActiveRequests) -> bool:
        """Say whether it computes what decode rows compute, up to rounding, and remember that.

        The first request's last token is followed by any others. All of them go to slots that are
        reserved for its next steps.
        """
        one = ActiveRequests(active.requests[:1], active.members[:1], active.lens[:1], ())
        request, member = one.requests[0], int(one.members[0])
        prompt = request.req.origin_input_ids
        others = [int(prompt[i % len(prompt)]) for i in range(self.width - 1)]
        tokens = np.array([request.last_token, *others])
        positions = int(one.lens[0]) + np.arange(self.width)
        owner, position = to_device(np.stack([0 * positions + member, positions]), batch.device)
        pool_indices, slots = batch.req_pool_indices[owner], read_slots(batch, owner, position)
        rows = decode_rows(plain, tokens.tolist(), pool_indices, positions.tolist(), slots)
        rows.reqs, rows.sampling_info = [plain.reqs[member]] * self.width, None
        usual = self._run(rows).logits_output
        padded = self._launch(batch, plain, one, tokens).logits_output
        self.is_checked = _agree(usual.next_token_logits, padded.next_token_logits)
        return self.is_checked

    def _launch(self, batch: Any, plain: Any, active: ActiveRequests, tokens: Ints) -> Any:
        """Launch a pass of `width` tokens for each request. tokens: [R * width]"""
        lens, members = active.lens, active.members
        told = np.empty((4, len(tokens)), np.int64)
        told[0], told[1] = tokens, np.repeat(members, self.width)
        told[2] = np.repeat(lens, self.width)
        told[3] = told[2] + np.tile(np.arange(self.width), len(lens))
        ids, owner, cached, position = to_device(told, batch.device)
        owner_of, seq_lens = owner[:: self.width], cached[:: self.width]
        forward = changed(
            plain,
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=ids,
            req_pool_indices=batch.req_pool_indices[owner_of],
            seq_lens=seq_lens.to(batch.seq_lens.dtype),
            seq_lens_cpu=torch.from_numpy(lens).to(batch.seq_lens_cpu.dtype),
            seq_lens_sum=int(lens.sum()),
            orig_seq_lens=seq_lens.to(batch.orig_seq_lens.dtype),
            out_cache_loc=read_slots(batch, owner, position),
            spec_info=DFlashVerifyInput(
                draft_token=ids,
                positions=position,
                draft_token_num=self.width,
                capture_hidden_mode=CaptureHiddenMode.NULL,
            ),
            reqs=[plain.reqs[member] for member in members.tolist()],
            sampling_info=None,  # SGLang would change the grammars in it
        )
        return self._run(forward)


def _agree(rows: Tensor, padded: Tensor) -> bool:
    """Say whether the logits of two passes over the same tokens differ by rounding only."""
    rows, padded = rows.float(), padded.float()
    spread = (rows.amax(-1) - rows.mean(-1)).clamp(min=1e-6)
    apart = (rows - padded).abs().amax(-1) / spread
    return bool((apart <= TOLERANCE).all())  # NaN is far from anything
