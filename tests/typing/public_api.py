"""What mypy accepts of the public API, and what it refuses: an ignore that is not needed fails."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

import outrider
from outrider.core import Budget, Outcome, Request


class Nothing:
    """A drafter of one's own."""

    name = "nothing"

    def start(self, requests: Sequence[Request]) -> None: ...

    def propose(self, requests: Sequence[Request], budget: Budget) -> outrider.Proposal:
        return outrider.Proposal.of([outrider.chain([]) for _ in requests])

    def observe(self, outcomes: Sequence[Outcome]) -> None: ...

    def stop(self, requests: Sequence[Request]) -> None: ...


def accepted(model: PreTrainedModel, draft: PreTrainedModel, ids: Tensor) -> list[list[int]]:
    own: outrider.Drafter = Nothing()
    done: outrider.Generation = outrider.generate(
        model, [1, 2], drafter=own, max_drafts=3, rule="match", exactness="bitwise"
    )
    outrider.generate(model, ids, drafter=outrider.adaptive(model, draft), draft_timeout=0.5)
    outrider.generate(model, [[1], [2]], drafter=None, sampling=[None, {"max_tokens": 3}])
    outrider.generate(model, [[1]], drafter=outrider.SuffixDrafter(width=4), tokenizer=object())
    params = outrider.SamplingParams(temperature=0.7, stop="x", stop_token_ids=(2,))
    run: outrider.Stream = outrider.stream(model, [1], drafter="suffix", sampling=params)
    for event in run:
        done.outputs.append(list(event.indices))
    outrider.generate(model, [1], drafter=outrider.quantized_copy(draft, 8))
    return done.outputs


def refused(model: PreTrainedModel) -> None:
    outrider.generate(model, [1], max_draft=3)  # type: ignore[call-arg]
    outrider.stream(model, [1], max_draft=3)  # type: ignore[call-arg]
    outrider.adaptive(model, tracing="x")  # type: ignore[call-arg]
    outrider.generate(model, [1], max_drafts="3")  # type: ignore[arg-type]
    outrider.generate(model, [1], exactness="bitwize")  # type: ignore[arg-type]
    outrider.generate(model, [1], rule="greedy")  # type: ignore[arg-type]
    outrider.generate(model, [1], sampling="greedy")  # type: ignore[arg-type]
    outrider.generate(model, "a text")  # type: ignore[arg-type]
    outrider.quantized_copy(model, 3)  # type: ignore[arg-type]
    outrider.SamplingParams(temprature=0.7)  # type: ignore[call-arg]
    outrider.SuffixDrafter(max_matches=3)  # type: ignore[call-arg]
