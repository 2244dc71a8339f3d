"""Around a drafter: whatever it does wrong costs speed only, and is counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from numbers import Integral, Real
from threading import TIMEOUT_MAX
from typing import Any, TypeVar

import numpy as np
import torch

from outrider.core import (
    Budget,
    Drafter,
    DraftFault,
    Outcome,
    Outcomes,
    PointMass,
    Proposal,
    Request,
    RuleName,
    Siblings,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
LONGEST_REST = 64


class GuardedDrafter:
    """A drafter that cannot fail: a fault makes the step a plain one (K = 0) for all requests.

    After a fault the drafter rests, for 1 step, then 2, 4, ... up to 64 if faults go on, and is
    then told all requests anew. A call that takes longer than `timeout` is a fault too: it goes
    on in its thread, and the drafter rests until it returns.

    vocab_size: ids must lie below
    timeout: seconds for one call; None calls the drafter directly, without a thread
    fallbacks: requests that went without drafts, by reason
    hidden_layers: those of the target that the drafter reads; () for one that reads none
    """

    def __init__(self, drafter: Drafter, vocab_size: int, timeout: float | None = None) -> None:
        if timeout is not None and not _can_be_waited_for(timeout):
            raise ValueError(f"a drafter's time-out must be > 0 seconds or None, not {timeout!r}")
        self.name = drafter.name
        self.hidden_layers = _hidden_layers(drafter)
        if (limit := getattr(drafter, "limit_vocabulary", None)) is not None:
            limit(vocab_size)
        self.fallbacks: Counter[str] = Counter()
        self._drafter = drafter
        self._meanwhile: Callable[[], None] | None = getattr(drafter, "meanwhile", None)
        self._vocab_size = vocab_size
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(1, "outrider-draft") if timeout is not None else None
        self._stuck: Future[Any] | None = None
        self._rest, self._next_rest = 0, 1
        self._known: dict[int, Request] = {}
        self._untold: set[int] = set()  # that it should know, if it had not rested or failed

    def start(self, requests: Sequence[Request]) -> None:
        """Tell the drafter; if it fails, it is told again later."""
        if self._ready():
            self._call("start", requests, lambda: self._introduce(requests))
        self._untold.update(r.id for r in requests if r.id not in self._known)

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Return the drafter's proposal if it can be used, else the empty one."""
        if not budget.max_drafts.any():
            return Proposal.empty(len(requests))
        found = self.ask(
            requests, lambda: self.checked(self._drafter.propose(requests, budget), budget)
        )
        return Proposal.empty(len(requests)) if found is None else found

    def ask(self, requests: Sequence[Request], call: Callable[[], T]) -> T | None:
        """Return what a call of the drafter returns, which knows the requests then.

        None while it rests, and after a fault.
        """
        if not self._ready():
            self.fallbacks["resting"] += len(requests)
            return None

        def introduced() -> T:
            self._introduce([r for r in requests if r.id not in self._known])
            return call()

        found = self._call("propose", requests, introduced)
        if found is not None:
            self._next_rest = 1
        return found

    def checked(self, proposal: Proposal, budget: Budget) -> Proposal:
        """Return a copy of a proposal. Raises DraftFault if it cannot be used."""
        # the drafter may use its arrays again while the target's pass runs
        proposal = _copied(proposal)
        check(proposal, budget, self._vocab_size)
        return proposal

    def call(self, requests: Sequence[Request], call: Callable[[], None]) -> None:
        """Call the drafter about requests, unless it rests or does not know one of them."""
        if all(r.id in self._known for r in requests) and self._ready():
            self._call("call", requests, call)

    def call_early(self, requests: Sequence[Request], call: Callable[[], T], otherwise: T) -> T:
        """Call the drafter about requests that it need not know. Return `otherwise` if it rests.

        Requests that were to be introduced already are introduced: no informed step may follow.
        """
        if not self._ready():
            return otherwise

        def introduced() -> tuple[T]:
            if self._untold:
                self._introduce([r for r in requests if r.id in self._untold])
            return (call(),)

        found = self._call("call", requests, introduced)
        return otherwise if found is None else found[0]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Report to the drafter what became of the requests that it knows."""
        self.pass_on(outcomes, self._drafter.observe)

    def pass_on(self, outcomes: Sequence[Outcome], observe: Callable[[Outcomes], None]) -> None:
        """Call this with the outcomes of the requests that the drafter knows, if any."""
        done = Outcomes.of(outcomes)
        if not all(request.id in self._known for request in done.requests):
            done = Outcomes.of([o for o in done if o.request.id in self._known])
        if done and self._stuck is None:
            self._call("observe", done.requests, lambda: observe(done))

    def meanwhile(self) -> None:
        """Let the drafter do what can wait, if it has such work."""
        if self._meanwhile is not None and self._stuck is None and not self._rest:
            self._call("meanwhile", (), self._meanwhile)

    def stop(self, requests: Sequence[Request]) -> None:
        """Let the drafter forget; if a call hangs, when it has returned."""
        self._untold.difference_update(r.id for r in requests)
        if self._stuck is not None:
            return
        gone = [r for r in requests if self._known.pop(r.id, None)]
        if gone:
            self._call("stop", gone, lambda: self._drafter.stop(gone))

    def close(self) -> None:
        """End the thread, if there is one; a stuck call is left behind."""
        if self._thread:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _introduce(self, requests: Sequence[Request]) -> None:
        if requests:
            self._drafter.start(requests)
            self._known.update({r.id: r for r in requests})
            self._untold.difference_update(r.id for r in requests)

    def _ready(self) -> bool:
        """Say whether the drafter may be called, and count down its rest."""
        if self._stuck is not None:
            if not self._stuck.done():
                return False
            self._stuck = None
            self._forget()
        if self._rest:
            self._rest -= 1
            return False
        return True

    def _call(self, what: str, requests: Sequence[Request], call: Callable[[], T]) -> T | None:
        try:
            if self._thread is None:
                return call()
            future = self._thread.submit(call)
            try:
                return future.result(self._timeout)
            except FutureTimeoutError:
                if not future.done():
                    self._stuck = future
                raise
        except Exception as error:
            reason = {FutureTimeoutError: "timeout", DraftFault: "garbage"}.get(
                type(error), "error"
            )
            self.fallbacks[reason] += len(requests)
            logger.warning("drafter %s: %s in %s: %s", self.name, reason, what, error)
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
            if self._stuck is None:
                self._untold.update(self._known)
                self._forget()
            return None

    def _forget(self) -> None:
        """Drop all state that the fault may have damaged."""
        known, self._known = list(self._known.values()), {}
        try:
            self._drafter.stop(known)
        except Exception as error:
            logger.warning("drafter %s: error in stop: %s", self.name, error)


def _can_be_waited_for(seconds: object) -> bool:
    return isinstance(seconds, Real) and 0 < float(seconds) <= TIMEOUT_MAX


def _hidden_layers(drafter: Drafter) -> tuple[int, ...]:
    layers = getattr(drafter, "hidden_layers", ())
    if isinstance(layers, Iterable):
        found = tuple(layers)
        if all(isinstance(layer, Integral) for layer in found):
            return found
    raise TypeError(
        f"hidden_layers of drafter {drafter.name} must be numbers of layers, such as (0, 2), "
        f"not {layers!r:.80}"
    )


def _copied(proposal: Proposal) -> Proposal:
    return replace(
        proposal,
        tokens=proposal.tokens.clone(),
        num_drafts=proposal.num_drafts.copy(),
        parents=proposal.parents.copy(),
        confidences=proposal.confidences.copy(),
    )


def check(proposal: Proposal, budget: Budget, vocab_size: int) -> None:
    """Raise DraftFault unless the proposal keeps to its budget, the vocabulary and the rule."""
    if len(proposal.num_drafts) != len(budget.max_drafts):
        raise DraftFault(f"{len(proposal.num_drafts)} answers to {len(budget.max_drafts)} requests")
    over = proposal.num_drafts > budget.max_drafts
    if over.any():
        first = int(over.argmax())
        drafts, allowed = proposal.num_drafts[first], budget.max_drafts[first]
        raise DraftFault(f"{drafts} drafts where {allowed} were allowed")
    if not budget.trees and not proposal.is_chain:
        raise DraftFault("a tree where chains were asked for")
    tokens = proposal.tokens
    if tokens.dtype != torch.int64:
        raise DraftFault(f"token ids of type {tokens.dtype}")
    ids = tokens.cpu().numpy()
    # seen as unsigned, a negative id is above any vocabulary
    if len(ids) and ids.view(np.uint64).max() >= vocab_size:
        raise DraftFault(f"token ids outside [0, {vocab_size})")
    _check_distributions(proposal, budget.rule, vocab_size)


def _check_distributions(proposal: Proposal, rule: RuleName, vocab_size: int) -> None:
    if rule == "match":
        return  # it does not look at distributions
    for r, claimed in enumerate(proposal.distributions):
        if isinstance(claimed, PointMass):
            continue
        if rule == "block" and isinstance(claimed, Siblings):
            raise DraftFault("rule block takes chains, not Siblings")
        tokens = proposal.tokens[proposal.starts[r] : proposal.starts[r + 1]]
        if claimed.q.shape != (len(tokens), vocab_size):
            raise DraftFault(f"q of shape {tuple(claimed.q.shape)}")
        drawn = claimed.q.gather(-1, tokens[:, None])
        sums = claimed.q.sum(-1)
        if not (bool((drawn > 0).all()) and bool(((sums - 1).abs() < 1e-3).all())):
            raise DraftFault("q is not a distribution that the drafts can come from")
