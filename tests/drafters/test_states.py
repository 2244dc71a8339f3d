"""Hidden states of the target for drafters that read different layers of it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from outrider.core import Outcome, Outcomes, Request, SamplingParams
from outrider.drafters.states import SharedStates


def test_each_drafter_gets_the_layers_that_it_reads():
    readers = {"a": (1, 3), "b": (2,), "c": ()}
    drafters = {name: SimpleNamespace(hidden_layers=layers) for name, layers in readers.items()}
    states = SharedStates(drafters | {"d": SimpleNamespace()})
    assert states.layers == (1, 2, 3)
    request = Request(0, (1, 2), SamplingParams(), seed=0)
    hidden = torch.tensor([[[1.0], [2.0], [3.0]]])
    outcomes = Outcomes.of([Outcome(request, (5,), (0,), 0, 0, None, hidden)])
    found = {name: states.of(name, outcomes)[0].hidden for name in (*readers, "d")}
    assert found["a"].flatten().tolist() == [1.0, 3.0]
    assert found["b"].flatten().tolist() == [2.0]
    assert found["c"] is None
    assert found["d"] is None
