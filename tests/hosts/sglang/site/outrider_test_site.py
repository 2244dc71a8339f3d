"""What the servers under test import: a custom logit processor, and drafters that misbehave."""

from __future__ import annotations

import itertools
import os
import time

import torch

from outrider.core import Proposal, chain
from outrider.drafters import NgramDrafter


def no_repeat_processor() -> str:
    """Return, as SGLang wants it, a processor that looks at the request's output so far."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class NoRepeat(CustomLogitProcessor):
        """Forbids each of the last tokens to come again: its answer depends on every draft."""

        def __call__(self, logits, custom_param_list=None):
            for row, params in enumerate(custom_param_list):
                recent = params["__req__"].output_ids[-params["window"] :]
                logits[row, recent] = -float("inf")
            return logits

    return NoRepeat.to_str()


class Wrong(NgramDrafter):
    """Drafts tokens that are almost never right, as many as it may."""

    name = "wrong"

    def propose(self, requests, budget):
        return Proposal.of(
            [
                chain([(r.last_token + 7) % 256] * k)
                for r, k in zip(requests, budget.max_drafts, strict=True)
            ]
        )


class Raising(NgramDrafter):
    """Raises in every second proposal."""

    name, calls = "raising", 0

    def propose(self, requests, budget):
        self.calls += 1
        if self.calls % 2:
            raise RuntimeError("no idea")
        return super().propose(requests, budget)


class Hanging(NgramDrafter):
    """Hangs for 5 seconds in its third proposal."""

    name, calls = "hanging", 0

    def propose(self, requests, budget):
        self.calls += 1
        if self.calls == 3:
            time.sleep(5)
        return super().propose(requests, budget)


class OutOfRange(NgramDrafter):
    """Drafts ids that no vocabulary has."""

    name = "out_of_range"

    def propose(self, requests, budget):
        return Proposal.of([chain([10**9] * k) for k in budget.max_drafts])


class Floats(NgramDrafter):
    """Returns something that is not token ids at all."""

    name = "floats"

    def propose(self, requests, budget):
        proposal = Proposal.of([chain([1] * k) for k in budget.max_drafts])
        object.__setattr__(proposal, "tokens", proposal.tokens.float() * torch.nan)
        return proposal


def register_faults():
    """Break the draft model's forward pass as $OUTRIDER_TEST_FAULT says: "oom" or "nan"."""
    fault = os.environ.get("OUTRIDER_TEST_FAULT")
    if not fault:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    calls = itertools.count()

    def forward(original, self, batch):
        call = next(calls)
        logits = original(self, batch)
        if call % 7 == 3 and fault == "oom":
            raise torch.OutOfMemoryError("no room for the draft model")
        if call % 7 == 3 and fault == "nan":
            logits.fill_(torch.nan)
        return logits

    target = "outrider.hosts.sglang.draft_model.SglangDraftModel._forward"
    HookRegistry.register(target, forward, HookType.AROUND)
