"""The target's hidden states, for several drafters that read different layers of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outrider.core import Drafter, Outcome, Outcomes


class SharedStates:
    """Gives each of several drafters the hidden states that it reads.

    drafters: by name

    layers: all that one of them reads, which the host is asked for
    """

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        read = {name: getattr(drafter, "hidden_layers", ()) for name, drafter in drafters.items()}
        self.layers: tuple[int, ...] = tuple(
            sorted({i for layers in read.values() for i in layers})
        )
        self._columns = {
            name: [self.layers.index(layer) for layer in layers] for name, layers in read.items()
        }

    def of(self, name: str, outcomes: Outcomes) -> Outcomes:
        """Return outcomes with the states that this drafter reads."""
        if not self.layers:
            return outcomes
        return Outcomes.of([self._own(self._columns[name], outcome) for outcome in outcomes])

    def _own(self, columns: list[int], outcome: Outcome) -> Outcome:
        if outcome.hidden is None or not columns:
            return replace(outcome, hidden=None)
        return replace(outcome, hidden=outcome.hidden[:, columns])
