"""Several drafters side by side, each request with the one it chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from outrider.core import Budget, Drafter, Outcome, Outcomes, Proposal, Request
from outrider.drafters.states import SharedStates


class RoutedDrafter:
    """Sends each request to one of several drafters.

    drafters: by name
    choose: names the drafter of a request; always the same one for the same request

    hidden_layers: all that one of the drafters reads; each is given its own
    """

    name = "routed"

    def __init__(self, drafters: Mapping[str, Drafter], choose: Callable[[Request], str]) -> None:
        self._drafters = drafters
        self._choose = choose
        self._states = SharedStates(drafters)
        self.hidden_layers = self._states.layers

    def start(self, requests: Sequence[Request]) -> None:
        """Introduce each request to its drafter."""
        for name, group in self._groups(requests).items():
            self._drafters[name].start([requests[r] for r in group])

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Ask each drafter for its requests' drafts."""
        groups = self._groups(requests)
        if len(groups) == 1:
            return self._drafters[next(iter(groups))].propose(requests, budget)
        parts = []
        for name, group in groups.items():
            part = replace(budget, max_drafts=budget.max_drafts[group])
            chosen = [requests[r] for r in group]
            parts.append((group, self._drafters[name].propose(chosen, part)))
        return Proposal.join(parts)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Tell each drafter what became of its requests."""
        done = Outcomes.of(outcomes)
        groups = self._groups(done.requests)
        for name, group in groups.items():
            mine = done if len(groups) == 1 else Outcomes.of([done[r] for r in group])
            self._drafters[name].observe(self._states.of(name, mine))

    def meanwhile(self) -> None:
        """Let each drafter do what can wait, if it has such work."""
        for drafter in self._drafters.values():
            if (work := getattr(drafter, "meanwhile", None)) is not None:
                work()

    def stop(self, requests: Sequence[Request]) -> None:
        """Let each drafter forget its requests."""
        for name, group in self._groups(requests).items():
            self._drafters[name].stop([requests[r] for r in group])

    def _groups(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for r, request in enumerate(requests):
            groups.setdefault(self._choose(request), []).append(r)
        return groups
