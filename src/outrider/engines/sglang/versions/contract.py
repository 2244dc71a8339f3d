"""Whether this SGLang is one that we know.

A contract lists the names that we rely on in one version, with the parameters they must take. It is
checked when OUTRIDER is chosen. If SGLang has changed, the server stops and says what changed. Each
version has a file of its own.
"""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from types import ModuleType
from typing import Any

from outrider.engines.sglang.versions import contract_0_5_11, contract_0_5_23

CONTRACTS: dict[str, ModuleType] = {
    known.VERSION: known for known in (contract_0_5_11, contract_0_5_23)
}
"""The versions that we know, the newest last."""

VERSIONS, NEWEST = " or ".join(CONTRACTS), [*CONTRACTS][-1]

_SRT = "sglang.srt."


def known_contract() -> ModuleType | None:
    """Return the contract of the SGLang that is installed; None if we do not know it."""
    import sglang

    return CONTRACTS.get(sglang.__version__)


def hook_target(name: str) -> str:
    """Return the full name of something we hook."""
    return _SRT + name


def differences(contract: ModuleType) -> list[str]:
    """Return what this SGLang lacks or has otherwise than the contract says."""
    found = []
    for names, look in (
        (contract.HOOKS | contract.CALLS, _parameters),
        (dict.fromkeys(contract.NAMES, ""), lambda _: []),
        (contract.FIELDS, _fields),
        (contract.ATTRIBUTES, _attributes),
    ):
        for name, listed in names.items():
            wanted = listed.split()
            try:
                actual = look(_resolve(name))
            except (ImportError, AttributeError, OSError) as error:
                found.append(f"{_SRT}{name} is missing: {error}")
                continue
            if look is _parameters:
                if wanted not in (["*"], actual):
                    found.append(f"{_SRT}{name}({', '.join(actual)}) was ({', '.join(wanted)})")
            elif missing := [field for field in wanted if field not in actual]:
                found.append(f"{_SRT}{name} lacks {', '.join(missing)}")
    return found


def rocm_differences(contract: ModuleType) -> list[str]:
    """Return what the repair for ROCm would find otherwise than it knows it."""
    found = []
    for name, switches in contract.ROCM_SWITCHES.items():
        try:
            tree = ast.parse(inspect.getsource(import_module(_SRT + name)))
        except (ImportError, OSError) as error:
            found.append(f"{name} is missing: {error}")
            continue
        for flag, (_, wanted) in switches.items():
            if (asking := _functions_with(tree, flag)) != set(wanted.split()):
                found.append(f"{name}: {flag} is looked at by {', '.join(sorted(asking))}")
        for function, wanted in contract.ROCM_CALLS.items():
            calls = _calls(tree, function)
            if not calls or any(call != wanted for call in calls):
                found.append(f"{name}: {function} is called otherwise: {' | '.join(calls)}")
    return found


def _functions_with(tree: ast.AST, name: str) -> set[str]:
    """Return the functions that look at a name of their module."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions for n in ast.walk(f) if getattr(n, "id", None) == name}


def _calls(tree: ast.AST, name: str) -> list[str]:
    """Return how a function is called: the number of positional arguments, then the keywords."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        " ".join([str(len(call.args)), *(str(keyword.arg) for keyword in call.keywords)])
        for call in calls
        if getattr(call.func, "id", None) == name
    ]


def _resolve(name: str) -> Any:
    """Return the object of this name. A module that cannot be imported says why."""
    parts = (_SRT + name).split(".")
    for i, part in enumerate(parts):
        # a class, or a function of the module
        if part.lstrip("_")[:1].isupper() or i == len(parts) - 1:
            target = import_module(".".join(parts[:i]))
            break
    for part in parts[i:]:
        target = getattr(target, part)
    return target


def _fields(target: Any) -> list[str]:
    """Return the names of the fields of a dataclass, or of a struct of msgspec's."""
    return [*(getattr(target, "__struct_fields__", None) or target.__dataclass_fields__)]


def _attributes(target: Any) -> list[str]:
    """Return the names of the attributes of `self` in a class."""
    return re.findall(r"self\.(\w+)", inspect.getsource(target))


def _parameters(target: Any) -> list[str]:
    """Return the parameters' names; `**` stands for any others."""
    # hooks wrap: `inspect.signature` follows `__wrapped__` to what the host wrote
    kinds: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    target = target.fget if isinstance(target, property) else getattr(target, "__func__", target)
    function = inspect.unwrap(target)
    return [kinds.get(p.kind, p.name) for p in inspect.signature(function).parameters.values()]
