"""What a batch of SGLang's carries from one step to the next, as its `spec_info`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from outrider.core import Ints
from outrider.engines.sglang.slots import Slots
from outrider.serving.values import Knows, Launched


class Carried(SpecInput):
    """What a batch of SGLang's carries from one step to the next.

    slots: gives the batch its slots
    new_seq_lens, lens_cpu: [B] what is cached after the step, on the device and the CPU. The CPU's
        are the longest that there may be if only the device knows.
    knows: which side knows them, and each request's last token
    verify_done: when `new_seq_lens` can be read
    launched: the step
    room: [B] for how many tokens each request of the batch that was prepared last has slots; None
        if each has slots for any step
    main: the scheduler's own stream
    future_indices: set by the scheduler; the values are in buffers of the worker's
    """

    future_indices: Any = None
    main: Any = None
    room: Ints | None = None
    launched: Launched | None = None
    # what SGLang's own algorithms carry: it looks for these
    bonus_tokens: Any = None
    topk_p: Any = None
    topk_index: Any = None
    hidden_states: Any = None
    dsa_topk_indices: Any = None

    def __init__(
        self,
        slots: Slots,
        new_seq_lens: Tensor,
        lens_cpu: Tensor,
        knows: Knows = Knows.BOTH,
        verify_done: Any = None,
    ) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.slots, self.knows, self.verify_done = slots, knows, verify_done
        self.new_seq_lens, self.lens_cpu = new_seq_lens, lens_cpu

    def note_launched(self, launched: Launched) -> None:
        """Note which step this is carried from."""
        self.launched = launched

    def note_accepted(self, new_seq_lens: Tensor, verify_done: Any) -> None:
        """Take over the lengths that the device computes.

        verify_done: when they can be read
        """
        self.new_seq_lens, self.verify_done = new_seq_lens, verify_done

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        """Return what a batch's number of tokens is multiplied by: nothing."""
        return 1, 1

    def filter_batch(self, new_indices: Tensor, *_: Any, **__: Any) -> None:
        """Do nothing: there is nothing for single requests here."""

    def merge_batch(self, other: Carried) -> None:
        """Take in the requests of another batch."""
        if other.knows is not self.knows:
            is_known = Knows.CPU not in (self.knows, other.knows)
            self.knows = Knows.DEVICE if is_known else Knows.CPU
        self.verify_done = self.verify_done or other.verify_done

    def prepare_for_decode(self, batch: Any) -> None:
        """Give the batch its slots, for the step in flight and for this one: see `slots`."""
        self.main = torch.get_device_module(batch.device).current_stream()
        self.room = self.slots.take(batch)
        for req in batch.reqs:
            req.decode_batch_idx += 1
