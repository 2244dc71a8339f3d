"""Imports point one way: down."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
# each layer may import itself and what stands before it
LAYERS = [
    "checkpoint",
    "core",
    "kernels",
    "report",
    "selftest",
    "drafters",
    "control",
    "hosts",
    "engines",
]
TOOLS = ["doctor", "explain", "audit", "bench", "tune", "trial"]
MAY_IMPORT = {
    "checkpoint": {"checkpoint"},
    "core": {"core"},
    "kernels": {"core", "kernels"},
    "report": {"core", "report"},
    "selftest": {"core", "kernels", "report", "selftest"},
    "drafters": {"checkpoint", "core", "kernels", "drafters"},
    "control": {"core", "drafters", "control"},
    "hosts": {"checkpoint", "core", "kernels", "drafters", "control", "hosts"},
    "engines": {"core", "drafters", "hosts", "engines"},
    "doctor": {"checkpoint", "core", "drafters", "hosts", "engines", "report", "doctor"},
    "explain": {"core", "drafters", "control", "hosts", "engines", "report", "explain"},
    "audit": {"core", "engines", "report", "audit"},
    "bench": {"core", "engines", "report", "audit", "bench"},
    "tune": {"core", "hosts", "engines", "report", "audit", "bench", "tune"},
    # the kernels' checks and the doctor run as processes of their own
    "trial": {"core", "engines", "report", "audit", "bench", "trial"},
    "cli": {*LAYERS, *TOOLS, "cli"},
}
ENGINES = {"transformers", "sglang", "vllm", "triton"}
MAY_USE = {
    "hosts": ENGINES,
    "engines": ENGINES,
    "doctor": ENGINES,
    "explain": ENGINES,
    "cli": ENGINES,
    "kernels": {"triton"},
    "selftest": {"triton", "sglang"},  # it measures SGLang's own kernel beside ours
}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module)
    return found


def violations(layer: str, names: set[str]) -> list[str]:
    parts = [name.split(".") for name in names]
    ours = {p[1] for p in parts if p[0] == "outrider" and len(p) > 1} - {"errors", "redact"}
    engines = {p[0] for p in parts} & ENGINES
    return sorted(ours - MAY_IMPORT[layer]) + sorted(engines - MAY_USE.get(layer, set()))


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_imports_point_down(layer):
    files = sorted((SRC / "outrider" / layer).rglob("*.py"))
    assert files
    for file in files:
        assert violations(layer, imports(file)) == [], file


def test_hosts_do_not_know_each_other():
    for host in (SRC / "outrider" / "hosts").iterdir():
        if host.is_dir():
            others = {
                name.split(".")[2]
                for file in host.rglob("*.py")
                for name in imports(file)
                if name.startswith("outrider.hosts.")
            }
            shared = {file.stem for file in host.parent.glob("*.py")}
            assert others <= {host.name} | shared


def private(file: Path) -> list[str]:
    """Return the private names that a file imports from modules of ours."""
    return [
        alias.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outrider")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]


def test_private_names_stay_in_their_module():
    files = sorted((SRC / "outrider").rglob("*.py"))
    assert {str(file): found for file in files if (found := private(file))} == {}


def test_twin_a_wrong_import_is_seen():
    assert violations("core", {"outrider.hosts.transformers", "torch"}) == ["hosts"]
    assert violations("drafters", {"transformers"}) == ["transformers"]


def top_level(node: ast.AST) -> set[str]:
    """Return what a module imports when it is loaded or typed, and not what a function does."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    found = set()
    if isinstance(node, ast.Import):
        found = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        found = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found.union(*map(top_level, ast.iter_child_nodes(node)))


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_by_way_of_others():
    modules = {}
    for file in (SRC / "outrider").rglob("*.py"):
        parts = file.relative_to(SRC).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = ast.parse(file.read_text())
    graph = {name: top_level(tree) & {*modules} - {name} for name, tree in modules.items()}
    # a package's own modules come before it, and it is loaded before them: that is no cycle
    for name in graph:
        graph[name] -= {name.rpartition(".")[0]}
    assert cycle(graph) == []


def test_twin_a_cycle_is_seen():
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
