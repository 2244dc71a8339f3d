"""The policy on recorded answers, against an oracle that knows what will be accepted."""

from __future__ import annotations

import math

import pytest
import replay

from outrider.control import Limits
from outrider.drafters import NgramDrafter

KINDS = ("chat", "code", "edit", "json", "prose", "mixed")


@pytest.fixture(scope="module")
def table():
    """Speeds of every method for some cells."""
    return {(kind, batch): replay.speeds(kind, batch) for kind in KINDS for batch in (1, 4, 16)}


def of_oracle(found):
    return {cell: speeds["adaptive"] / speeds["oracle"] for cell, speeds in found.items()}


def test_regret(table):
    """What not knowing the future costs: about a sixth. benchmarks/regret.py has all cells."""
    shares = of_oracle(table)
    assert min(shares.values()) > 0.7, shares
    assert math.prod(shares.values()) ** (1 / len(shares)) > 0.82, shares


def test_no_fixed_choice_is_better(table):
    for cell, speeds in table.items():
        best = max(speeds[name] for name in replay.FIXED)
        assert speeds["adaptive"] > 0.96 * best, (cell, speeds)
        assert speeds["adaptive"] > 0.97 * speeds["plain"], (cell, speeds)


def test_the_oracle_is_one(table):
    """It knows more than anyone; only a tree of two drafters can be right where none of them is."""
    for cell, speeds in table.items():
        assert speeds["oracle"] > 0.97 * max(speeds.values()), (cell, speeds)


def test_a_policy_that_believes_anything_is_noticed(table, monkeypatch):
    """The twin: no calibration, so every draft is taken for certain; and no slowdown guard."""
    cell = ("prose", 16)
    assert of_oracle(table)[cell] > 0.88
    monkeypatch.setattr(
        "outrider.control.acceptance.Chances.of", lambda self, rows, sure: sure * 0 + 0.98
    )
    monkeypatch.setattr("outrider.control.slowdown.SlowdownGuard.is_tripped", False)
    assert of_oracle({cell: replay.speeds(*cell)})[cell] < 0.88


def overlapped(kind, batch, launches_early=True):
    """How fast control with a draft model is where plain steps are launched early, times plain."""
    theatre = replay.Overlapped(replay.traces_of(kind, batch), batch, max(4, batch))
    control = replay.adaptive(theatre, limits=Limits(launches_early=launches_early))
    return theatre.play(control) / (batch / theatre.verify(batch))


@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("kind", ["chat", "prose"])
def test_where_drafts_do_not_pay_control_is_plain_decoding(kind, batch):
    assert overlapped(kind, batch) > 0.98


def test_where_drafts_pay_control_uses_them():
    assert overlapped("edit", 16) > 2.5
    assert overlapped("json", 1) > 1.5  # the model's


def test_control_that_takes_steps_that_wait_for_plain_ones_is_slower():
    """The twin: it does not know that plain steps need not wait."""
    assert overlapped("prose", 16, launches_early=False) < 0.93


def test_replay_is_the_recorded_text():
    theatre = replay.Theatre(replay.traces_of("edit", 2), 2)
    players = []
    drafter = NgramDrafter()
    start = drafter.start
    drafter.start = lambda requests: (players.extend(requests), start(requests))
    theatre.play(drafter)
    done = [player for player in players if len(player.left) < 2]
    assert len(done) > 5
    assert all(p.trace["output"][: len(p.output)] == p.output for p in players)
