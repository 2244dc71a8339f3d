"""Figures in README and docs are those of benchmarks/results/.

If one of these fails after a new measurement: `python scripts/figures.py`.
"""

from __future__ import annotations

import importlib.util

import pytest

from pages import ROOT

spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)


@pytest.mark.parametrize("name", figures.PAGES)
def test_a_page_has_the_figures_of_the_result_files(name):
    page = (ROOT / name).read_text()
    assert figures.filled(page) == page, "a table is out of date"
    assert figures.unmet(name, page) == []


def test_every_table_is_used():
    pages = "".join((ROOT / name).read_text() for name in figures.PAGES)
    assert [name for name in figures.TABLES if f"<!-- figures: {name} -->" not in pages] == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("the lowest cell is 1.01", "the lowest cell is 1.02"),
        ("| code | 1 | 5.4 |", "| code | 1 | 5.5 |"),
        ("Outliers are clipped.", "Outliers above 7.25 ms are clipped."),
    ],
)
def test_twin_a_figure_of_nowhere_is_seen(right, wrong):
    page = (ROOT / "docs/control.md").read_text()
    assert page.count(right) == 1
    page = page.replace(right, wrong)
    assert figures.filled(page) != page or figures.unmet("docs/control.md", page)
