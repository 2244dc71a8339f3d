"""The smallest engine for the plain loop: no cache, so every row's whole text is computed again.

    python examples/plain_engine.py        # in a checkout, with torch and transformers installed

It is slow and correct, so compare a better one with it. See docs/writing-an-engine.md.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider.core import Budget, KeyedCoins, Outcomes, Proposal, Request, step

TINY = "src/outrider/assets/tiny/target"
STORY = "On a misty morning, an outrider rode out of Harrow. The outrider of Dale was Ada, and"


class Recompute:
    """Reads a row's whole path, for every row."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def forward(self, requests: list[Request], proposal: Proposal) -> torch.Tensor:
        """Return what the target says after each row, [N, V]."""
        rows = []
        for owner, path in zip(proposal.row_owners, proposal.paths(), strict=True):
            ids = [*requests[owner].tokens_from(0), *path]
            rows.append(self._model(torch.tensor([ids])).logits[0, -1])
        return torch.stack(rows)

    def commit(self, outcomes: Outcomes) -> None:
        """Keep nothing: there is no cache."""


def write(
    host: Recompute, prompt: list[int], max_drafts: int, **sampling: Any
) -> tuple[list[int], int]:
    """Return an answer, and how many passes it took."""
    request = Request(0, tuple(prompt), outrider.SamplingParams(**sampling), seed=1)
    drafter = outrider.SuffixDrafter()
    drafter.start([request])
    passes = 0
    while not request.finish_reason:
        room = min(max_drafts, request.remaining - 1)
        done = step(host, drafter, [request], Budget((room,), "match", KeyedCoins()))
        host.commit(done.outcomes)
        drafter.observe(done.outcomes)
        for outcome in done.outcomes:
            outcome.apply()  # the request grows here, and nowhere else
        passes += 1
    drafter.stop([request])
    return request.output, passes


def main() -> None:
    """Answer a prompt with and without drafts, greedy and sampled: the tokens are the same."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    host = Recompute(AutoModelForCausalLM.from_pretrained(TINY).eval())
    prompt = tokenizer.encode(f"{STORY} Ada had a brown mare. {STORY}")
    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}):
        plain, slow = write(host, prompt, 0, max_tokens=40, **sampling)
        fast, passes = write(host, prompt, 6, max_tokens=40, **sampling)
        assert fast == plain
        print(f"{len(plain)} tokens: {slow} passes without drafts, {passes} with")


if __name__ == "__main__":
    main()
