"""Recorded answers as requests of the simulated engine, and the draft model that was recorded."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from outrider.core import Proposal, SamplingParams, chain
from outrider.engines.costs import H100_8B_LINE
from outrider.engines.simulated import SimulatedRequest

FILE = Path(__file__).parents[2] / "control" / "traces.json.gz"
KINDS = ("chat", "code", "edit", "json", "prose")
MIXED = "mixed"
VOCABULARY = 151_936

PROFILE = H100_8B_LINE
"""Of tests that compute no table."""


@lru_cache(maxsize=1)
def traces():
    """Return the recorded answers by kind."""
    found = json.loads(gzip.decompress(FILE.read_bytes()))["traces"]
    return {kind: [trace for trace in found if trace["kind"] == kind] for kind in KINDS}


@dataclass(eq=False)
class RecordedRequest(SimulatedRequest):
    """A request whose answer was recorded, with what a draft model said at each token of it.

    said: [tokens] the chain of drafts after each token of the answer, each with its confidence
    """

    said: tuple = ()

    def drafts(self, num_emitted):
        """Return what the draft model says after so many tokens of the answer."""
        return self.said[num_emitted - 1] if num_emitted <= len(self.said) else ()


def request(number, kind, parts, max_tokens, drafter, max_drafts):
    """Return a request: so many recorded texts, their prompts first, then their answers.

    number: other ones begin with other texts; MIXED has all kinds in turn
    """
    turn = number
    if kind == MIXED:
        kind, turn = KINDS[number % len(KINDS)], number // len(KINDS)
    own = traces()[kind]
    chosen = [own[(turn + part) % len(own)] for part in range(parts)]
    # nothing was recorded at the last token of a text
    said = [chain for trace in chosen for chain in (*trace["drafts"], [])]
    answer = [token for trace in chosen for token in trace["output"]]
    return RecordedRequest(
        id=number,
        prompt=tuple(token for trace in chosen for token in trace["prompt"]),
        sampling=SamplingParams(max_tokens=min(max_tokens, len(answer))),
        seed=0,
        drafter=drafter,
        max_drafts=max_drafts,
        answer=answer,
        said=tuple(said),
    )


class RecordedModel:
    """Says what the draft model said. Its passes take time, and prompts are read with the target's.

    It is what a server asks of a draft model, and the drafter that control calls.
    """

    name = "model"
    max_length, max_unread, max_catch_up = 1 << 20, 8, 512
    seconds = waited = 0

    def __init__(self, device) -> None:
        self.device = device
        self.read = {}

    # -- the server's

    def drafter(self, vocab_size, **options):
        return self

    def rename(self, name):
        assert name == self.name

    def prefill(self, batch):
        tokens = sum(req.length for req in batch)
        self.device.queue("draft prefill", tokens, self.device.profile.draft.prefill(tokens))

    def skip(self, batch):
        raise AssertionError("no prompt is too long")

    def run(self, batch):
        return torch.zeros(1, 1)

    # -- the drafter's

    def start(self, requests):
        self.read |= {request.id: request.length - 1 for request in requests}

    def stop(self, requests):
        for request in requests:
            self.read.pop(request.id, None)

    def observe(self, outcomes):
        for outcome in outcomes:
            kept = outcome.request.length + outcome.num_accepted_drafts
            self.read[outcome.request.id] = min(self.read[outcome.request.id], kept)

    def unread(self, request):
        return max(1, request.length - self.read[request.id])

    def ready(self, request):
        return self.unread(request) <= self.max_unread

    def catch_up(self, requests):
        left = self.max_catch_up
        for request in requests:
            count = min(left, request.length - 1 - self.read[request.id])
            self.read[request.id] += count
            left -= count
        tokens = self.max_catch_up - left
        if tokens:
            self.device.queue("draft", tokens, self.device.profile.draft.decode(tokens, 0))
        return tokens

    def propose(self, requests, budget):
        most = budget.max_drafts.tolist()
        said = [request.req.drafts(len(request.output)) for request in requests]
        depth, survival = [0] * len(requests), [1.0] * len(requests)
        least = budget.min_gain / max(1, sum(k > 0 for k in most)) / 2
        while True:
            eager = [
                r
                for r, k in enumerate(most)
                if depth[r] < min(k, len(said[r])) and survival[r] >= least
            ]
            if not eager or sum(survival[r] for r in eager) < budget.min_gain:
                break
            # each reads its last draft, and before that what it has not read
            rows = sum(1 if depth[r] else self.unread(requests[r]) for r in eager)
            context = sum(requests[r].length + depth[r] for r in eager)
            self.device.draft_pass(rows, context, len(requests))
            for r in eager:
                self.read[requests[r].id] = requests[r].length + depth[r]
                confidence = said[r][depth[r]][1]
                chances = budget.chances
                survival[r] *= chances([requests[r]], [confidence])[0] if chances else confidence
                depth[r] += 1
        chosen = [each[:n] for each, n in zip(said, depth, strict=True)]
        return Proposal.of(
            [chain([int(e[0]) for e in own], confidences=[e[1] for e in own]) for own in chosen]
        )
