"""The server's drafters: each guarded, one of them for each request. Control is one of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from outrider.control import Control
from outrider.control.decision import CpuDrafts, Decision, DeviceDrafts, Feasible, Plain, Report
from outrider.core import Budget, Outcomes, Proposal
from outrider.drafters import AheadDrafter, GuardedDrafter, ModelDrafter
from outrider.serving.profile import ADAPTIVE, LOOKUP
from outrider.serving.ranks import Message, Ranks
from outrider.serving.rows import share_rows
from outrider.serving.values import Columns, ServedRequest

logger = logging.getLogger(__name__)


class PromptReader(Protocol):
    """A draft model or a head: it reads prompts with the target.

    max_length: the longest text that it reads
    """

    max_length: int

    def prefill(self, batch: Any) -> None:
        """Read the tokens of the engine's prefill batch."""
        ...

    def skip(self, batch: Any) -> None:
        """Note that a prefill batch was not read."""
        ...

    def run(self, batch: Any) -> Tensor:
        """Run a decode batch for nothing but the time that it takes. Return its logits."""
        ...


@dataclass
class Pool:
    """The server's drafters.

    guards: each of them, by name; a fault of one costs speed only
    control: the one that chooses among the others, if requests may have it
    depths: how many drafts each drafter that drafts on the device makes, if that is fixed
    ranks: those that run the models. Rank 0 decides; on the others nothing drafts
    model: the draft model, if there is one: a `PromptReader` that all ranks run. Rank 0 announces
        each of its passes and the others `follow`. Since `bind`, it `has_run` if there was one.
    readers: the draft model and heads, each with the names of the drafters that use it
    models: the drafters that run passes
    ahead: the drafters that ask a draft server
    fallbacks: requests that went without drafts for reasons outside the drafters
    lookup: the n-grams that are looked up on the device
    """

    guards: Mapping[str, GuardedDrafter]
    control: Control | None = None
    depths: Mapping[str, int] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)
    model: Any = None
    readers: Sequence[tuple[PromptReader, frozenset[str]]] = ()
    models: Sequence[ModelDrafter[Any]] = ()
    ahead: Sequence[AheadDrafter] = ()
    fallbacks: Counter[str] = field(default_factory=Counter)
    lookup: Mapping[str, int] = field(default_factory=LOOKUP.copy)
    _draft_seconds: float = 0.0

    # -- requests

    def start(self, requests: Sequence[ServedRequest]) -> None:
        """Introduce each request to its drafter."""
        for name, group in self._groups(requests).items():
            self.guards[name].start([requests[r] for r in group])

    def stop(self, requests: Sequence[ServedRequest]) -> None:
        """Let each drafter forget its requests."""
        for name, group in self._groups(requests).items():
            self.guards[name].stop([requests[r] for r in group])
        if self.control is not None:  # it decides early for requests of others too
            self.control.forget(requests)

    def observe(self, report: Report) -> None:
        """Report to each drafter what became of its requests."""
        outcomes = report.outcomes
        groups = self._groups(outcomes.requests)
        for name, group in groups.items():
            own, part = outcomes, report
            if len(groups) > 1:
                own = Outcomes.of([outcomes[r] for r in group])
                made = None if report.made is None else report.made[group]
                part = replace(report, outcomes=own, made=made)
            if name == ADAPTIVE and self.control is not None:
                self.guards[name].pass_on(own, partial(_observe, self.control, part))
            else:
                self.guards[name].observe(own)

    def meanwhile(self) -> None:
        """Let each drafter do what can wait, while the device works."""
        if self.ranks.leads:
            for guard in self.guards.values():
                guard.meanwhile()

    def _groups(self, requests: Sequence[Any]) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for r, request in enumerate(requests if self.ranks.leads else ()):
            groups.setdefault(request.drafter, []).append(r)
        return groups

    # -- decisions

    def decide_early(
        self, requests: Sequence[ServedRequest], columns: Columns, feasible: Feasible
    ) -> Plain | DeviceDrafts | None:
        """Return what the next step does if that does not depend on the last outcome, else None."""
        if not columns.may_draft:
            return Plain()
        if columns.adaptive and self.control is not None:
            control, most = self.control, columns.max_drafts
            plain: Plain | DeviceDrafts | None = Plain()
            return self.guards[ADAPTIVE].call_early(
                requests, lambda: control.decide_early(requests, most, feasible), plain
            )
        return self.fixed_on_device(columns, feasible.max_rows)

    def scores_unused(self, on_device: str) -> bool:
        """Say whether control wants drafts scored that a step is launched without.

        on_device: the drafter that drafted there; "" if none did
        """
        return self.control is not None and self.control.scores_unused(on_device)

    def fixed_on_device(self, columns: Columns, max_rows: int) -> DeviceDrafts | None:
        """Return the drafts of the device, if its drafter makes as many in every step."""
        name = min(columns.drafters, default="")
        if len(columns.drafters) != 1 or name not in self.depths:
            return None
        drafts, _ = share_rows(np.minimum(columns.max_drafts, self.depths[name]), max_rows)
        return DeviceDrafts(name, drafts, max(1, int(drafts.max(initial=0))))

    def decide(
        self, batch: Any, requests: Sequence[ServedRequest], budget: Budget, feasible: Feasible
    ) -> Decision:
        """Ask the drafters, on rank 0; on the others, make the passes that it announces.

        All ranks return the same drafts. A pass that failed on one of them makes the step a plain
        one on all, and the draft model fails when it is asked next: its drafters rest then.

        batch: the engine's, as its workers take it
        """
        if not budget.max_drafts.any():
            return Plain()
        if self.model is not None:
            self.model.bind(batch)
        if not self.ranks.leads:
            return self._follow(len(requests))
        decision = self._decide(requests, budget, feasible)
        if self.ranks.alone:
            return decision
        proposal: Proposal = Proposal.empty(len(requests))
        if isinstance(decision, CpuDrafts):
            proposal = decision.proposal
        shape = proposal.num_drafts.tolist(), proposal.parents.tolist()
        self.ranks.tell(Message.DONE, proposal.tokens.tolist(), *shape)
        if self.model is not None and self.model.has_run and self.ranks.any(False):
            self.model.undo("a pass failed on another rank")
            return Plain()
        return decision

    def _decide(
        self, requests: Sequence[ServedRequest], budget: Budget, feasible: Feasible
    ) -> Decision:
        groups = self._groups(requests)
        if len(groups) == 1:
            return self._ask(next(iter(groups)), requests, budget, feasible)
        parts, names = [], [""] * len(requests)
        for name, group in groups.items():
            part = replace(budget, max_drafts=budget.max_drafts[group])
            others = len(requests) - len(group)
            own = replace(feasible, max_rows=feasible.max_rows - others)
            found = self._ask(name, [requests[r] for r in group], part, own)
            if isinstance(found, DeviceDrafts):  # the others have no drafts: see `Decider.decide`
                num_drafts = np.zeros(len(requests), np.int64)
                num_drafts[group] = found.num_drafts
                return replace(found, num_drafts=num_drafts)
            if isinstance(found, Plain):
                nothing: Proposal = Proposal.empty(len(group))
                found = CpuDrafts(nothing, [""] * len(group))
            parts.append((group, found.proposal))
            for r, drafter in zip(group, found.names, strict=True):
                names[r] = drafter
        return _drafts(Proposal.join(parts), names)

    def _ask(
        self, name: str, requests: Sequence[ServedRequest], budget: Budget, feasible: Feasible
    ) -> Decision:
        """Return what a drafter decides for requests that are all its own."""
        guard = self.guards[name]
        if name != ADAPTIVE or self.control is None:
            return _drafts(guard.propose(requests, budget), [name] * len(requests))
        if not budget.max_drafts.any():
            return Plain()
        control = self.control

        def decide() -> Decision:
            found = control.decide(requests, budget, feasible)
            if isinstance(found, CpuDrafts):
                found = replace(found, proposal=guard.checked(found.proposal, budget))
            return found

        decision = guard.ask(requests, decide)
        return Plain() if decision is None else decision

    def score_unused(
        self, requests: Sequence[ServedRequest], budget: Budget, feasible: Feasible
    ) -> None:
        """Let control score the drafts that a step was launched without."""
        control = self.control
        own = self._groups(requests).get(ADAPTIVE)
        if control is not None and own:
            mine = [requests[r] for r in own]
            part = replace(budget, max_drafts=budget.max_drafts[own])
            self.guards[ADAPTIVE].call(mine, lambda: control.score_unused(mine, part, feasible))

    def _follow(self, batch_size: int) -> Decision:
        """Make the passes that rank 0 announces. Return its drafts, unless one of them failed."""
        has_run, fault = False, None
        while (heard := self.ranks.hear())[0] is not Message.DONE:
            assert self.model is not None
            has_run = True
            try:
                self.model.follow(heard[0], *heard[1])
            except Exception as error:  # rank 0 goes on, and the passes that follow need this rank
                fault = error
                logger.warning("draft model: error in a pass: %s", error)
        if has_run and self.ranks.any(fault is not None):
            return Plain()
        tokens, num_drafts, parents = heard[1]
        return _drafts(Proposal.unclaimed(tokens, num_drafts, parents), [""] * batch_size)

    # -- models

    def prefill(self, batch: Any, drafters: set[str], longest: int, count: int) -> None:
        """Let the draft model and heads read the engine's prefill batch, as far as they are needed.

        A fault on any rank that runs one of them: the batch is skipped.

        drafters: those that its requests use
        longest: tokens of the longest of its requests
        count: how many there are
        """
        for reader, users in self.readers:
            if users.isdisjoint(drafters) or longest > reader.max_length:
                reader.skip(batch)
                continue
            fault = None
            try:
                reader.prefill(batch)
            except Exception as error:
                fault = error
                logger.warning("drafts of %s: error in prefill: %s", min(users), error)
            is_fault = fault is not None
            if self.ranks.any(is_fault) if reader is self.model else is_fault:
                reader.skip(batch)
                self.fallbacks["prefill"] += count

    def timed_models(self) -> list[PromptReader]:
        """Return the models that control uses, as far as all ranks can time their passes."""
        found = [reader for reader, users in self.readers if ADAPTIVE in users]
        return found if self.ranks.alone else [reader for reader in found if reader is self.model]

    def take_draft_seconds(self) -> float:
        """Return the seconds of draft passes since this was last asked."""
        before = self._draft_seconds
        self._draft_seconds = sum(drafter.seconds for drafter in self.models)
        return self._draft_seconds - before

    # -- what is counted

    def count(self, fallbacks: Mapping[str, int]) -> None:
        """Count requests that went without drafts, by reason."""
        self.fallbacks.update(fallbacks)

    def fallback_totals(self) -> Counter[str]:
        """Return how many requests went without drafts, by reason."""
        total = Counter(self.fallbacks)
        for guard in self.guards.values():
            total.update(guard.fallbacks)
        if waited := sum(drafter.waited for drafter in self.models):
            total["catching_up"] = waited
        return total

    def foreseen_totals(self) -> Counter[str]:
        """Return how often a draft server had drafts for a request, or why it had none."""
        return sum((drafter.counts for drafter in self.ahead), Counter[str]())

    def foreseen(self) -> dict[int, str]:
        """Return what a draft server had in the last proposal, by the request's id.

        It may have been asked for a request that another drafter drafted for.
        """
        return {id_: kind for drafter in self.ahead for id_, kind in drafter.found.items()}


def _drafts(proposal: Proposal, names: Sequence[str]) -> Decision:
    return CpuDrafts(proposal, names) if len(proposal.parents) else Plain()


def _observe(control: Control, report: Report, outcomes: Outcomes) -> None:
    control.observe(report if outcomes is report.outcomes else replace(report, outcomes=outcomes))
