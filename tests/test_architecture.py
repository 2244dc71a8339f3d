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
    "serving",
    "engines",
    "clients",
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
    "serving": {"core", "kernels", "drafters", "control", "serving"},
    "engines": {"checkpoint", "core", "kernels", "drafters", "control", "serving", "engines"},
    "clients": {"core", "drafters", "engines", "clients"},
    "doctor": {
        "checkpoint",
        "core",
        "drafters",
        "serving",
        "engines",
        "clients",
        "report",
        "doctor",
    },
    "explain": {"core", "drafters", "control", "engines", "clients", "report", "explain"},
    "audit": {"core", "clients", "report", "audit"},
    "bench": {"core", "clients", "report", "audit", "bench"},
    "tune": {"core", "serving", "clients", "report", "audit", "bench", "tune"},
    # the kernels' checks and the doctor run as processes of their own
    "trial": {"core", "clients", "report", "audit", "bench", "trial"},
    "cli": {*LAYERS, *TOOLS, "cli"},
}
ENGINES = {"transformers", "sglang", "vllm", "triton"}
MAY_USE = {
    "engines": ENGINES,
    "clients": ENGINES,
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


def test_engines_do_not_know_each_other():
    for engine in (SRC / "outrider" / "engines").iterdir():
        if engine.is_dir():
            others = {
                name.split(".")[2]
                for file in engine.rglob("*.py")
                for name in imports(file)
                if name.startswith("outrider.engines.")
            }
            shared = {file.stem for file in engine.parent.glob("*.py")}
            assert others <= {engine.name} | shared


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
    assert violations("core", {"outrider.engines.transformers", "torch"}) == ["engines"]
    assert violations("drafters", {"transformers"}) == ["transformers"]


def all_imports(tree: ast.AST) -> set[str]:
    """Return what a module imports, in functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


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
    graph = {name: all_imports(tree) & {*modules} - {name} for name, tree in modules.items()}
    # a package's own modules come before it, and it is loaded before them: that is no cycle
    for name in graph:
        graph[name] -= {name.rpartition(".")[0]}
    assert cycle(graph) == []


def test_twin_a_cycle_is_seen():
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


# -- the served step, its engines and control

SMALL = ["serving", "engines", "control"]
LIMITS = {ast.Module: 450, ast.ClassDef: 300, ast.FunctionDef: 60, ast.AsyncFunctionDef: 60}
"""Lines of a module, a class and a function."""


def too_long(source: str) -> list[str]:
    """Return what of a module has too many lines."""
    tree = ast.parse(source)
    found = [] if len(source.splitlines()) <= LIMITS[ast.Module] else ["the module"]
    for node in ast.walk(tree):
        limit = LIMITS.get(type(node))
        if limit and not isinstance(node, ast.Module) and node.end_lineno - node.lineno >= limit:
            found.append(node.name)
    return found


def modules_of(*packages: str) -> dict[str, str]:
    files = [file for name in packages for file in (SRC / "outrider" / name).rglob("*.py")]
    return {str(file.relative_to(SRC / "outrider")): file.read_text() for file in sorted(files)}


def test_modules_classes_and_functions_are_small():
    found = {name: too_long(source) for name, source in modules_of(*SMALL).items()}
    assert {name: parts for name, parts in found.items() if parts} == {}


def test_the_whole_of_a_step_can_be_read_at_once():
    assert len(modules_of("serving")["serving/step.py"].splitlines()) <= 160


def test_twin_what_is_long_is_seen():
    assert too_long("def f():\n" + "    x\n" * 60) == ["f"]
    assert too_long("x\n" * 451) == ["the module"]


SGLANGS = {
    "Req", "allocator", "batch", "output", "found.logits_output", "plain", "req", "server_args",
    "their", "twin",
}  # fmt: skip
"""What objects of SGLang's are called where something is written to them."""


def foreign_writes(sources: dict[str, str]) -> list[str]:
    """Return where attributes of our own objects are written by another module than their own.

    An attribute is of a module if one of its classes declares it or writes it to itself.
    """
    owners: dict[str, set[str]] = {}
    writes = []
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        owners.setdefault(field.target.id, set()).add(module)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                of = ast.unparse(node.value)
                if of in ("self", "cls"):
                    owners.setdefault(node.attr, set()).add(module)
                elif of not in SGLANGS:
                    writes.append((module, node.attr, ast.unparse(node)))
    return [
        f"{module}: {what}"
        for module, attribute, what in writes
        if attribute in owners and module not in owners[attribute]
    ]


def test_attributes_are_written_by_their_own_module():
    assert foreign_writes(modules_of("serving", "engines/sglang", "control")) == []


def test_twin_a_write_from_outside_is_seen():
    owner = "class Step:\n    rows: int\n    def f(self):\n        self.padded = True\n"
    writer = "def g(step, batch):\n    step.rows = 1\n    step.padded = 2\n    batch.rows = 3\n"
    assert foreign_writes({"a": owner, "b": writer}) == ["b: step.rows", "b: step.padded"]
