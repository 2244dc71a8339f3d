"""What users attach to an issue has no keys and no passwords: planted ones are in no artefact."""

from __future__ import annotations

import json
import os
import shutil
import sys
from base64 import b64encode
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

import talkative

from outrider import redact
from outrider.cli.main import app

VARIABLE, PASSWORD = "planted-variable-1", "planted-password-2"
FLAG, ADMIN, NESTED = "planted-flag-3", "planted-admin-4", "planted-nested-5"
QUERY, HEADER = "planted-query-6", "planted-header-7"
PLANTED = {VARIABLE, PASSWORD, FLAG, ADMIN, NESTED, QUERY, HEADER}
FORMS = {*PLANTED, b64encode(f"me:{PASSWORD}".encode()).decode()}
FLAGS = (
    *("--api-key", FLAG, f"--admin-api-key={ADMIN}"),
    *("--json-model-override-args", json.dumps({"a": {"hf_token": NESTED}})),
)
SHORT = ("--workload", "chat", "--out", "{out}")
TOOLS = {
    "audit": (
        *("audit", "{url}#drafter=none", "{open}", "--count", "1", "--samples", "0"),
        *("--no-chat", "--max-tokens", "3", *SHORT),
    ),
    "bench": (
        *("bench", "{url}", "{open}", "--rounds", "1", "--requests", "1", "--max-tokens", "3"),
        *("--concurrency", "1", "--no-chat", *SHORT),
    ),
    "tune": ("tune", "--engine", "{url}", "--minutes", "0.1", "--concurrency", "1", *SHORT),
    "tune, its own server": ("tune", "--minutes", "0.1", "--model-path", "m", *FLAGS, *SHORT),
    "explain": (
        *("explain", "a", "--url", "{open}", "--target", "target", "--max-tokens", "1"),
        *("--out", "{out}"),
    ),
    "explain, an error": ("explain", "a", "--url", "{url}", "--out", "{out}"),
    "explain, a path": ("explain", "a", "--target", "{url}", "--out", "{out}"),
    "doctor": ("doctor", "--url", "{open}"),
    "doctor, JSON": ("doctor", "--url", "{open}", "--json"),
    "doctor, an error": ("doctor", "--url", "{url}?token=" + QUERY),
    "selftest": ("selftest", "--device", "cpu", "--quick", "--out", "{out}"),
    "selftest, an error": ("selftest", "--device", "cpu", "{url}"),
    "selftest --server": (
        *("selftest", "--server", talkative.TINY, "--quick", "--device", "cpu", "--requests", "2"),
        *("--out", "{out}", "--", *FLAGS),
    ),
    "serve": ("serve", "--profile", "{out}/none?token=" + QUERY, *FLAGS),
    "draft-server": ("draft-server", "{url}", "--socket", "{out}/s"),
    "usage": ("audit", "{url}", "{url}", "{url}"),
    "no address": ("audit", "http://me:" + PASSWORD + "@[bad" + 300 * "x"),
    "no engine": ("audit", "htp://me:" + 300 * "x" + PASSWORD + "@h"),
    "--debug": ("--debug", "audit", "{url}/?token=" + QUERY + "#drafter"),
}


@pytest.fixture(scope="module")
def address():
    with talkative.serving() as found:
        yield found


@pytest.fixture
def artefacts(monkeypatch, tmp_path, address):
    """Return a function that runs a tool, and returns all that it writes and prints, by name."""
    # a package `sglang`, for this process and for those that it starts
    package = tmp_path / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copy(talkative.__file__, package / "launch_server.py")
    code = (package / "launch_server.py").read_text().replace("__file__", repr(talkative.__file__))
    (package / "launch_server.py").write_text(code)
    about = tmp_path / "path" / "sglang-0.5.23.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    monkeypatch.syspath_prepend(str(package.parent))
    paths = [str(package.parent), str(talkative.TESTS.parent / "src")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OPENAI_API_KEY", VARIABLE)
    # the kernels' checks take minutes
    monkeypatch.setattr("outrider.trial.run._kernels", lambda wanted: NO_KERNELS)
    monkeypatch.setattr("outrider.selftest.run.examine", lambda *given: no_checks())
    # another test of this process may have imported Triton
    monkeypatch.setattr("outrider.selftest.run._interpret", lambda: None)
    places = {"open": f"http://{address}", "url": f"http://me:{PASSWORD}@{address}", "out": None}

    def run(tool):
        places["out"] = str(tmp_path / "out")
        args = [arg if arg.startswith('{"') else arg.format(**places) for arg in TOOLS[tool]]
        header = ["-H", f"Authorization: Bearer {HEADER}"]  # no tool's option
        monkeypatch.setattr("sys.argv", ["outrider", *args, *header])
        done = CliRunner().invoke(app, args)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        found = {"stdout": done.stdout, "stderr": done.stderr}
        files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
        return found | {path.name: path.read_text(errors="replace") for path in files}

    return run


NO_KERNELS = {"passed": True, "verdict": "", "checks": [], "measurements": []}
NO_KERNELS |= {"environment": {"device": "CPU"}}


def no_checks():
    from outrider.report import provenance
    from outrider.selftest.report import Report

    return Report(provenance(), {"gpu": None, "device": "CPU", "arch": ""}, [])


def leaks(found):
    return {(name, form) for name, text in found.items() for form in FORMS if form in text}


@pytest.mark.parametrize("tool", TOOLS)
def test_no_artefact_has_a_planted_secret(artefacts, tool):
    found = artefacts(tool)
    assert {*WRITTEN.get(tool, ())} <= {*found}, found["stderr"]
    assert leaks(found) == set()


WRITTEN = {
    "audit": ["audit.html", "audit.json"],
    "bench": ["bench.html", "bench.json"],
    "tune, its own server": ["profile.yaml", "tune.html", "tune.json", "tune.log"],
    "explain": ["explain.html", "explain.json"],
    "selftest": ["selftest.html", "selftest.json"],
    "selftest --server": ["server.html", "server.json", "deterministic-bare.log"],
    "doctor, JSON": ["stdout"],
}


@pytest.mark.parametrize("tool", ["audit", "bench", "usage", "no engine", "explain, an error"])
def test_names_and_form_are_enough(artefacts, tool, monkeypatch):
    """As in a program that uses the package: the command line is another one's."""
    monkeypatch.setattr(redact, "_known", lambda args, variables: ((), None))
    found = {(name, form) for name, form in leaks(artefacts(tool)) if form != VARIABLE}
    assert found == set()


# tune's own server writes its log as that of the selftest does, and takes long
@pytest.mark.parametrize("tool", sorted(WRITTEN.keys() - {"tune, its own server"}))
def test_twin_without_redaction_they_are_there(artefacts, tool, monkeypatch):
    off = {
        redact.hide: lambda text: text,
        redact.redact: lambda text: text,
        redact.redact_args: lambda args: list(args),
        redact.quoted: lambda value, longest: repr(value),
    }
    for function, as_it_is in off.items():  # wherever it was imported
        monkeypatch.setattr(function, "__code__", as_it_is.__code__)
    found = artefacts(tool)
    assert {*WRITTEN[tool]} - {"profile.yaml"} <= {name for name, _ in leaks(found)}
