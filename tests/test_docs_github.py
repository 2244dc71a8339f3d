"""What surrounds the code on a forge: workflows, forms, citation. They name what exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

import outrider
from pages import ROOT
from test_docs import wrong

GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def test_the_workflow_runs_every_stage_of_ci():
    """But `models`, whose models are not in the repository."""
    script = (ROOT / ".ci/run").read_text()
    stages = re.search(r"^stages=\$\{\*:-(.*)\}$", script, re.MULTILINE)[1].split()
    job = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())["jobs"]["stage"]
    run = " ".join(job["strategy"]["matrix"]["stage"]).split()
    assert sorted([*run, "models"]) == sorted([*stages, "versions"])
    assert job["steps"][-1]["run"] == ".ci/run ${{ matrix.stage }}"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_asks_for_what_doctor_says(form):
    text = form.read_text()
    content = yaml.safe_load(text)
    assert {"name", "description", "body"} <= content.keys()
    fields = [part for part in content["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields)
    (doctor,) = (part for part in fields if part["id"] == "doctor")
    assert "outrider doctor --json" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"]
    assert wrong(text) == []
    named = re.findall(r"docs/[\w./-]+\w", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_versions_agree():
    """Of the package, the citation, and the Pythons that the metadata and CI name."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{outrider.__version__}"' in project
    assert citation["version"] == outrider.__version__
    named = set(re.findall(r"Python :: (3\.\d+)", project))
    workflow = (GITHUB / "workflows/ci.yml").read_text()
    assert named == set(re.findall(r"^ +(3\.\d+)$", workflow, re.MULTILINE))
    assert named == set(re.findall(r"(?<= )3\.\d+(?=[ ;])", _line(ROOT / ".ci/run", "for version")))
    assert "{}.{}".format(*sys.version_info) in named


def test_the_lowest_dependencies_are_those_that_are_tried():
    project = (ROOT / "pyproject.toml").read_text()
    listed = project.partition("\ndependencies = [")[2].partition("]")[0]
    bounds = re.findall(r'"([\w-]+)>=([\d.]+)"', listed)
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", _text("lowest.txt"), re.MULTILINE))
    assert pinned.keys() == dict(bounds).keys()
    assert all(pinned[name].startswith(least) for name, least in bounds)
    (tried,) = re.findall(r"^transformers==(.*)$", _text("transformers-lowest.txt"), re.MULTILINE)
    (least,) = set(re.findall(r'"transformers>=([\d.]+)"', project))
    assert tried.startswith(least)


def _text(name: str) -> str:
    return (ROOT / "requirements" / name).read_text()


def _line(path: Path, start: str) -> str:
    lines = (line.strip() for line in path.read_text().splitlines())
    return next(line for line in lines if line.startswith(start))
