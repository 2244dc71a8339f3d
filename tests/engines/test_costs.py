"""Costs of passes: the curve by rows, and the profiles of devices."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from math import inf, nan
from pathlib import Path

import pytest

from outrider.engines.costs import (
    H100_8B,
    H100_8B_LINE,
    PROFILES,
    PassCost,
    line,
    roofline,
    scaled,
    seconds_at,
)

PAGE = Path(__file__).parents[2] / "docs" / "paced.md"
POINTS = ((1, 6.0), (65, 6.0), (129, 14.0), (257, 46.0))


# -- the curve


def test_the_curve_is_exact_at_points():
    points = ((1, 0.1), (3, 0.3), (10, 0.7))
    assert [seconds_at(points, rows) for rows, _ in points] == [seconds for _, seconds in points]


def test_the_curve_is_linear_between_points():
    assert seconds_at(POINTS, 33) == 6.0
    assert seconds_at(POINTS, 97) == 10.0
    assert seconds_at(POINTS, 193) == 30.0


def test_the_last_slope_goes_on():
    assert seconds_at(POINTS, 513) == 46.0 + 256 * 0.25


def test_nothing_is_shorter_than_the_first_point():
    assert seconds_at(POINTS, 0) == 6.0


def test_twin_a_straight_line_is_another_curve():
    """Through the same ends; it is what the first and the last point alone would give."""
    ends = (POINTS[0], POINTS[-1])
    assert seconds_at(ends, 65) > 1.5 * seconds_at(POINTS, 65)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), "two points"),
        (((1, 1.0),), "two points"),
        (((1, 1.0), (1, 2.0)), "rise"),
        (((2, 1.0), (1, 2.0)), "rise"),
        (((-1, 1.0), (1, 2.0)), "rise"),
        (((1, 1.0), (inf, 2.0)), "rise"),
        (((nan, 1.0), (2, 2.0)), "rise"),
        (((1, 2.0), (2, 1.0)), "never fall"),
        (((1, 0.0), (2, 1.0)), "above 0"),
        (((1, 1.0), (2, nan)), "above 0"),
        (((1, 1.0), (2, inf)), "above 0"),
    ],
)
def test_points_that_are_no_curve_are_refused(points, message):
    with pytest.raises(ValueError, match=message):
        PassCost(points, kv=0.0)


@pytest.mark.parametrize("options", [{"kv": -1e-9}, {"kv": nan}, {"kv": 0, "prefill_row": -1e-6}])
def test_costs_below_nothing_are_refused(options):
    with pytest.raises(ValueError, match=list(options)[-1]):
        PassCost(POINTS, **options)


def test_cached_tokens_are_added():
    cost = PassCost(POINTS, kv=0.5)
    assert cost.decode(97, 10) == 15.0
    assert cost.decode(97, 0) == cost.prefill(97) == 10.0


def test_prefills_can_have_a_price_of_their_own():
    cost = PassCost(POINTS, kv=0.5, prefill_row=0.001)
    assert cost.prefill(1000) == 7.0
    assert cost.decode(97, 0) == 10.0


def test_a_line_a_roofline_and_a_share_of_another_curve():
    assert seconds_at(line(2.0, 0.5), 8) == 6.0
    roof = roofline(24.0, 0.1)
    assert [seconds_at(roof, rows) for rows in (1, 100, 240)] == [24.0] * 3
    assert seconds_at(roof, 1000) == pytest.approx(100.0)
    share = scaled(POINTS, 0.25, 1.0)
    assert [seconds_at(share, rows) for rows in (1, 65, 129)] == [1.0, 1.0, 3.0]


# -- the profiles


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_says_where_it_comes_from(name):
    profile = PROFILES[name]
    assert profile.name == name
    assert len(profile.source) > 100
    assert "erived" in profile.source or name == "h100-8b-line"


@pytest.mark.parametrize("name", PROFILES)
def test_more_work_never_takes_less_time(name):
    profile = PROFILES[name]
    for cost in filter(None, (profile.target, profile.draft, profile.head)):
        for less, more in pairwise((*range(1, 300), *range(300, 5000, 100))):
            assert cost.decode(less, 0) <= cost.decode(more, 0)
            assert cost.prefill(less) <= cost.prefill(more)
        assert cost.decode(1, 1) > cost.decode(1, 0)
        # an error of units shows here
        assert 1e-4 < cost.decode(1, 0) < cost.decode(1024, 0) < 0.2


@pytest.mark.parametrize("name", PROFILES)
def test_drafts_cost_less_than_the_target(name):
    profile = PROFILES[name]
    for rows in (1, 16, 256, 1024):
        target, draft = (cost.decode(rows, 9999) for cost in (profile.target, profile.draft))
        assert draft < target
        assert profile.head is None or profile.head.decode(rows, 9999) < draft


def flat_until(cost):
    """Return at how many rows a pass takes a tenth more than with one row."""
    return next(rows for rows in range(1, 5000) if cost.decode(rows, 0) > 1.1 * cost.fixed)


def test_measured_rows_are_nearly_free_up_to_256():
    assert flat_until(H100_8B.target) > 256
    beyond = (H100_8B.target.decode(1024, 0) - H100_8B.target.decode(256, 0)) / 768
    assert beyond == pytest.approx(17e-6, rel=0.05)


def test_twin_on_the_straight_line_they_are_not():
    assert flat_until(H100_8B_LINE.target) < 32


def test_the_straight_line_is_exact_to_the_last_bit():
    """A last bit can turn a decision, and so a result that was recorded."""
    target = H100_8B_LINE.target
    for rows in (1, 7, 64, 1000):
        assert target.decode(rows, 1000) == 5.9e-3 + 21e-6 * rows + 39e-9 * 1000


def test_a_mixture_of_experts_is_a_staircase():
    """Eight rows read the experts of eight tokens, so even a few rows are not free."""
    target = PROFILES["h100-30b-a3b"].target
    assert flat_until(target) == 2
    assert 2.5 < target.decode(8, 0) / target.decode(1, 0) < 4
    assert target.decode(256, 0) < 1.25 * target.decode(32, 0)


def test_the_page_has_the_profiles_of_the_module():
    table = {
        cells[0].strip("`"): [re.sub(r" (ns|ms)$", "", cell) for cell in cells[1:]]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `") and len(cells := [c.strip() for c in line[1:-1].split("|")]) == 9
    }
    for profile in PROFILES.values():
        curve = [f"{1e3 * profile.target.decode(n, 0):.1f}" for n in (1, 64, 256, 512, 1024)]
        head = f"{1e3 * profile.head.fixed:g}" if profile.head else ""
        own = f"{1e9 * profile.target.kv:g}", f"{1e3 * profile.draft.fixed:.1f}", head
        assert table.pop(profile.name) == [*curve, *own]
    assert table == {}


def test_costs_are_imported_without_what_they_do_not_need():
    """A process of bare SGLang imports them, too."""
    heavy = ["torch", "numpy", "sglang", "outrider.core", "outrider.engines.simulated"]
    code = "import json, sys, outrider.engines.costs; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert "outrider.engines.costs" in loaded
    assert [name for name in heavy if name in loaded] == []
