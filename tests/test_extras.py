"""What the documentation tells people to run finds its packages in an extra that it names."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("tomllib is new in 3.11", allow_module_level=True)
import tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"pyyaml": "yaml"}
# hosts and rivals, which bring environments of their own
APART = {"sglang", "arctic_inference"}


def modules(*extras):
    wanted = list(PROJECT["dependencies"])
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    names = [re.match(r"[\w-]+", one)[0].lower() for one in wanted]
    return {MODULES.get(name, name) for name in names}


def imported(folder):
    found = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found


def test_benchmarks_have_an_extra():
    """psutil was in none."""
    files = [
        file for name in ("benchmarks", "scripts", "tests") for file in ROOT.glob(f"{name}/**/*.py")
    ]
    ours = {name for file in files for name in (file.stem, file.parent.name)} - {"transformers"}
    needed = imported(ROOT / "benchmarks") - set(sys.stdlib_module_names) - ours - APART
    assert needed - {"outrider"} <= modules("transformers", "tools", "benchmarks")


def test_extras_that_are_named_exist():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")]
    named = {
        extra.strip()
        for file in [*files, ROOT / "scripts" / "setup"]
        for group in re.findall(r"(?:outrider|repository>|'\.)\[([\w, ]+)\]", file.read_text())
        for extra in group.split(",")
    }
    assert {"tools", "transformers", "selftest", "benchmarks"} <= named
    assert named - {"EXTRA"} <= set(PROJECT["optional-dependencies"])
