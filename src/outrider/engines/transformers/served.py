"""Serving over Transformers in this process: requests come and go, and steps overlap.

A pass is computed when it is launched, and its result is read one step later, as far as the served
step does not ask for it before: decisions are those of a server. There are no stop strings without
a tokenizer, and no logprobs: `generate` has these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core import (
    FinishReason,
    Outcomes,
    Proposal,
    Request,
    Rows,
    SamplingParams,
    Unsupported,
    target_distribution,
)
from outrider.engines.in_process import InProcessRequest
from outrider.engines.schedule import Scheduler
from outrider.engines.transformers.host import TransformersHost
from outrider.engines.transformers.requests import SamplingLike, make_requests
from outrider.kernels.sample_match import DeviceCoins
from outrider.serving.profile import Profile

MAX_LENGTH = 1 << 14
"""The longest text that is drafted for on the device, in tokens."""


@dataclass(frozen=True)
class Arrival:
    """A request that joins a server.

    prompt: token ids
    turn: after how many turns of the server it joins; one turn launches one pass
    sampling: as in `generate`
    drafter: the name of its drafter; None for the server's
    """

    prompt: Sequence[int]
    turn: int = 0
    sampling: SamplingLike = None
    drafter: str | None = None


@dataclass(frozen=True)
class Answer:
    """What a request was answered. ended: the turn in which the server knew that it had ended"""

    output: list[int]
    finish_reason: FinishReason | None
    ended: int


class TransformersDevice:
    """Runs the passes of a Transformers model: see `in_process.Device`."""

    def __init__(self, model: PreTrainedModel, coins: DeviceCoins) -> None:
        self._host, self._coins = TransformersHost(model), coins
        self.runner = self._host.runner
        self.vocab_size: int = self.runner.vocab_size
        if self.runner.recompute_limit is not None:
            raise Unsupported(
                f"{type(model).__name__}, which reads its text again at "
                f"{self.runner.recompute_limit} tokens",
                fix="use generate, which runs such requests with fewer drafts",
            )

    def prefill(self, reqs: Sequence[InProcessRequest]) -> tuple[Tensor, float]:
        """Read prompts. Return the token after each."""
        return self._emitted([req.on_device for req in reqs], Proposal.empty(len(reqs)))

    def decode(
        self, reqs: Sequence[InProcessRequest], proposal: Proposal, informed: bool
    ) -> tuple[Tensor, float]:
        """Run a decode pass. Return what is emitted after each row."""
        return self._emitted([req.on_device for req in reqs], proposal)

    @torch.inference_mode()
    def _emitted(self, requests: Sequence[Request], proposal: Proposal) -> tuple[Tensor, float]:
        logits = self._host.forward(requests, proposal)
        rows = Rows.of(requests, proposal)
        return target_distribution(logits, rows).draw(self._coins).cpu(), 0.0

    def commit(self, outcomes: Outcomes) -> None:
        """Keep the cache entries of the rows that were kept, and drop the others."""
        self._host.commit(outcomes)

    def release(self, reqs: Sequence[InProcessRequest]) -> None:
        """Give the slots of requests back."""
        self._host.release([req.on_device for req in reqs])

    def wait(self, ready: float) -> None:
        """Return at once: the pass was computed when it was launched."""

    def note_read(self, num_requests: int) -> None:
        """Do nothing: settling takes the time that it takes."""


class TransformersServer(Scheduler):
    """Serves a model. What control has learned from requests serves those that come later.

    model: as in `generate`
    drafter: of requests that name none: "adaptive", "suffix", "ngram", "device" or "none"
    max_drafts: the most draft tokens for a request in one step
    max_requests: that may run at once
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        drafter: str = "adaptive",
        max_drafts: int = 8,
        max_requests: int = 16,
    ) -> None:
        coins = DeviceCoins()
        device = TransformersDevice(model, coins)
        self._runner, self._drafter, self._max_drafts = device.runner, drafter, max_drafts
        self._submitted = 0
        super().__init__(
            device,
            Profile(drafter=drafter, max_drafts=max_drafts),
            max_requests=max_requests,
            max_length=min(device.runner.max_length, MAX_LENGTH),
            coins=coins,
            trees=True,
        )

    def serve(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        """Serve requests that join at different times. Return their answers in the same order."""
        requests = [self._request(arrival) for arrival in arrivals]
        coming = sorted(range(len(arrivals)), key=lambda i: arrivals[i].turn)
        ended: dict[int, int] = {}
        turn = 0
        while coming or not self.is_idle:
            while coming and arrivals[coming[0]].turn <= turn:
                self.submit([requests[coming.pop(0)]])
            turn += 1
            ended |= {req.id: turn for req in self.turn()}
        return [Answer(req.output, req.finish_reason, ended[req.id]) for req in requests]

    def _request(self, arrival: Arrival) -> InProcessRequest:
        made = make_requests(self._runner, [arrival.prompt], arrival.sampling, None)[0]
        self._submitted += 1
        return InProcessRequest(
            id=self._submitted,
            prompt=made.prompt,
            sampling=_plain(made.sampling),
            seed=made.seed,
            eos_token_ids=made.eos_token_ids,
            drafter=arrival.drafter or self._drafter,
            max_drafts=self._max_drafts,
        )


def _plain(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters. Raises Unsupported for what is not served here."""
    if sampling.logprobs is not None:
        raise Unsupported("logprobs in an in-process server", fix="use generate")
    return sampling
