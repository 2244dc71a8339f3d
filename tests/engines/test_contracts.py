"""The contracts have all names of SGLang that our code imports, in every version that it is for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from outrider.engines.sglang import plugin
from outrider.engines.sglang.versions.contract import CONTRACTS

ROOT = Path(__file__).parents[2] / "src" / "outrider" / "engines" / "sglang"
ONLY = {"layers.attention.base_attn_backend.SharedReadEnds": "0.5.23"}
"""What a module of all versions imports in one of them only."""

PLUGIN_API = ("plugins.", "server_args")
"""What a plugin is loaded and hooked by. Without these SGLang does not call us."""


def imports(source):
    """Return the names of SGLang that a source imports, as contracts have them."""
    return {
        f"{node.module}.{alias.name}".removeprefix("sglang.srt.").removeprefix("sglang.")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt")
        for alias in node.names
    }


def listed(contract):
    return [
        *contract.HOOKS,
        *contract.CALLS,
        *contract.NAMES,
        *contract.FIELDS,
        *contract.ATTRIBUTES,
    ]


def missing(version, files):
    known = CONTRACTS[version]
    known = [*known.HOOKS, *known.CALLS, *known.NAMES, *known.FIELDS, *known.ATTRIBUTES]
    return {
        (file, name)
        for file, source in files.items()
        for name in imports(source)
        if ONLY.get(name, version) == version
        and not name.removeprefix("srt.").startswith(PLUGIN_API)
        and not any(each == name or each.startswith(f"{name}.") for each in known)
    }


def files_for(version):
    """Return the sources that run in a version: all but those of others."""
    others = [each.replace(".", "_") for each in CONTRACTS if each != version]
    found = {str(file.relative_to(ROOT)): file for file in ROOT.rglob("*.py")}
    return {
        name: file.read_text()
        for name, file in found.items()
        if not any(other in name for other in others)
    }


@pytest.mark.parametrize("version", CONTRACTS)
def test_every_import_is_in_the_contract(version):
    files = files_for(version)
    assert sum(len(imports(source)) for source in files.values()) > 30
    assert missing(version, files) == set()


def test_twin_an_import_that_is_not_listed_is_found():
    source = "def f():\n    from sglang.srt.managers.schedule_batch import NotListed\n"
    assert missing("0.5.23", {"a.py": source}) == {("a.py", "managers.schedule_batch.NotListed")}


def test_every_contract_has_an_adapter_and_hooks():
    assert list(plugin.HOOKS) == list(CONTRACTS)
    assert list(CONTRACTS) == sorted(CONTRACTS, key=lambda v: [int(part) for part in v.split(".")])
