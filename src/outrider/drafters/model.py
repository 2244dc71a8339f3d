"""A smaller model drafts, all requests side by side, each as far as it is confident.

At temperature > 0 the drafter draws with the target's own coins (rule `match`): where the two
distributions agree, the same noise picks the same token.

A pass that drafts one token knows the next best too. As *siblings* these cost rows of the target's
pass, which are often free, and no pass of the draft model: the tree is one long chain with leaves.
A model that can branch drafts whole trees instead: see `trees`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Draft,
    DraftFault,
    Outcome,
    Proposal,
    Request,
    Rows,
    Sampled,
    TargetDistribution,
    chain,
    target_distribution,
    transformed,
)
from outrider.drafters.options import check_number, check_whole
from outrider.drafters.trees import CachedLength, TreeDrafting, fit_vocabulary
from outrider.drafters.unrolled import Copied, Unrolled

S = TypeVar("S", bound=CachedLength)


class DraftModel(Protocol[S]):
    """A causal language model with a cache, as a host provides it. S: its handle of a sequence.

    vocab_size: it reads ids below this
    max_length: the longest sequence it can read
    max_unread: the most tokens of a sequence that `extend` should be given at once
    max_catch_up: the most tokens, of all sequences together, that `catch_up` should be given
    """

    vocab_size: int
    max_length: int
    max_unread: int
    max_catch_up: int

    def open(self, request: Request) -> S:
        """Return the request's sequence. Some of its tokens may be cached already."""
        ...

    def extend(self, segments: Sequence[tuple[S, Sequence[int]]]) -> Tensor:
        """Append tokens to sequences. Return the logits after the last token of each, [B, V]."""
        ...

    def catch_up(self, segments: Sequence[tuple[S, Sequence[int]]]) -> None:
        """Append tokens to sequences. Nobody draws from their logits."""
        ...

    def truncate(self, sequence: S, length: int) -> None:
        """Forget the tokens beyond this length."""
        ...

    def close(self, sequence: S) -> None:
        """Give a sequence's cache back. A host that keeps it may return it to `open` later."""
        ...


@dataclass
class DraftState(Generic[S]):
    """One request's sequence in the draft model, and what was drafted.

    most: so many drafts may there be
    probs: what each draft was drawn from, [V]; none with the rule `match`
    survival: the chance that all drafts are accepted, as far as is known
    siblings: (chance to be reached and accepted, depth, token, confidence)
    """

    sequence: S
    most: int = 0
    drafts: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    survival: float = 1.0
    siblings: list[tuple[float, int, int, float]] = field(default_factory=list)

    def begin(self, most: int) -> None:
        """Forget what was drafted, and set how many drafts there may be."""
        self.drafts, self.probs, self.confidences, self.siblings = [], [], [], []
        self.survival, self.most = 1.0, most

    def wants_more(self, least: float, unseen: int = 0) -> bool:
        """Say whether there should be one more draft.

        least: the chance that all drafts before it must have
        unseen: drafts that nothing is known of yet
        """
        return len(self.drafts) + unseen < self.most and self.survival >= least


class ModelDrafter(Generic[S]):
    """Drafts with a smaller model of the same tokenizer.

    model: runs it
    vocab_size: the target's logits; what the draft model has beyond it is padding
    min_survival: a request stops drafting when the probability that all its drafts so far are
        accepted, by the draft model's own estimate, falls below this
    siblings: how many of the next best tokens to offer beside each draft, where the host verifies
        trees, the rule is `match`, and the budget has room
    width: how many drafts a pass reads for a request, and how many tokens may follow each: then a
        tree is drafted where the host verifies trees and the rule is `match`. The model must be
        able to branch.

    A request with many unread tokens (after a fault, after steps without the model, or because its
    prompt was not read) is *caught up* first: each step reads a bounded number of them, and it has
    no drafts until few are left.

    seconds: time of the draft model's passes so far, from the launch until the drafts were read
    waited: requests that had no drafts in a step because they were being caught up, counted
        once a step
    """

    name = "model"

    def __init__(
        self,
        model: DraftModel[S],
        vocab_size: int,
        min_survival: float = 0.6,
        siblings: int = 0,
        width: int = 0,
    ) -> None:
        min_survival = check_number("min_survival", min_survival, 0, 1)
        siblings = check_whole("siblings", siblings, 0)
        width = check_whole("width", width, 0)
        self._trees: TreeDrafting[S] | None = None
        if width:
            branching: Any = model
            if not hasattr(model, "fork"):
                raise ValueError("width: this draft model cannot branch; use siblings")
            self._trees = TreeDrafting(branching, vocab_size, width)
        self._model = model
        self._vocab_size = vocab_size
        self._min_survival = min_survival
        self._siblings = siblings
        self._states: dict[int, DraftState[S]] = {}
        self.seconds = 0.0
        self.waited = 0

    def rename(self, name: str) -> None:
        """Take another name: two drafters side by side need different ones."""
        self.name = name

    def start(self, requests: Sequence[Request]) -> None:
        """Open a sequence for each request; what is not cached is read with the first proposals."""
        for request in requests:
            state = self._states[request.id] = DraftState(self._model.open(request))
            # drafting goes on from the logits of the last token, so it is always read anew
            self._model.truncate(state.sequence, request.length - 1)

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Draft token by token, one pass of the draft model for all requests that still want one.

        The first pass also reads the few tokens that the draft model has not seen yet. Requests
        with more of them are caught up before it.
        """
        self.catch_up([r for r, k in zip(requests, budget.max_drafts, strict=True) if k])
        ready = np.array([self.ready(request) for request in requests], np.bool_)
        budget = replace(budget, max_drafts=np.where(ready, budget.max_drafts, 0))
        for request, most in zip(requests, budget.max_drafts.tolist(), strict=True):
            self._states[request.id].begin(min(most, self._model.max_length - request.length + 1))
        if self._trees is not None and budget.trees and budget.rule == "match":
            sequences = [(request, self._states[request.id].sequence) for request in requests]
            started = time.perf_counter()
            proposal = self._trees.propose(sequences, budget, self._least(budget))
            self.seconds += time.perf_counter() - started
            return proposal
        started = time.perf_counter()
        if self._can_unroll(requests, budget):
            self._unroll(requests, budget)
        else:
            while eager := self._eager(requests, budget):
                self._draw(eager, budget)
        self.seconds += time.perf_counter() - started
        return Proposal.of(
            [
                self._draft(self._states[request.id], most, budget)
                for request, most in zip(requests, budget.max_drafts.tolist(), strict=True)
            ]
        )

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Forget what was drafted in vain."""
        for outcome in outcomes:
            state = self._states[outcome.request.id]
            # the last token is always read anew: drafting goes on from its logits. Drafts that were
            # not verified may reach up to it.
            pairs = zip(state.drafts, outcome.tokens[:-1], strict=False)
            right = outcome.request.length + len(list(takewhile(lambda p: p[0] == p[1], pairs)))
            if state.sequence.length > right:
                self._model.truncate(state.sequence, right)

    def unread(self, request: Request) -> int:
        """Return how many tokens of a request the next pass will read: the last one at least."""
        return max(1, request.length - self._states[request.id].sequence.length)

    def ready(self, request: Request) -> bool:
        """Say whether the next pass can draft for a request: only few of its tokens are unread."""
        return self.unread(request) <= self._model.max_unread

    def catch_up(self, requests: Sequence[Request]) -> int:
        """Read some of the unread tokens of those requests that are not ready, in one pass.

        The first of them are served first: they have drafts again the soonest. Returns how many
        tokens were read. Nobody waits for the pass.
        """
        segments: list[tuple[S, list[int]]] = []
        left = self._model.max_catch_up
        most = self._model.max_length
        behind = [r for r in requests if r.length <= most and not self.ready(r)]
        for request in behind:
            if not left:
                break
            sequence = self._states[request.id].sequence
            tokens = request.tokens_from(sequence.length)[:-1][:left]
            if max(tokens) < self._model.vocab_size:
                segments.append((sequence, tokens))
                left -= len(tokens)
        if segments:
            self._model.catch_up(segments)
        self.waited += sum(not self.ready(request) for request in behind)
        return self._model.max_catch_up - left

    def stop(self, requests: Sequence[Request]) -> None:
        """Give the requests' sequences back, without what was drafted and not verified."""
        if self._trees is not None:
            self._trees.forget(requests)
        for request in requests:
            if state := self._states.pop(request.id, None):
                self._model.truncate(state.sequence, request.length)
                self._model.close(state.sequence)

    def _eager(
        self, requests: Sequence[Request], budget: Budget
    ) -> list[tuple[Request, DraftState[S]]]:
        """Return the requests that may and want to draft one more token: none if too few do."""
        states, least = [(r, self._states[r.id]) for r in requests], self._least(budget)
        eager = [
            (request, state)
            for request, state in states
            if state.wants_more(least)
            and max(self._unread(request, state)) < self._model.vocab_size
        ]
        return eager if sum(state.survival for _, state in eager) >= budget.min_gain else []

    def _least(self, budget: Budget) -> float:
        """Return the chance that a draft must have to be read."""
        # one that promises less than half its share of a pass only makes the pass longer
        share = budget.min_gain / max(1, int(np.count_nonzero(budget.max_drafts)))
        return max(self._min_survival, float(share) / 2)

    def _unread(self, request: Request, state: DraftState[S]) -> list[int]:
        """Return the tokens that the draft model has not cached."""
        cached = state.sequence.length
        return [*request.tokens_from(cached), *state.drafts[max(0, cached - request.length) :]]

    def _draw(self, eager: Sequence[tuple[Request, DraftState[S]]], budget: Budget) -> None:
        """Draw one more draft for each request, as the target would from the model's logits."""
        guess = self._guess(eager, _rows(eager), budget)
        tokens, claims = self._ranked(guess, budget)
        probs = None if budget.rule == "match" else guess.probs()
        # all that was launched only: here the host waits for the pass
        self._take(eager, (tokens.tolist(), claims.tolist()), budget)
        if probs is not None:
            for (_, state), own in zip(eager, probs, strict=True):
                state.probs.append(own)

    def _can_unroll(self, requests: Sequence[Request], budget: Budget) -> bool:
        """Say whether drafts can stay on the device: the model can, and nobody looks at them."""
        return (
            hasattr(self._model, "unroll")
            and budget.rule == "match"
            and self._vocab_size <= self._model.vocab_size
            and not any(request.sampling.looks_back for request in requests)
        )

    def _unroll(self, requests: Sequence[Request], budget: Budget) -> None:
        """Draft, launching each pass before the drafts of the one before it are read."""
        if not (eager := self._eager(requests, budget)):
            return
        model: Any = self._model
        least, rows = self._least(budget), _rows(eager)
        guess = self._guess(eager, rows, budget)
        unrolled: Unrolled | None = None
        tokens, claims = self._ranked(guess, budget)
        copied = Copied(tokens, claims)
        while self._pays(eager, budget.min_gain, least):
            if unrolled is None:
                limits = [state.most - 1 for _, state in eager]  # the last draft is not read
                unrolled = model.unroll([state.sequence for _, state in eager], limits)
            logits = fit_vocabulary(unrolled.read(tokens[:, 0]), self._vocab_size)
            guess = guess.after(transformed(logits, rows))
            tokens, claims = self._ranked(guess, budget)
            before, copied = copied, Copied(tokens, claims)
            self._take(eager, before.read(), budget, least)
        self._take(eager, copied.read(), budget, least)

    @staticmethod
    def _pays(
        eager: Sequence[tuple[Request, DraftState[S]]], min_gain: float, least: float
    ) -> bool:
        """Say whether one more pass is worth it, while nothing is known of the last drafts."""
        promise = [s.survival for _, s in eager if s.wants_more(least, unseen=1)]
        return bool(promise) and sum(promise) >= min_gain

    def _guess(
        self, eager: Sequence[tuple[Request, DraftState[S]]], rows: Rows, budget: Budget
    ) -> TargetDistribution:
        """Launch a pass over what is unread. Return what the target's distribution may be after it.

        Its seeds are those to draw drafts with.
        """
        logits = self._model.extend([(s.sequence, self._unread(r, s)) for r, s in eager])
        guess = target_distribution(fit_vocabulary(logits, self._vocab_size), rows)
        starts = torch.tensor([request.position for request, _ in eager], device=guess.seeds.device)
        return replace(guess, seeds=budget.draft_seeds(guess.seeds, starts))

    def _ranked(self, guess: TargetDistribution, budget: Budget) -> tuple[Tensor, Tensor]:
        """Return the draft of each request and its siblings, and how likely each is, [B, count]."""
        count = 1 + self._siblings if budget.trees and budget.rule == "match" else 1
        tokens = guess.ranked(budget.coins, count)
        return tokens, guess.logits.softmax(-1).gather(-1, tokens)

    def _take(
        self,
        eager: Sequence[tuple[Request, DraftState[S]]],
        ranked: tuple[list[list[int]], list[list[float]]],
        budget: Budget,
        least: float = 0.0,
    ) -> None:
        """Give each request that wants one its next draft, and siblings of it.

        ranked: what `_ranked` returned
        """
        drawn, claims = ranked
        rows = [i for i, (_, state) in enumerate(eager) if state.wants_more(least)]
        confident = [claims[i][0] for i in rows]
        if any(math.isnan(probability) for probability in confident):
            raise DraftFault("the draft model's logits are not numbers")
        requests = [eager[i][0] for i in rows]
        chances = confident if budget.chances is None else budget.chances(requests, confident)
        for i, chance in zip(rows, chances, strict=True):
            (_, state), tokens, sure = eager[i], drawn[i], claims[i]
            for token, claim in zip(tokens[1:], sure[1:], strict=True):
                if claim > 0.0:  # else there is no other token
                    reached = state.survival * claim
                    state.siblings.append((reached, len(state.drafts), token, min(1.0, claim)))
            state.drafts.append(tokens[0])
            state.confidences.append(min(1.0, sure[0]))
            state.survival *= chance

    def _draft(self, state: DraftState[S], most: int, budget: Budget) -> Draft[Any]:
        if budget.rule != "match" and state.drafts:
            q = Sampled(torch.stack(state.probs))
            return chain(state.drafts, q, confidences=state.confidences)
        drafts = chain(state.drafts, confidences=state.confidences)
        best = sorted(state.siblings, reverse=True)[: most - len(state.drafts)]
        return Draft(
            tokens=(*drafts.tokens, *(token for _, _, token, _ in best)),
            parents=(*drafts.parents, *(depth - 1 for _, depth, _, _ in best)),
            distribution=drafts.distribution,
            confidences=(*drafts.confidences, *(chance for _, _, _, chance in best)),
        )


def _rows(eager: Sequence[tuple[Request, DraftState[Any]]]) -> Rows:
    """Return where the next draft of each request stands."""
    paths = [tuple(state.drafts) for _, state in eager]
    requests, depths = [request for request, _ in eager], [len(path) for path in paths]
    return Rows(requests, range(len(eager)), depths, lambda: paths)
