"""Control for servers, and the same as a drafter for loops in which each step waits for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.control.control import Control
from outrider.control.decision import CpuDrafts, Decision, Feasible, Plain, Report
from outrider.control.model_choice import PassingDrafter
from outrider.control.step import TraceFile
from outrider.core import Budget, Drafter, Outcome, Outcomes, Proposal, Request
from outrider.drafters import AheadDrafter, SuffixDrafter


class AdaptiveDrafter:
    """A drafter that lets control decide each step. It never drafts on the device.

    control: that decides
    hidden_layers: see `Control`
    """

    name = "adaptive"

    def __init__(self, control: Control) -> None:
        self.control, self.hidden_layers = control, control.hidden_layers
        self.start, self.stop, self.meanwhile = control.start, control.stop, control.meanwhile
        self.limit_vocabulary = control.limit_vocabulary
        self._requests: Sequence[Request] = ()
        self._decision: Decision = Plain()

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Return the drafts that are expected to emit the most tokens per second."""
        self._requests = requests
        # the plain loop has neither drafts of the device nor padded passes
        self._decision = decision = self.control.decide(requests, budget, Feasible())
        if isinstance(decision, CpuDrafts):
            return decision.proposal
        return Proposal.empty(len(requests))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Show every drafter what was emitted, and let control learn from it."""
        done, ended = Outcomes.of(outcomes), self.control.clock()
        self.control.observe(Report(done, self._decision, early=False, ended=ended))

    def used(self, request: Request) -> str:
        """Return the drafter that drafted for a request in the last step; "" if none did."""
        if not isinstance(self._decision, CpuDrafts):
            return ""
        names = zip(self._requests, self._decision.names, strict=True)
        return next((name for other, name in names if other is request), "")


def adaptive_control(
    models: PassingDrafter | Sequence[PassingDrafter] | None = None,
    trace: str | Path | None = None,
    ahead: str | Path | bool | None = None,
    **options: Any,
) -> Control:
    """Return control over the suffix lookup and, if given, draft models and heads.

    The suffix lookup has no thresholds of its own here. Control learns which drafts to verify.

    models: a draft model or head, or several of them with different names
    trace: a file to which each step is appended, as one line of JSON
    ahead: the socket of a draft server, or true for the one where it is by default. Its drafts cost
        a step no time.
    options: of `Control`
    """
    if trace is not None:
        options["on_step"] = TraceFile(trace)
    free: dict[str, Drafter] = {"suffix": SuffixDrafter(min_vote=0.0, min_match=2)}
    if ahead is not None and ahead is not False:
        free[AheadDrafter.name] = AheadDrafter(None if ahead is True else ahead)
    if models is not None and not isinstance(models, Sequence):
        models = [models]
    return Control(free, models, **options)


def adaptive_drafter(
    models: PassingDrafter | Sequence[PassingDrafter] | None = None, **options: Any
) -> AdaptiveDrafter:
    """Return the same as a drafter. models, options: of `adaptive_control`"""
    return AdaptiveDrafter(adaptive_control(models, **options))
