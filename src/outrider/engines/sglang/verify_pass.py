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
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor

from outrider.core import Ints, Proposal
from outrider.engines.sglang.batches import SglangBatch, copied_rows, forward_batch
from outrider.serving.device import to_device
from outrider.serving.values import Members

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

    def can_run(self, members: Members, proposal: Proposal) -> bool:
        """Say whether these drafts can be verified so: chains, with room for padding behind."""
        fits = int(members.lens.max()) + self.width <= self._most
        return fits and proposal.is_chain and int(proposal.num_drafts.max()) < self.width

    def run(self, own: SglangBatch, members: Members, proposal: Proposal) -> Any:
        """Return SGLang's result with the logits of the proposal's rows, as a pass of rows has."""
        owners, starts = proposal.row_owners, proposal.root_rows
        rows = owners * self.width + np.arange(len(owners)) - starts[owners]
        tokens = np.repeat([request.last_token for request in members.requests], self.width)
        tokens[rows[proposal.draft_rows]] = proposal.tokens.numpy()
        result = self._launch(own, members, tokens)
        output = result.logits_output
        output.next_token_logits = output.next_token_logits[to_device(rows, own.index.device)]
        output.hidden_states = None
        return result

    def agrees(self, own: SglangBatch, members: Members) -> bool:
        """Say whether it computes what decode rows compute, up to rounding, and remember that.

        The first request's last token is followed by any others. All of them go to slots that are
        reserved for its next steps.
        """
        one = members.take(np.zeros(1, np.int64))
        request, place = one.requests[0], int(one.places[0])
        prompt = request.req.origin_input_ids
        others = [int(prompt[i % len(prompt)]) for i in range(self.width - 1)]
        tokens = np.array([request.last_token, *others])
        positions = int(one.lens[0]) + np.arange(self.width)
        index = own.index[place].expand(self.width)
        slots = own.slots_at(index, to_device(positions, index.device))
        plain = own.worker_batch
        fields = {"reqs": [plain.reqs[place]] * self.width, "sampling_info": None}
        rows = copied_rows(plain, tokens.tolist(), index, positions.tolist(), slots, **fields)
        usual = self._run(rows).logits_output
        padded = self._launch(own, one, tokens).logits_output
        self.is_checked = _agree(usual.next_token_logits, padded.next_token_logits)
        return self.is_checked

    def _launch(self, own: SglangBatch, members: Members, tokens: Ints) -> Any:
        """Launch a pass of `width` tokens for each request. tokens: [R * width]"""
        lens, places = members.lens, members.places
        packed = np.empty((3, len(tokens)), np.int64)
        packed[0], packed[1] = tokens, np.repeat(places, self.width)
        packed[2] = np.repeat(lens, self.width) + np.tile(np.arange(self.width), len(lens))
        ids, owner, position = to_device(packed, own.index.device)
        index, first = own.index[owner], slice(None, None, self.width)
        forward = forward_batch(
            own.worker_batch,
            ids,
            index[first],
            position[first],
            lens,
            own.slots_at(index, position),
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info=DFlashVerifyInput(
                draft_token=ids,
                positions=position,
                draft_token_num=self.width,
                capture_hidden_mode=CaptureHiddenMode.NULL,
            ),
            reqs=[own.worker_batch.reqs[place] for place in places.tolist()],
            sampling_info=None,  # SGLang would change the grammars in it
        )
        return self._run(forward)


def _agree(rows: Tensor, padded: Tensor) -> bool:
    """Say whether the logits of two passes over the same tokens differ by rounding only."""
    rows, padded = rows.float(), padded.float()
    spread = (rows.amax(-1) - rows.mean(-1)).clamp(min=1e-6)
    apart = (rows - padded).abs().amax(-1) / spread
    return bool((apart <= TOLERANCE).all())  # NaN is far from anything
