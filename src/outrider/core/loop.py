"""The loop: propose, forward, verify, settle. Values in, values out.

A *host* runs the target model; a *drafter* proposes. Neither knows the other, and both are small
protocols, so that an engine or a drafter can be added without touching the theory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from outrider.core.coins import Coins, Stream
from outrider.core.proposal import Ints, Proposal
from outrider.core.request import Request
from outrider.core.rules import RuleName, Verdict, verify
from outrider.core.settle import Outcome, Outcomes, settle
from outrider.core.target import Rows, target_distribution

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Budget:
    """How much a drafter may propose in this step, and with which coins.

    max_drafts: [B] int64 the most drafts for each request, 0 included; any sequence will do
    rule: that will judge them. `match` has no use for the distribution of the drafts; a drafter
          that draws at random does best by guessing with the target's own coins, and calls its
          drafts a PointMass. The other rules want Sampled or Siblings, drawn with coins of their
          own.
    coins: to draw drafts with
    trees: whether drafts may branch: not every host can verify that
    min_gain: what one more pass must promise a drafter that pays by the pass: so many accepted
          drafts, of all requests together
    chances: of drafts to be accepted, given their requests and how sure the drafter is of each;
          without it a drafter has to believe itself
    """

    max_drafts: Ints
    rule: RuleName
    coins: Coins
    trees: bool = True
    min_gain: float = 0.0
    chances: Callable[[Sequence[Request], Sequence[float]], Sequence[float]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_drafts", np.asarray(self.max_drafts, np.int64))

    def draft_seeds(self, seeds: Tensor, starts: Tensor) -> Tensor:
        """Return the seeds to draw drafts with, [N], for blocks that start at these positions."""
        stream = Stream.TARGET if self.rule == "match" else Stream.DRAFT
        return self.coins.fork(seeds, stream, starts)


class Drafter(Protocol):
    """Proposes tokens. Whatever it does wrong costs speed only.

    A host calls `start` when a request begins and `stop` when it ends. In between, each step calls
    `propose` and then `observe`, for any part of the running requests; `observe` comes before the
    requests are extended. Keep what you know of a request by its `id`.

    *Deferred work.* A drafter may have one more method, `meanwhile()`. A host that can calls it
    while the target's pass runs: `observe` may leave work there that the next proposal does not
    need, and must not rely on the call.

    *Hidden states* (EAGLE, MTP). A drafter may have one more attribute, `hidden_layers`: the layers
    of the target whose output it reads. 0 is the embedding, i the output of layer i; the last
    layer's is what the head reads, after the final norm. `observe` then finds the states of the
    rows that were kept in `Outcome.hidden`; those of the prompt come with the first step. States
    may be missing: the SGLang host gives none (its heads find them in slots), a cached prefix has
    none, and after a fault a drafter is given its requests again. It then proposes nothing, or
    drafts without them.
    """

    name: str

    def start(self, requests: Sequence[Request]) -> None:
        """Get to know new requests, whose prompts the target has read."""
        ...

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Propose for each request at most its budget of drafts: none is fine."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what became of the proposal, and what was emitted."""
        ...

    def stop(self, requests: Sequence[Request]) -> None:
        """Forget requests, finished or abandoned."""
        ...


class Host(Protocol):
    """Runs the target model and owns its cache."""

    def forward(self, requests: Sequence[Request], proposal: Proposal) -> Tensor:
        """Run the target once over all rows of the proposal. Return their logits, [N, V].

        Nothing is kept before `commit`: a step may be repeated without its drafts.
        """
        ...

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the cache entries of the rows that were kept, and drop the others.

        To be called before the requests are extended.
        """
        ...


@dataclass(frozen=True)
class Step:
    """All that one step computed, for whoever wants to look: `explain`, logprobs, tests.

    withdrawn: whether there were drafts that could not be verified: see `step`
    """

    proposal: Proposal[Any]
    logits: Tensor
    verdict: Verdict
    outcomes: Outcomes
    withdrawn: bool = False


def step(host: Host, drafter: Drafter, requests: Sequence[Request], budget: Budget) -> Step:
    """Advance every request by at least one token, as plain decoding would.

    What fails with drafts may work without: a request's own functions may raise on a text that
    plain decoding never has, or the model may compute NaN for it. So a step that fails is repeated
    without drafts, and only then is its error one of plain decoding.
    """
    proposal = drafter.propose(requests, budget)
    try:
        return _verified(host, requests, proposal, budget)
    except Exception as error:
        if not proposal.num_drafts.any():
            raise
        logger.warning("drafts of %s cannot be verified: %s", drafter.name, error)
    done = _verified(host, requests, Proposal.empty(len(requests)), budget)
    return replace(done, withdrawn=True)


def _verified(host: Host, requests: Sequence[Request], proposal: Proposal, budget: Budget) -> Step:
    logits = host.forward(requests, proposal)
    proposal = proposal.to(logits.device)
    p = target_distribution(logits, Rows.of(requests, proposal))
    verdict = verify(budget.rule, p, proposal, budget.coins)
    outcomes = settle(requests, proposal, verdict)
    roots = np.repeat(proposal.root_rows, outcomes.num_tokens)
    p.check((roots + outcomes.rows).tolist())
    return Step(proposal, logits, verdict, outcomes)
